"""Try whether forwards change attributes of the user's layers, which nothing saves. Imports torch."""

from __future__ import annotations

import logging

import torch

from raypar.actors.data.batches import batch_source
from raypar.actors.errors import first_line
from raypar.actors.models.plain_attributes import plain_attributes
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.run import Run
from raypar.config.layer_calls import may_call, unnoticed
from raypar.config.loss_trial import outputs_of

log = logging.getLogger(__name__)


def warn_of_attributes(run: Run, skeleton: Skeleton) -> None:
    """Log a warning for each layer of which a forward changes a number, a text or a tensor that is no buffer.

    The layers are called with the shapes of the first batch. What depends on values is not seen.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, whose layers nobody has called yet.
    """
    if not may_call(run, skeleton):
        return
    with unnoticed(), torch.no_grad():
        try:
            source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
            inputs = source.inputs("train", 0, 0, 0)
            before = dict(plain_attributes(skeleton.model.names, skeleton.model.skeleton))
            outputs_of(skeleton.model, inputs)
        except Exception as error:  # layers and data are the user's; their faults are found elsewhere
            log.info("which attributes of layers forwards change was not tried: %s", first_line(error))
            return
    after = dict(plain_attributes(skeleton.model.names, skeleton.model.skeleton))
    if changed := [name for name, value in after.items() if before.get(name, value) != value]:
        others = f" and {len(changed) - 1} more change" if len(changed) > 1 else " changes"
        log.warning(
            "%s%s in a forward, and no checkpoint or recovery has it; a recomputation changes it once more: keep it in "
            "a buffer, register_buffer(name, torch.tensor(...)), and write into that",
            changed[0],
            others,
        )
