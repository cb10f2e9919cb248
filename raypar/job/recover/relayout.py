"""Let a run go on in another layout, between two steps: its state goes from actor to actor, as little as possible."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.relayout.moves import (
    Boxes,
    HeldTensors,
    TensorMove,
    TransferGroup,
    assigned,
    lacking,
    moves_between,
)
from raypar.actors.sharding import volume
from raypar.actors.specs.run import Run
from raypar.cluster.calls.calls import Calls
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.ray_cluster import free_cpus_text
from raypar.errors import ConfigError, JobError
from raypar.job.layout.elastic import Layout, Layouts
from raypar.job.recover.active_layout import ActiveLayout
from raypar.job.recover.failures import failure_reason
from raypar.job.recover.snapshots import takes_snapshots
from raypar.job.start.loaded_run import Holds
from raypar.schedules.formatting import size

log = logging.getLogger(__name__)
_LATE = 600.0  # seconds that an actor may wait for another one, which gives to others first
_WORTH = 1.01  # times as many bytes as the least that are moved before actors change their ranks
_LEAVING = 5.0  # seconds in which an actor without a rank forgets what it had


@dataclass(frozen=True)
class Relayout:
    """A run has gone on in another layout.

    Attributes:
        step: Number of steps taken before it.
        before: What the layout before had that this one has not.
        after: What this one has instead.
        needed: Bytes of all parts of the state that actors have now.
        sent: Bytes that actors have sent to each other, as their ledgers count them.
        least: Bytes that actors lacked at least, however those of a node had been given its ranks: no way sends fewer.
        seconds: How long it took.
        launched: Number of actors that were started for it.
    """

    step: int
    before: str = ""
    after: str = ""
    needed: int = 0
    sent: int = 0
    least: int = 0
    seconds: float = 0.0
    launched: int = 0

    def __str__(self) -> str:
        if not self.needed:
            return f"the run has this layout already, after step {self.step}: nothing has moved"
        what = f"{self.after} instead of {self.before}: {size(self.sent)} of {size(self.needed)} moved"
        return f"the run has another layout after step {self.step}, {what}, in {self.seconds:.1f} s"


def relaid(active: ActiveLayout, actors: Actors, layout: Layout, step: int) -> Relayout:
    """Move the state of a run to another layout, all or nothing.

    Actors that are too few are started first; those that are too many end last. If an actor fails before all have what
    they need, the run keeps its previous layout, and can be recovered.

    Args:
        active: The active layout of the run.
        actors: The job's actors.
        layout: The other layout, checked.
        step: Number of steps taken.

    Raises:
        ConfigError: There is no room for the actors that it needs. Nothing has moved.
        JobError: It failed; the run can be recovered.
    """
    start, before = time.monotonic(), active.layouts.whole.run
    launched = demand_actors(actors, layout.world.size, active.name, "relayout")
    whole = Layouts(layout, active.loaded.skeleton)
    holds, sent, state = _moved(active, actors, layout, step)
    active.commit(holds, whole)
    others = active.others
    others.answers(range(len(others.handles)), "leave", seconds=_LEAVING)
    actors.shrink(layout.world.size + layout.run.spares)
    was, now = differences(before, layout.run)
    return Relayout(step, was, now, state.needed, sent, state.least, time.monotonic() - start, launched)


def rebuilt(active: ActiveLayout, actors: Actors, step: int) -> None:
    """Build a run anew on the actors that it has, with the state that they have, in new groups.

    Args:
        active: The run, whose actors live, have aborted their groups and wait for a call.
        actors: The job's actors.
        step: Number of steps taken.

    Raises:
        JobError: It failed; the run can be recovered.
    """
    holds, _, _ = _moved(active, actors, active.layout, step)
    active.commit(holds)


def _moved(active: ActiveLayout, actors: Actors, layout: Layout, step: int) -> tuple[Holds, int, _State]:
    """Move the state of a run to a layout, for which there are enough actors.

    Args:
        active: The active layout of the run.
        actors: The job's actors.
        layout: The layout.
        step: Number of steps taken.

    Returns:
        By rank, the shard of each of its parameters; the bytes that were sent; and what was needed.

    Raises:
        JobError: It failed; the run can be recovered.
    """
    if takes_snapshots(active.layouts.whole.run):
        active.loaded.calls.all("begin_snapshots", step, what="taking snapshots")
    given: list[HeldTensors] = active.loaded.calls.all("hand_over", what="handing the state over")
    active.loaded.calls.all("leave", True, what="leaving groups")
    old, handles, source = active.layout, list(actors.handles), active.snapshots.source
    state = _State({id(handle): holding for handle, holding in zip(handles, given, strict=False)})
    try:
        holds, sent = _passed_on(active, actors, layout, state)
        if takes_snapshots(layout.run):
            active.share()
        active.begin(step)
    except JobError as error:
        if active.snapshots.source == source:
            numbers = {id(handle): number for number, handle in enumerate(actors.handles)}
            active.change(old, [numbers[id(handle)] for handle in handles[: old.world.size]])
            raise
        log.warning("%s", failure_reason(error))  # all have what they need, and snapshots of it: the next step recovers
    return holds, sent, state


def differences(before: Run, after: Run) -> tuple[str, str]:
    """Return in words what the layouts of two runs have that the other has not, as "pp=2" and "tp=2"."""
    was, now = list[str](), list[str]()
    for axis in Mesh.__dataclass_fields__:
        one, other = getattr(before.mesh, axis), getattr(after.mesh, axis)
        if one != other:
            was += [f"{axis}={one}"] if one != getattr(Mesh(), axis) else []
            now += [f"{axis}={other}"] if other != getattr(Mesh(), axis) else []
    for field in ("zero", "schedule", "chunks", "data_parallel", "servers", "offload", "recompute", "tile"):
        one, other = getattr(before, field), getattr(after, field)
        if one != other:
            for words, value in ((was, one), (now, other)):
                words += [] if value is None else [f"{field}={value if isinstance(value, int | str) else 'other'}"]
    if before.precision != after.precision:
        was.append(before.precision.compute)
        now.append(after.precision.compute)
    alone = "one replica of one stage" if before.mesh != after.mesh else "other settings"
    return " ".join(was) or "those before", " ".join(now) or alone


def demand_actors(actors: Actors, count: int, name: str, what: str) -> int:
    """Start the actors that are too few, and return their number.

    Args:
        actors: The job's actors.
        count: Number of actors that are needed.
        name: The job's name.
        what: What they are needed for, for the message.

    Raises:
        ConfigError: There is no room for them.
    """
    missing = count - actors.present
    if missing <= 0:
        return 0
    if not actors.grow(count, f"{name} further"):
        fix = "use a smaller mesh, or a larger cluster"
        need = f"{count} actors are needed, {missing} more than there are"
        raise ConfigError([f"{what}: mesh: {need}, and no node has room for them ({free_cpus_text()}): {fix}"])
    return missing


@dataclass(frozen=True)
class _Names:
    """The names of actors that take part in a relayout: by rank, and then those that have none in the new layout.

    Attributes:
        world: The ranks of the new layout.
    """

    world: World

    def label(self, rank: int) -> str:
        """Name an actor in messages."""
        return self.world.label(rank) if rank < self.world.size else "that leaves the run"


class _State:
    """What actors have of the state of a run, and what is needed in its new layout.

    Args:
        holdings: What each actor has, by the identity of its handle.

    Attributes:
        kinds: All logical tensors.
        wanted: By rank of the new layout, what is needed there.
        needed: Bytes of all that.
        least: Bytes that actors lack at least, however the actors of each node are assigned to its ranks.
    """

    def __init__(self, holdings: Mapping[int, HeldTensors]) -> None:
        self._holdings = holdings
        self.kinds = {name: kind for holding in holdings.values() for name, kind in holding.kinds.items()}
        self._sizes = {name: kind.itemsize for name, kind in self.kinds.items()}
        self.wanted: Sequence[Boxes] = ()
        self.needed = self.least = 0

    def better(self, handles: Sequence[Any], nodes: Sequence[str]) -> list[int] | None:
        """Return by rank the number of an actor, if so fewer bytes move than with the actors in their order.

        Actors change ranks on their node only, so that tensor groups stay together.

        Args:
            handles: The actors: by rank, and then those without one.
            nodes: By rank, what the actors of one node have in common.
        """
        sizes, held = self._sizes, [self._held(handle) for handle in handles]
        self.needed = sum(
            volume(box) * sizes[name] for of in self.wanted for name, boxes in of.items() for box in boxes
        )
        actors_on, ranks_on = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for number, node in enumerate([*nodes, *[""] * (len(handles) - len(nodes))]):
            actors_on[node].append(number)
        for rank in range(len(self.wanted)):
            ranks_on[nodes[rank]].append(rank)
        found, now, self.least = list(range(len(self.wanted))), 0, 0
        for node, ranks in ranks_on.items():
            numbers = actors_on[node]
            costs = lacking([held[number] for number in numbers], [self.wanted[rank] for rank in ranks], sizes)
            for rank, row, column in zip(ranks, costs, assigned(costs), strict=True):
                found[rank] = numbers[column]
                now += row[numbers.index(rank)]
                self.least += row[column]
        return found if now > _WORTH * self.least else None

    def moves(self, handles: Sequence[Any], nodes: Sequence[str]) -> list[TensorMove]:
        """Plan what each actor gets from whom; see ``moves_between``. Raises JobError if nobody has a part."""
        rest = len(handles) - len(self.wanted)
        held, where = [self._held(handle) for handle in handles], [*nodes, *[""] * rest]
        try:
            return moves_between(held, [*self.wanted, *[{}] * rest], self._sizes, where)
        except LookupError as error:
            raise JobError(f"the relayout failed: {error}") from error

    def _held(self, handle: Any) -> Boxes:
        holding = self._holdings.get(id(handle))
        return {} if holding is None else holding.boxes


def _passed_on(active: ActiveLayout, actors: Actors, layout: Layout, state: _State) -> tuple[Holds, int]:
    """Let actors join a layout, give what they have to those that need it, and load it.

    Args:
        active: The run, whose actors have left their groups.
        actors: The job's actors.
        layout: The layout.
        state: What they have.

    Returns:
        By rank, the shard of each of its parameters; and the bytes that were sent.

    Raises:
        JobError: An actor failed.
    """
    numbers: Sequence[int] | None = range(layout.world.size)
    while numbers is not None:
        if state.wanted:  # they have joined it in another order, in which more would move
            active.loaded.calls.all("leave", True, what="leaving groups")
        is_first = not state.wanted
        active.change(layout, numbers)
        holds = active.join(None, again=True, has_begun=True)
        state.wanted = active.loaded.calls.all("want", state.kinds, what="listing what is needed")
        nodes = [one.memory_domain for one in active.processes]
        numbers = state.better(actors.handles, nodes) if is_first else None
    moves = state.moves(actors.handles, nodes)
    ranked = layout.world.size
    taking_part = [*range(ranked), *sorted({move.source for move in moves} - {*range(ranked)})]
    rank_of = {number: rank for rank, number in enumerate(taking_part)}
    moves = [TensorMove(rank_of[source], rank_of[to], tensor, box) for source, to, tensor, box in moves]
    of_each = [list[TensorMove]() for _ in taking_part]
    for move in moves:
        for rank in {move.source, move.destination}:
            of_each[rank].append(move)
    sends, name = any(move.is_sent for move in moves), f"{active.name}/relayout"
    refs = [
        actors.handles[number].pass_on.remote(
            of_each[rank], TransferGroup(name, len(taking_part), rank, _LATE) if sends else None
        )
        for rank, number in enumerate(taking_part)
    ]
    calls = Calls([actors.handles[number] for number in taking_part], _Names(layout.world), _LATE, replaces=True)
    found = calls.gather(refs, "the relayout")
    return holds, sum(sent.get("send", 0) for sent in found)
