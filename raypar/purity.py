"""Whether the user's own batches are what they have to be: functions of (step, microbatch, dp), and of nothing else."""

from __future__ import annotations

import logging

from raypar.actors.batches import FunctionSource
from raypar.actors.digest import digest
from raypar.actors.specs import Batches
from raypar.config import ConfigError, Run

log = logging.getLogger(__name__)


def demand_pure(run: Run) -> None:
    """Ask for the first batch of two replicas twice; a warning if it is the same for both.

    Raises ConfigError if it is another one the second time: inputs and targets, which different actors ask for, would
    not belong together.
    """
    if not isinstance(run.data, Batches):
        return
    source = FunctionSource(run.data)

    def batch(dp: int) -> bytes:
        place = 0, 0, dp
        values = source.inputs("train", *place) + source.targets("train", *place)
        return digest({str(number): value for number, value in enumerate(values)})

    first = [batch(dp) for dp in range(min(2, run.mesh.dp))]
    if [batch(dp) for dp in range(len(first))] != first:
        raise ConfigError(
            [
                "data.fn gives another batch when it is asked for the same one again: make it a function of "
                "(step, microbatch, dp) alone, with torch.Generator().manual_seed(...) of these for what is random"
            ]
        )
    if len(set(first)) < len(first):
        log.warning("data.fn gives replicas 0 and 1 the same samples: have it look at dp")
