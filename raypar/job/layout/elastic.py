"""The layouts in which a run can go on: with all its replicas, or with fewer, which take the same samples in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raypar.actors.data.batches import Renumbered
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.run import check_run, unrecorded
from raypar.config.schedule import Programs
from raypar.errors import ConfigError
from raypar.planner.resource_needs import memory_faults


@dataclass(frozen=True, eq=False)
class Layout:
    """A run with some number of replicas.

    Attributes:
        run: The run.
        programs: Its lowered schedules.
    """

    run: Run
    programs: Programs

    @cached_property
    def world(self) -> World:
        """All ranks of the run."""
        return world_of(self.run)


class Layouts:
    """All layouts of a run, from the one that it was launched in to those with fewer replicas.

    Args:
        whole: The run as it was launched.
        skeleton: Its model without weights.

    Attributes:
        whole: The run as it was launched.
    """

    def __init__(self, whole: Layout, skeleton: Skeleton) -> None:
        self.whole, self._skeleton = whole, skeleton
        self._checked: dict[int, Layout | ConfigError] = {}

    @cached_property
    def _fewer(self) -> dict[int, int]:
        """The numbers of replicas that it may go on with, from most to fewest, and the actors that each needs."""
        run = self.whole.run
        ways = [dp for dp in range(run.mesh.dp - 1, run.min_dp - 1, -1) if _of_step(run) % dp == 0]
        return {dp: world_of(with_replicas(run, dp)).size for dp in ways}

    def largest(self, actors: int) -> Layout | None:
        """Return the layout with the most replicas for which so many actors are enough; None if there is none."""
        if actors >= self.whole.world.size:
            return self.whole
        found = (self._with(dp) for dp, size in self._fewer.items() if size <= actors)
        return next((layout for layout in found if isinstance(layout, Layout)), None)

    def why_none(self) -> str:
        """Return the reason why the run does not go on with fewer replicas."""
        run = self.whole.run
        if run.mesh.dp == 1:
            return "with mesh.dp 1 it has no replica that it could do without"
        if run.min_dp == run.mesh.dp:
            return f"min_dp is {run.min_dp}, so it does not go on with fewer replicas"
        for dp, found in self._checked.items():
            if isinstance(found, ConfigError):
                return f"it can't go on with mesh.dp {dp}: {'; '.join(found.faults)}"
        if not self._fewer:
            many = f"a step's {_of_step(run)} microbatches"
            return f"no smaller number of replicas, from min_dp {run.min_dp} on, divides {many}"
        return f"there are too few actors to go on with {min(self._fewer)} of {run.mesh.dp} replicas"

    def _with(self, dp: int) -> Layout | ConfigError:
        """Return the layout with so many replicas, or what is wrong with it."""
        if dp not in self._checked:
            run = with_replicas(self.whole.run, dp)
            try:
                programs = check_run(replace(unrecorded(run), nonfinite="stop"), skeleton=self._skeleton)
                ConfigError.raise_if(memory_faults(run, programs["train"], self._skeleton, replaces=True))
                self._checked[dp] = Layout(run, programs)
            except ConfigError as error:
                self._checked[dp] = error
        return self._checked[dp]


def with_replicas(run: Run, dp: int) -> Run:
    """Return a run with fewer replicas, which takes the same samples in a step under the same numbers.

    What replicas share out among them is shared out among those that are left: weights (``shard``) and experts. Where
    one replica is left, it holds all of them, and there is nothing to share out, or to compare.

    Args:
        run: The run.
        dp: Number of replicas, which divides the microbatches of all replicas together.
    """
    mesh = _with_dp(run.mesh, dp)
    changes: dict[str, object] = {"mesh": mesh, "microbatches": _of_step(run) // dp}
    if isinstance(run.data, Batches):
        changes["data"] = renumbered(run.data, run.mesh.dp, dp)
    if mesh.shards == 1 and (run.zero or 0) > 1:
        changes |= {"zero": None} | ({} if run.offload == "parameters" else _GATHERS_NONE)
    if mesh.dp == 1:
        changes |= {"recheck_every": 0} | ({"check_every": 0} if mesh.cp == 1 else {})
    if not mesh.divides_experts:
        changes |= {"expert_shadows": 0, "expert_rounds": 1, "expert_order": {}}
    fewer: Run = replace(run, **changes)  # type: ignore[arg-type]
    return replace(fewer, shared_gpu="staged") if world_of(fewer).size == 1 else fewer


def _of_step(run: Run) -> int:
    """Return the number of microbatches of a step, of all replicas together."""
    return run.mesh.dp * run.microbatches


_GATHERS_NONE = {
    field: getattr(Run, field) for field in ("zero_units", "zero_gather", "zero_resident", "reshard_after_forward")
}


def _with_dp(mesh: Mesh, dp: int) -> Mesh:
    """Return a mesh with fewer replicas, in which sharded weights and experts are divided into as many parts as fit."""
    replicas = dp * mesh.cp
    as_many = range(min(mesh.shard or 1, replicas), replicas + 1)
    shard = None if mesh.shard is None else next(ways for ways in as_many if replicas % ways == 0)
    for ep in (ways for ways in range(mesh.ep, 0, -1) if mesh.ep % ways == 0):
        smaller = replace(mesh, dp=dp, shard=shard, ep=ep, etp=None if ep == 1 else mesh.etp)
        if not any(smaller.faults(lambda *_: True)):
            return smaller
    return replace(mesh, dp=dp, shard=shard)  # the caller reports its faults


def renumbered(data: Batches, made_for: int, dp: int) -> Batches:
    """Return data whose functions get the same microbatch numbers from another number of replicas.

    Args:
        data: The data.
        made_for: Number of replicas that call its functions now.
        dp: Number of replicas that will.
    """
    validate = data.validate and _numbered(data.validate, made_for, dp)
    return replace(data, fn=_numbered(data.fn, made_for, dp), validate=validate)


def _numbered(fn: Callable[..., Any], made_for: int, dp: int) -> Callable[..., Any]:
    """Return a batch function for another number of replicas; the user's function if the number is the original one."""
    if isinstance(fn, Renumbered):
        made_for, fn = fn.made_for, fn.fn
    return fn if made_for == dp else Renumbered(fn, made_for, dp)
