"""The active layout of a run on a job's actors: which actor has which rank, their groups, and their snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raypar.actors.machine.process_identity import ProcessIdentity, own_identity
from raypar.actors.mesh.world import World
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.find import VerifiedCheckpoint, newest, newest_listed
from raypar.cluster.calls.calls import Calls
from raypar.cluster.lifecycle.replacement_actors import nodes_of
from raypar.errors import JobError
from raypar.job.layout.elastic import Layout, Layouts
from raypar.job.recover.snapshots import Snapshots
from raypar.job.start.actor_plans import begun, plans_of
from raypar.job.start.clocks import align
from raypar.job.start.lifetime import HEARD, Lifetime
from raypar.job.start.loaded_run import Holds, LoadedRun, loaded_on
from raypar.paths import CHECKPOINTS, absolute
from raypar.planner.utilisation import Utilisation, utilisation_of

Moved = Callable[[LoadedRun, Holds, Run | None], None]
"""called when the run goes on in another layout, with the loaded run, the shards of its ranks, and the run itself if it
is another one"""


class _Role(NamedTuple):
    """The role of a rank in a layout. Servers and expert actors belong to no replica.

    Attributes:
        pp: Its pipeline rank.
        dp: Its replica, as numbered in the previous layout; None for a server or expert actor.
        inner: Its number among the actors of its pipeline rank in that replica, or among servers and expert actors.
    """

    pp: int
    dp: int | None
    inner: int


def rank_assignment(before: World, after: World, present: Collection[int], spares: Iterable[int]) -> list[int]:
    """Choose the actor of each rank of a layout. Actors keep their roles if possible, so tensor groups stay together.

    If there are fewer replicas, the replicas with most actors present stay; actors of the others fill their gaps.

    Args:
        before: The ranks of the previous layout.
        after: The ranks of the next layout, which may have more or fewer replicas. Enough actors are present.
        present: The ranks of the previous layout whose actors are present.
        spares: Numbers of actors that had no rank.

    Returns:
        By rank, the previous rank of its actor, or the number of a spare.
    """
    ranks = sorted(present)
    by_rank = dict(zip(ranks, _roles(before, ranks), strict=True))
    found = Counter(role.dp for role in by_rank.values())
    fullest = sorted(range(before.mesh.dp), key=lambda dp: (-found[dp], dp))
    stays = dict(enumerate(sorted(fullest[: after.mesh.dp])))  # by replica, its number before
    by_role = {role: rank for rank, role in by_rank.items()}
    roles = _roles(after, range(after.size), stays)
    staying = {by_role[role] for role in roles if role in by_role}
    free = iter([*(rank for rank in ranks if rank not in staying), *spares])
    return [by_role[role] if role in by_role else next(free) for role in roles]


def _roles(world: World, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> list[_Role]:
    """Return the roles of ranks.

    Args:
        world: The ranks of their layout.
        ranks: The ranks.
        before: By replica, its number in the previous layout; None if this is the previous layout.
    """
    beyond = Counter[int]()  # by pipeline rank, the number of servers and expert actors so far
    numbers = dict[int, int]()
    for rank in range(world.mesh.size, world.size):
        numbers[rank] = beyond[world.pp(rank)]
        beyond[world.pp(rank)] += 1
    found = list[_Role]()
    for rank in ranks:
        if rank in numbers:
            found.append(_Role(world.pp(rank), None, numbers[rank]))
        else:
            dp, inner = divmod(rank % world.mesh.inner, world.mesh.cp * world.mesh.tensor_ranks)
            found.append(_Role(world.pp(rank), dp if before is None else before.get(dp, -1), inner))
    return found


@dataclass
class ActiveLayout:
    """The active layout of a run on a job's actors.

    Attributes:
        lifetime: The life of the job's actors.
        job: The job's name.
        device: Device that the actors compute on.
        faults: Faults that are injected on purpose.
        moved: See ``Moved``.
        snapshots: The actors' snapshots.
        processes: By rank, the process of its actor.
        utilisation: What the run's samples are of the peak of its GPUs; None if that is not known.
        loaded: The run in the layout that it has now.
        layout: That layout.
        layouts: All layouts of the run.
    """

    lifetime: Lifetime
    job: str
    device: DeviceKind
    faults: Sequence[InjectedFault]
    moved: Moved
    snapshots: Snapshots = field(default_factory=Snapshots)
    processes: Sequence[ProcessIdentity] = ()
    utilisation: Utilisation | None = None
    _generation: int = 0  # how often actors have joined groups
    _number: int = 0  # how often the layout has changed

    def load(self, loaded: LoadedRun, layouts: Layouts, found: VerifiedCheckpoint | None) -> None:
        """Replace the run by another one, without calling its actors yet.

        Args:
            loaded: The run.
            layouts: Its layouts, of which it has the whole one.
            found: The checkpoint that it begins with; None for a new run.
        """
        self.loaded = self._reported = loaded
        self._found, self.layouts = found, layouts
        self.layout, self._number = layouts.whole, self._number + 1
        self.snapshots.close()

    @property
    def others(self) -> Calls:
        """Calls to the actors that have no rank."""
        world, timeout = self.loaded.world, self.loaded.run.timeout
        return Calls(self.lifetime.actors.handles[world.size :], world, timeout)

    def share(self) -> Sequence[Any]:
        """Make every process hold the snapshots of all actors of its node; see ``Snapshots.share``."""
        return self.snapshots.share(self.loaded, self.others)

    def assign(self, layout: Layout, present: Sequence[int]) -> None:
        """Assign the ranks of a layout to actors.

        Args:
            layout: The layout.
            present: The ranks of the present layout whose actors are alive and stay.
        """
        actors, world = self.lifetime.actors, self.loaded.world
        others = [number for number in range(world.size, len(actors.handles)) if actors.stays(number)]
        actors.assign_ranks(rank_assignment(world, layout.world, present, others))
        if layout is self.layout:
            for rank in range(world.size):
                self.loaded.calls.replace(rank, actors.handles[rank])
            return
        self._change(layout)

    def change(self, layout: Layout, numbers: Sequence[int]) -> None:
        """Change the layout; the actors must join groups next.

        Args:
            layout: The layout.
            numbers: By rank, the previous number of its actor.
        """
        self.lifetime.actors.assign_ranks(numbers)
        self._change(layout)

    def commit(self, holds: Holds, layouts: Layouts | None = None) -> None:
        """Go on in the present layout, on actors that have built the run.

        Args:
            holds: By rank, the shard of each of its logical parameters.
            layouts: The layouts, if the present one becomes the full-size one, which a shrunk run returns to.
        """
        self._reported, self.layouts = self.loaded, layouts or self.layouts
        self.moved(self.loaded, holds, None if layouts is None else layouts.whole.run)

    def again(self, taken: int, found: VerifiedCheckpoint | None = None) -> tuple[int, str]:
        """Start the run again on its actors. Returns after which step it goes on, and where its state is from.

        Args:
            taken: Number of steps that the driver has reports of. Actors may have taken another one.
            found: The checkpoint to go back to if there are no snapshots; None for the newest.
        """
        loaded, others = self.loaded, self.others
        found = found or self._newest()
        saved = 0 if found is None else found.manifest.step
        is_there = found is not None or bool(self.snapshots.source)
        holds = self.join(None, again=True, restores=is_there)
        steps = self.snapshots.share(loaded, others)
        common = self.snapshots.common(steps, taken)
        if is_there and common is None and found is None:  # the snapshots are lost: the run begins with its first step
            loaded.calls.all("leave", True, what="leaving groups")
            holds = self.join(None, again=True)
        from_memory = common is not None and common >= saved
        if common is not None and from_memory:
            self.snapshots.restore(loaded, others, steps, common, self.processes)
        elif found is not None:
            if not found.path.exists():
                raise JobError(
                    f"the run began with {found.path}, which is there no more: nothing is left to go back to"
                )
            loaded.load(found)
        back_to = common if common is not None and from_memory else saved
        self.begin(back_to)
        if loaded is not self._reported:
            self.commit(holds)
        return back_to, "memory" if from_memory else "" if found is None else found.path.name

    def join(
        self,
        found: VerifiedCheckpoint | None,
        *,
        again: bool = False,
        has_begun: bool = False,
        restores: bool = False,
    ) -> Holds:
        """Make the actors join new groups and build the run, and load a checkpoint if there is one.

        Args:
            found: The checkpoint.
            again: Whether the actors have built the run before.
            has_begun: Whether the initial weights of the run are not needed, as they are replaced.
            restores: Whether the trained ones of them are not needed.
        """
        self._generation += 1
        self.snapshots.are_kept_for_stop = False
        loaded, named = self.loaded, (self.job, self._generation, self.device)
        is_begun = has_begun or self._found is not None
        run, is_loaded = begun(loaded.run, loaded.skeleton) if is_begun else loaded.run, is_begun or restores
        plans = plans_of(run, self.layout.programs, *named, self.faults, self._number, is_loaded=is_loaded)
        holds = loaded.start(plans, found, again=again)
        located = loaded.calls.answers(range(loaded.world.size), "located", seconds=HEARD, group="ctl")
        unknown, ranks = ProcessIdentity(), range(loaded.world.size)
        self.processes = [located[rank].process if rank in located else unknown for rank in ranks]
        bundles, here = self.lifetime.actors.bundles, own_identity().pid_domain
        others = [rank for rank, at in located.items() if at.process.pid_domain != here]
        elsewhere = dict(zip(others, nodes_of(bundles[rank] for rank in others), strict=True))
        self.lifetime.witnesses.know({rank: at for rank, at in located.items() if at.process.pid_domain}, elsewhere)
        align(loaded.calls, located)
        self.utilisation = utilisation_of(loaded.run, [at.gpu for at in located.values()])
        return holds

    def begin(self, step: int) -> None:
        """Make the actors go on after a step with snapshots of it; see ``Snapshots.begin``."""
        self.snapshots.begin(self.loaded, self._number, self.others, step, self.processes)

    def keep_snapshots(self, step: int) -> None:
        """Make the actors take snapshots from now on, of this step first, though the run does not survive failures."""
        self.loaded.calls.all("keep_snapshots", what="taking snapshots")
        self.snapshots.are_kept_for_stop = True
        self.share()
        self.begin(step)

    @property
    def name(self) -> str:
        """A name that is unique for this job and the groups that its actors have joined last."""
        return f"{self.job}@{self._generation}"

    def _change(self, layout: Layout) -> None:
        self.layout, self._number = layout, self._number + 1
        self.loaded = loaded_on(self.lifetime, layout.run, layout.programs, self.loaded.skeleton)

    def resume_point(self) -> tuple[int, str]:
        """Return after how many steps the run goes on in another job, and the checkpoint's name; "" if there is none.

        Only manifests are read, not the checkpoints themselves.
        """
        folder = self.loaded.run.folder
        if folder is not None and (saved := newest_listed(absolute(folder) / CHECKPOINTS)) is not None:
            return saved.step, saved.path.name
        return (0, "") if self._found is None else (self._found.manifest.step, self._found.path.name)

    def _newest(self) -> VerifiedCheckpoint | None:
        """Return the newest checkpoint of the run, or else the one that it began with."""
        folder = self.loaded.run.folder
        saved = None if folder is None else newest(absolute(folder) / CHECKPOINTS)
        return saved or self._found
