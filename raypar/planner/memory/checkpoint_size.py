"""The size of a checkpoint."""

from __future__ import annotations

from raypar.actors.specs.run import Run
from raypar.planner.memory.worker import ParameterCounts, element_bytes, states_of


def checkpoint_bytes(run: Run, counts: ParameterCounts, parameters: int) -> int:
    """Return the bytes of a checkpoint's tensors: all weights and the optimizer's state of each, in the masters' dtype.

    Args:
        run: The run.
        counts: Its parameters by pipeline rank, which say how much state there is to a weight.
        parameters: The parameters of the whole model.
    """
    each = element_bytes(run).state
    return each * parameters + round(each * parameters * sum(states_of(run, counts)) / max(1, sum(counts.held)))
