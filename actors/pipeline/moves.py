"""The moves of an actor's stages: what performs OFFLOAD and RELOAD."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raypar.actors.data_parallel.high_water import HighWater
from raypar.actors.pipeline.host_memory import HostMemory
from raypar.actors.pipeline.stage import Stage
from raypar.schedules.action import Action, Op


def move_activations(stages: Mapping[int, Stage]) -> None:
    """Let the graphs of an actor's stages keep what can be moved, and count the bytes of all of them in one."""
    held = HighWater()
    for stage in stages.values():
        stage.host = HostMemory(held)


def moves_of(
    stages: Mapping[int, Stage], in_all: Callable[[int], tuple[int, int]]
) -> Mapping[Op, Callable[[Action], None]]:
    """Return what performs OFFLOAD and RELOAD.

    Args:
        stages: The actor's stages, by number.
        in_all: Returns the step, and the number in the whole step, of a microbatch of the row.
    """

    def move(action: Action) -> None:
        assert action.stage is not None and action.microbatch is not None
        host = stages[action.stage].host
        assert host is not None
        (host.offload if action.op is Op.OFFLOAD else host.reload)(*in_all(action.microbatch))

    return {Op.OFFLOAD: move, Op.RELOAD: move}
