"""The actions OFFLOAD and RELOAD: moves of activations between an actor's device and its host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raypar.actors.machine.high_water import HighWater
from raypar.actors.pipeline.offloaded_activations import OffloadedActivations
from raypar.actors.pipeline.stage import Stage
from raypar.schedules.action import Action, Op


def move_activations(stages: Mapping[int, Stage]) -> None:
    """Make the activations of an actor's stages movable, and count their bytes in host memory together."""
    held = HighWater()
    for stage in stages.values():
        stage.host = OffloadedActivations(held)


def moves_of(
    stages: Mapping[int, Stage], in_all: Callable[[int], tuple[int, int]]
) -> Mapping[Op, Callable[[Action], None]]:
    """Return the functions that perform OFFLOAD and RELOAD.

    Args:
        stages: The actor's stages, by number.
        in_all: Returns the step of a microbatch of the row, and its number in the whole step.
    """

    def move(action: Action) -> None:
        assert action.stage is not None and action.microbatch is not None
        host = stages[action.stage].host
        assert host is not None
        (host.offload if action.op is Op.OFFLOAD else host.reload)(*in_all(action.microbatch))

    return {Op.OFFLOAD: move, Op.RELOAD: move}
