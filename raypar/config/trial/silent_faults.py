"""Warn of faults in the user's layers that raise no error: shared buffers, and attributes that nothing saves.

Imports torch.
"""

from __future__ import annotations

import logging

import torch

from raypar.actors.data.batches import batch_source
from raypar.actors.errors import first_line
from raypar.actors.models.init.unregistered import plain_attributes, shared_buffers, unsearched
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.worker.build.weight_owners import ranks_of_layers
from raypar.config.trial.calls import may_call, tried_as, unnoticed
from raypar.config.trial.loss import outputs_of
from raypar.schedules.schedule import Schedule

log = logging.getLogger(__name__)


def warn_of_layers(run: Run, skeleton: Skeleton, schedule: Schedule) -> None:
    """Log a warning for each buffer that layers on different actors share, and for layers that can't be searched.

    Each actor would have a buffer of its own, and weights that a layer uses of another actor's layer are not noticed if
    it refers to too many objects.

    Args:
        run: The run.
        skeleton: Its model without weights.
        schedule: The lowered schedule of a training step, which places the layers.
    """
    if not isinstance(run.model, Layers) or schedule.num_ranks == 1:
        return
    ranks, names = ranks_of_layers(skeleton.model, run.split, schedule), skeleton.model.names
    for (one, buffer), (other, alias) in shared_buffers(skeleton.model.skeleton):
        if ranks[one] != ranks[other]:
            log.warning(
                "%s.%s and %s.%s are one buffer, but on different actors, pp=%d and pp=%d, which each keep their own: "
                "what one layer writes the other does not see; give both layers to one stage with split, or each its "
                "own buffer",
                *(names[one], buffer, names[other], alias, ranks[one], ranks[other]),
            )
    for index in unsearched(skeleton.model.skeleton):
        log.warning(
            "%s refers to more objects than can be looked at: if it uses a weight of a layer on another actor without "
            "registering it, that is not noticed, and the weight there is never trained; keep large tables out of the "
            "layer, as one tensor or array",
            names[index],
        )


def warn_of_attributes(run: Run, skeleton: Skeleton) -> None:
    """Log a warning for each layer of which a forward changes a number, a text or a tensor that is no buffer.

    The layers are called with the shapes of the first batch. What depends on values is not seen.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, which stays as it is.
    """
    if not may_call(run, skeleton):
        return
    with unnoticed(), torch.no_grad(), tried_as(run):
        try:
            source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
            inputs = source.inputs("train", 0, 0, 0)
            model = skeleton.copy().model
            before = dict(plain_attributes(model.names, model.skeleton))
            outputs_of(model, inputs)
        except Exception as error:  # layers and data are the user's; their faults are found elsewhere
            log.info("which attributes of layers forwards change was not tried: %s", first_line(error))
            return
    after = dict(plain_attributes(model.names, model.skeleton))
    if changed := [name for name, value in after.items() if before.get(name, value) != value]:
        others = f" and {len(changed) - 1} more change" if len(changed) > 1 else " changes"
        log.warning(
            "%s%s in a forward, and no checkpoint or recovery has it; a recomputation changes it once more: keep it in "
            "a buffer, register_buffer(name, torch.tensor(...)), and write into that",
            changed[0],
            others,
        )
