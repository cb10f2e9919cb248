"""What goes unnoticed when the user's own layers are on different actors. Imports torch."""

from __future__ import annotations

import logging

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.unregistered import shared_buffers, unsearched
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.worker.build.weight_owners import ranks_of_layers
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
    homes, names = ranks_of_layers(skeleton.model, run.split, schedule), skeleton.model.names
    for (one, buffer), (other, alias) in shared_buffers(skeleton.model.skeleton):
        if homes[one] != homes[other]:
            log.warning(
                "%s.%s and %s.%s are one buffer, but on different actors, pp=%d and pp=%d, which each keep their own: "
                "what one layer writes the other does not see; give both layers to one stage with split, or each its "
                "own buffer",
                *(names[one], buffer, names[other], alias, homes[one], homes[other]),
            )
    for index in unsearched(skeleton.model.skeleton):
        log.warning(
            "%s refers to more objects than can be looked at: if it uses a weight of a layer on another actor without "
            "registering it, that is not noticed, and the weight there is never trained; keep large tables out of the "
            "layer, as one tensor or array",
            names[index],
        )
