"""Actors without torch, thousands in a few processes: a handle that adds its number to each call stands for one.

They answer all that a driver asks workers for, after delays of their own, with answers that agree with each other: the
parts of tensors that they have follow from their plans, and so do the shards that they write. Faults that a run is
launched with happen to them too: a ``kill`` ends the process of the stand-in, which must be its own; one that is to
``stop`` answers nothing more, a ``delay`` makes it late, and one that is to ``corrupt`` what it has is stuck in a step,
and always tells of another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from pathlib import Path
from typing import Any, NamedTuple

from raypar.actors.checkpoint.logical import Logical, Stored
from raypar.actors.checkpoint.reports import ShardReport, shard_report
from raypar.actors.checkpoint.shards import ShardFile
from raypar.actors.checkpoint.snapshot_address import Address, SnapshotOwner
from raypar.actors.errors import ActionError
from raypar.actors.machine.process_identity import ProcessIdentity
from raypar.actors.relayout.moves import HeldTensors, Kind
from raypar.actors.relayout.share_index import ShareContents, ShareIndex
from raypar.actors.safetensors_header import beginning_of
from raypar.actors.sharding import Shard, volume
from raypar.actors.specs.results import Located, Progress, Span, StepResult
from raypar.cluster.deaths.process_monitor import ProcessReport
from tests.support.stand_in_parts import boxes_of, contents_of, nbytes_of, parts_of, saved_parts

BESIDE = ("progress", "located", "now", "abort", "write")  # what is answered during a step
_OF_KEEPER = {  # by the method of a SnapshotKeeper, the one that replaces it
    "addresses": "snapshot_addresses",
    "hold": "hold_snapshots",
    "steps": "snapshot_steps",
    "drop_old": "drop_old_snapshots",
    "begin_copies": "begin_copies",
    "contents": "snapshot_contents",
}


class Pace(NamedTuple):
    """How long stand-ins take, in seconds.

    Attributes:
        step: A training step that is one call.
        action: An action that is a call of its own.
        jitter: By which share of that they differ from each other at the most.
    """

    step: float = 0.0
    action: float = 0.0
    jitter: float = 0.1


class Key(NamedTuple):
    """Which stand-in of a process a call is for.

    Attributes:
        number: Its number, of no other one.
        node: The node that it is on, as far as anybody is told.
    """

    number: int
    node: str


@dataclass(frozen=True)
class StandInAddress(Address):
    """Where snapshots of a stand-in are.

    Attributes:
        world: The ranks of its layout, by which others know what is in them.
    """

    world: Any = None


def _end_process() -> None:
    os._exit(1)


@dataclass
class StandIn:
    """What one actor knows. Its methods are those of ``RayparActor``, whose docstrings say what they are for.

    Attributes:
        key: Which one it is.
        pace: How long it takes.
        before: The call that it has got last; it performs them in their order.
        worlds: The ranks of each layout of which it has snapshots, by the layout's number.
        sent: Bytes of snapshots that it has sent.
        die: Ends its process.
    """

    key: Key
    pace: Pace
    before: asyncio.Future[None] | None = None
    plan: Any = None
    under_way: Progress = field(default_factory=lambda: Progress(-1, 0, None))
    is_silent: bool = False
    is_lying: bool = False
    steps: frozenset[int] = frozenset()
    held: dict[SnapshotOwner, frozenset[int]] = field(default_factory=dict)
    worlds: dict[int, Any] = field(default_factory=dict)
    sent: int = 0
    handed: HeldTensors | None = None
    die: Callable[[], object] = _end_process

    def __post_init__(self) -> None:
        self._random = random.Random(self.key.number)

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.key.node, 1, os.getuid(), 1, 1, 1, self.key.number + 2, 1)

    @property
    def share(self) -> SnapshotOwner:
        return SnapshotOwner(self.plan.layout, self.plan.rank)

    @property
    def row(self) -> Any:
        return self.plan.programs["train"].rows[self.plan.world.row(self.plan.rank)]

    # --- a run ---

    def start(self, plan: Any) -> dict[str, Shard]:
        if self.plan is not None and self.share != SnapshotOwner(plan.layout, plan.rank):
            self.held[self.share], self.steps = self.steps, frozenset()
        self.plan, self.worlds[plan.layout] = plan, plan.world
        return {name: part for name, part in parts_of(plan.world, plan.rank).items() if name.startswith("layers")}

    def leave(self, comes_back: bool = False) -> None:
        if not comes_back:
            self.steps, self.held, self.handed = frozenset(), {}, None

    async def train(self, order: bytes) -> StepResult:
        step, *_ = json.loads(order)
        began = time.perf_counter()
        self.under_way = Progress(step, 0, None)
        await self._meet_faults(step)
        await self._take(self.pace.step)
        self._keep(step + 1)
        return self._result(began)

    async def run(self, program: str, step: int) -> StepResult:
        self.under_way = Progress(step, 0, None)
        return self._result(time.perf_counter())

    async def start_step(self, step: int, epoch: int, stream: int = 0) -> None:
        self._began, self.under_way = time.perf_counter(), Progress(step, 0, None)
        await self._meet_faults(step)

    async def act(self, action: Any, *after: None) -> None:
        self.under_way = Progress(self.under_way.step, self.under_way.done + 1, action)
        await self._take(self.pace.action)

    def end_step(self, step: int, copy_within: int = 0) -> StepResult:
        self._keep(step + 1)
        return self._result(self._began)

    def open(self, step: int) -> None:
        self._began, self.under_way = time.perf_counter(), Progress(step, 0, None)

    perform = act

    def end(self) -> StepResult:
        return self.end_step(self.under_way.step)

    def rewind(self) -> None:
        pass

    def use_averages(self, use: bool) -> None:
        pass

    # --- checkpoints and snapshots ---

    def make_room(self) -> None:
        pass

    def stage(self, weights_only: bool = False) -> None:
        pass

    def write(self, folder: str, beside: bool = False) -> ShardReport | None:
        saved, kinds, end = dict[str, Logical](), list[tuple[str, str, Any, int]](), 0
        file = f"rank-{self.plan.rank:05}.safetensors"
        for name, part in saved_parts(self.plan.world, self.plan.rank).items():
            size = nbytes_of({name: part})
            kinds.append((name, "F32", part.shape, size))
            saved[name] = Logical("F32", part.whole, (Stored(file, name, part.offset, part.shape),))
            end += size
        data = beginning_of(kinds) + bytes(end)
        (Path(folder) / file).write_bytes(data)
        return shard_report((ShardFile(file, len(data), hashlib.sha256(data).hexdigest()), saved))

    def load(self, folder: str, tensors: Any) -> None:
        pass

    def rewind_to(self, folder: str, tensors: Any, step: int, bad: int) -> None:
        pass

    def snapshots(self, method: str, *args: Any) -> Any:
        return getattr(self, _OF_KEEPER[method])(*args)

    def snapshot_addresses(self) -> list[Address]:
        own = self._address(self.share, self.steps, is_written=True)
        there = ((share, self._steps_of(share)) for share in self.held if share != self.share)
        return [own, *(self._address(share, steps) for share, steps in there if steps)]

    def hold_snapshots(self, addresses: Any) -> None:
        for address in addresses:
            if address.process != self.identity:
                self.held[address.share] = self.held.get(address.share, frozenset()) | {*address.files}
                self.worlds[address.share.layout] = address.world

    def snapshot_steps(self) -> dict[SnapshotOwner, tuple[int, ...]]:
        shares = {self.share, *self.held}
        return {share: steps for share in shares if (steps := tuple(sorted(self._steps_of(share))))}

    def begin_snapshots(self, step: int) -> None:
        self.steps = frozenset({step} if step else ())

    def drop_old_snapshots(self) -> None:
        self.held = {share: frozenset() for share in self.held if share.layout == self.plan.layout}

    def expect_copies(self, expected: Any, files: int) -> tuple[str, int, list[Address]]:
        return self.key.node, 1, [Address(share, self.identity, (), is_written=True) for share in expected.values()]

    def begin_copies(self, to: Any, step: int, addresses: Any, patience: float) -> None:
        pass

    def send_snapshots(self, step: int, to: Any) -> None:
        self._demand(step, [share for share, _ in to])
        self.sent += sum(nbytes_of(self._saved(share)) for share, _ in to)

    def snapshot_contents(self, step: int, shares: Any) -> dict[SnapshotOwner, ShareContents]:
        self._demand(step, shares)
        return {share: contents_of(self._saved(share)) for share in shares}

    def needed_shares(self, index: ShareIndex) -> list[SnapshotOwner]:
        return index.needed(boxes_of(parts_of(self.plan.world, self.plan.rank)))

    def restore(self, step: int, shares: Any, arrived: Any, *sent: None) -> None:
        self._demand(step, {*shares} - {address.share for address in arrived})
        self.steps, self.handed = frozenset({step}), None

    # --- another layout ---

    def hand_over(self) -> HeldTensors:
        self.handed = self._holding()
        return self.handed

    def want(self, kinds: Any) -> Any:
        return self._holding().boxes

    def pass_on(self, moves: Any, transfer: Any) -> dict[str, int]:
        self.handed = None
        own = -1 if transfer is None else transfer.rank
        return {"send": sum(4 * volume(move.box) for move in moves if move.is_sent and move.source == own)}

    # --- called during a step ---

    async def progress(self) -> Progress:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.is_lying:
            self.under_way = replace(self.under_way, step=-self.under_way.step)
        return self.under_way

    def printed(self) -> tuple[str, ...]:
        return ()

    def located(self) -> Located:
        return Located(self.key.node, self.identity)

    def now(self) -> tuple[float, float]:
        return time.perf_counter(), time.time()

    def set_clock(self, offset: float, wall: float) -> None:
        pass

    def abort(self) -> None:
        pass

    # --- looking inside ---

    def probe(self, look: str, *args: Any) -> Any:
        looks = {
            "events": self._events,
            "ledger": self._ledger,
            "gradients": self._gradients,
            "parts": self._parts,
        }
        return looks[look](*args)

    def _events(self, ago: int = 0) -> list[Span]:
        return [Span(action, float(at), at + 1.0) for at, action in enumerate(self.row)]

    def _ledger(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        return {("dp", "all_reduce"): (1, 4096, 0.001)}

    def _gradients(self, names: Any) -> list[None]:
        return [None for _ in names]

    def _parts(self, what: str, names: Any = None) -> dict[str, Any]:
        return {}

    # --- of a witness ---

    def know(self, located: Any) -> None:
        pass

    def seen(self, rank: int) -> ProcessReport:
        return ProcessReport()

    def kill(self, rank: int) -> None:
        pass

    # --- internals ---

    async def _meet_faults(self, step: int) -> None:
        """Let happen what was injected at a step, the first time that a run takes it."""
        for fault in self.plan.faults if self.plan.generation == 1 else ():
            if fault.step != step + 1:
                continue
            if fault.kind == "kill":
                self.die()
            if fault.kind == "stop":
                self.is_silent = True
                await asyncio.Event().wait()
            if fault.kind == "corrupt":
                self.is_lying = True
                await asyncio.Event().wait()
            if fault.kind == "raise":
                label = self.plan.world.label(self.plan.rank)
                raise ActionError(label, fault.at, "", "it was injected", False, "")
            self.under_way = Progress(step, 1, self.row[0])
            await asyncio.sleep(fault.seconds)

    async def _take(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (1.0 + self.pace.jitter * self._random.uniform(-1.0, 1.0)))

    def _keep(self, step: int) -> None:
        self.steps = frozenset(sorted({*self.steps, step})[-2:])

    def _address(self, share: SnapshotOwner, steps: Iterable[int], *, is_written: bool = False) -> StandInAddress:
        return StandInAddress(share, self.identity, tuple(sorted(steps)), is_written, self.worlds[share.layout])

    def _saved(self, share: SnapshotOwner) -> dict[str, Shard]:
        return saved_parts(self.worlds[share.layout], share.rank)

    def _demand(self, step: int, shares: Iterable[SnapshotOwner]) -> None:
        """Raise KeyError if it has no snapshot of a step of one of these."""
        there = self.snapshot_steps()
        for share in shares:
            if step not in there.get(share, ()):
                raise KeyError(share)

    def _steps_of(self, share: SnapshotOwner) -> frozenset[int]:
        """The steps of which it has snapshots: it keeps those of its node, which are of the same steps as its own."""
        own = self.steps if share.layout == self.plan.layout else frozenset[int]()
        return (own | self.held.get(share, frozenset())) if share in self.held else own

    def _result(self, began: float) -> StepResult:
        at, mesh, run = self.plan.world.at(self.plan.rank), self.plan.world.mesh, self.plan.run
        is_last = at["pp"] == mesh.pp - 1 and at["tp"] == 0
        count = run.microbatches if is_last else 0
        return StepResult(
            *((2.0,) * count, (256,) * count, 1.0, 1e-3, 0.5),
            *(began, time.perf_counter(), None, run.microbatches, 1 << 30),
            samples=count * run.micro_batch_size,
        )

    def _holding(self) -> HeldTensors:
        parts = parts_of(self.plan.world, self.plan.rank)
        return HeldTensors(boxes_of(parts), {name: Kind("float32", part.whole) for name, part in parts.items()})


class Crowd:
    """A process of stand-ins, as a Ray actor.

    Args:
        pace: How long they take.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace, self._there, self._returned = pace, dict[Key, StandIn](), 0.0

    async def call(self, key: Key, method: str, *args: Any) -> Any:
        """Have a stand-in do what it is told, after all that it was told before."""
        one = self._there.get(key) or self._there.setdefault(key, StandIn(key, self._pace))
        if method in BESIDE:
            return await _answer(one, method, args)
        before, done = one.before, asyncio.get_running_loop().create_future()
        one.before = done
        try:
            if before is not None:
                await before
            return await _answer(one, method, args)
        finally:
            done.set_result(None)
            self._returned = time.perf_counter()

    async def last_return(self) -> float:
        """When a stand-in has returned last, in seconds of the machine's clock; of calls in the order."""
        return self._returned

    async def end(self, key: Key) -> None:
        """Forget a stand-in, which never answers again."""
        self._there.pop(key, None)


async def _answer(one: StandIn, method: str, args: tuple[Any, ...]) -> Any:
    found = getattr(one, method)(*args)
    return await found if isawaitable(found) else found
