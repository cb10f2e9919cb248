"""The class of a job's Ray actors, which hosts a worker or a parameter server for each run.

It refuses calls after a failed one, stores the lines that the user's code prints, and takes part in the move of a run
to another layout.
"""

from __future__ import annotations

import gc
import json
import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from raypar.actors.checkpoint.assembler import ShardFolder
from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.reports import ShardReport, shard_report
from raypar.actors.checkpoint.snapshot_address import Address, Recipient, SnapshotOwner
from raypar.actors.collective.gpu.shared_gpu import allow_shared_gpu
from raypar.actors.collective.group import Group
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.ray import ray_groups
from raypar.actors.errors import NonFiniteError, StaleError
from raypar.actors.machine.device import (
    ALL_BLOCKS,
    BLOCKS_OF_A_STEP,
    SMALL_BLOCKS,
    device_of,
    keep_freed_memory,
    resident_memory,
)
from raypar.actors.machine.last_action import LastAction
from raypar.actors.machine.process_identity import own_identity
from raypar.actors.mesh.memberships import memberships
from raypar.actors.relayout.handover import Handover
from raypar.actors.relayout.moves import Boxes, HeldTensors, Kind, TensorMove, TransferGroup
from raypar.actors.relayout.share_index import ShareIndex
from raypar.actors.sharding import Shard
from raypar.actors.specs.results import Located, Progress, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.fault_injection import FaultInjector
from raypar.actors.worker.generation import Drawn, Order, Scores
from raypar.actors.worker.members import Member, count_fault, member_of, there, worker_in
from raypar.actors.worker.snapshot_keeper import SnapshotKeeper, keep_after, keeper_of
from raypar.schedules.action import Action

_MOST = 200  # lines that are stored until the driver takes them
_LONGEST = 2000  # characters of a line
RELAYOUT = "relayout"  # the axis under which the ledger counts


class PrintedLines:
    """A standard output that stores its lines, and writes everything to another one.

    Args:
        through: The other one.
    """

    def __init__(self, through: TextIO) -> None:
        self._through, self._lock = through, threading.Lock()
        self._lines, self._begun, self._dropped = list[str](), "", 0

    def write(self, text: str) -> int:
        """Write a text, and store the lines that it completes."""
        with self._lock:
            *ended, begun = (self._begun + text).split("\n")
            self._begun = begun[:_LONGEST]
            free = _MOST - len(self._lines)
            self._lines += [line[:_LONGEST] for line in ended[:free]]
            self._dropped += max(0, len(ended) - free)
        return self._through.write(text)

    def take(self) -> tuple[str, ...]:
        """Return the lines that were printed since the last call, and the number of those that were dropped."""
        if not self._lines:
            return ()
        with self._lock:
            lines, dropped = self._lines, self._dropped
            self._lines, self._dropped = [], 0
        more = [f"(and {dropped:,} more lines, which are in Ray's log of the actor)"] if dropped else []
        return (*lines, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)


class LoggedWarnings(logging.Handler):
    """Stores the warnings of raypar's modules, and of torch's compiler about CUDA graphs, until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines = deque[str](maxlen=_MOST)
        logging.getLogger("raypar").addHandler(self)
        logging.getLogger("torch._inductor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the text of a message."""
        if record.name.startswith("raypar") or "cudagraph" in record.name:
            self._lines.append(record.getMessage()[:_LONGEST])

    def take(self) -> tuple[str, ...]:
        """Return the messages since the last call."""
        return tuple(self._lines.popleft() for _ in range(len(self._lines)))


class Refusals:
    """Refuses calls after a failure: queued steps, and the remaining calls of the failed step.

    Attributes:
        has_failed: Whether a step has failed, so that later ones are refused. A non-finite step is no failure.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._of_step: Exception | None = None  # the error of all further calls of the step

    @contextmanager
    def attempt(self, begins: str = "") -> Iterator[None]:
        """Return a context for a call of the step. After a failure, all further calls of the step raise its error.

        Args:
            begins: Label of the actor, if the call begins a step; else "".

        Raises:
            StaleError: The call begins a step, and a step before it has failed.
        """
        if begins:
            if self.has_failed:
                raise StaleError(f"{begins} has failed in a step before this one")
            self._of_step = None
        if self._of_step is not None:
            raise self._of_step.with_traceback(None)
        try:
            yield
        except Exception as error:
            self._of_step = error
            self.has_failed = not isinstance(error, NonFiniteError | StaleError)
            raise


def with_lines(actor: RayparActor, result: StepResult) -> StepResult:
    """Return a result with what was printed and what was logged on an actor since the last one."""
    warned = () if actor._warnings is None else actor._warnings.take()
    return replace(result, printed=actor.printed(), warned=warned)


class RayparActor:
    """Hosts a worker or a parameter server inside a Ray actor.

    It has only the methods that the driver calls. Ray wraps each method of an actor's class, which would slow down
    calls between methods; inside a Worker a step makes about a hundred of them.
    """

    _printed: PrintedLines | None = None  # only an actor in its own process has its own standard output and log
    _warnings: LoggedWarnings | None = None

    def __init__(self) -> None:
        self._printed = sys.stdout = PrintedLines(sys.stdout)
        self._warnings = LoggedWarnings()
        self._member: Member | None = None  # None between two runs
        self._joined: dict[str, Group] = {}
        self._keeper: SnapshotKeeper | None = None
        self._last_action = LastAction()
        self._refusals = Refusals()
        self._handover: Handover | None = None  # while the run goes to another layout
        gc.freeze()  # exclude torch's objects from garbage collection
        self._process = resident_memory()

    # --- a run ---

    def start(self, plan: ActorPlan) -> dict[str, Shard]:
        """Join the groups of a run and build this actor's part of it.

        Args:
            plan: The actor's plan.

        Returns:
            By logical name, the part of each parameter that this actor holds.

        Raises:
            UnequalReplicasError: A replica has built other weights from the same plan.
            RuntimeError: The plan's device does not exist.
        """
        keep_freed_memory(SMALL_BLOCKS)
        device = device_of(plan.device)
        if device.kind == "cuda" and plan.run.shared_gpu == "nccl":
            allow_shared_gpu()
        ledger = Ledger()
        faults = FaultInjector(plan.faults, partial(count_fault, plan.job))
        device.enter()
        self._last_action.forget()
        faults.reach("start", plan.generation - 1)
        for key, axis, name, members in memberships(plan.world, plan.rank):
            size, rank = len(members), members.index(plan.rank)
            full_name = f"{plan.name}/{name}"
            self._joined[key] = ray_groups.join(full_name, axis, size, rank, plan.run.timeout, ledger, device.device)
        ray_groups.close_together(self._joined)
        self._member = member_of(plan, self._joined, device)
        self._member.faults, faults.weights = faults, self._member.state.parameters
        faults.layers = {number: stage.modules[0] for number, stage in self._member.state.stages.items()}
        self._member.last_action = self._last_action
        self._member.probe.process = self._process if device.kind == "cpu" else 0
        self._plan = plan
        if plan.run.max_failures and plan.run.snapshot_every:
            self.keep_snapshots()
        keep_freed_memory(BLOCKS_OF_A_STEP if plan.world.frees_buckets else ALL_BLOCKS)
        return self._member.state.holds()

    def leave(self, comes_back: bool = False) -> None:
        """Leave the groups of a run and release its memory.

        Args:
            comes_back: Whether it rejoins the same run with new groups, and so keeps snapshots.
        """
        self._member, self._refusals = None, Refusals()
        if self._keeper is not None:
            self._keeper.leave(comes_back)
        if not comes_back:
            self._handover = self._keeper = None
        for group in self._joined.values():
            ray_groups.leave(group.name)
        self._joined = {}
        gc.collect()  # frees shared memory

    # --- steps ---

    def train(self, order: bytes) -> StepResult:
        """Perform this actor's row of a training step, or of several that overlap, and take a snapshot if one is due.

        Args:
            order: A JSON list: the number of the step, the epoch of the call (null to accept it in any case),
                ``copy_within`` of ``SnapshotKeeper.after``, and the number of steps of an asynchronous schedule to
                perform; 0 if the schedule is synchronous.

        Raises:
            StaleError: A step before this one has failed, or see ``Worker.run`` for this and other errors.
        """
        step, epoch, copy_within, stream = json.loads(order)
        member = there(self._member)
        with self._refusals.attempt(begins=member.context.label):
            take = partial(worker_in(member).run, stream=stream) if stream else member.run
            if member.profiler.records(step, max(1, stream)):
                result = member.profiler.take(step, max(1, stream), partial(take, "train", step, epoch))
            else:
                result = take("train", step, epoch)
            copied = keep_after(member, self._keeper, step + max(0, stream - 1), copy_within)
            return with_lines(self, replace(result, copied=copied))

    def run(self, program: ProgramName, step: int) -> StepResult:
        """Perform this actor's row of a step of another program, as an evaluation. Raises what ``train`` raises."""
        member = there(self._member)
        with self._refusals.attempt(begins=member.context.label):
            return with_lines(self, member.run(program, step))

    def start_step(self, step: int, epoch: int, stream: int = 0) -> None:
        """Begin a training step whose actions are separate calls. The arguments are those of ``train``.

        Raises:
            StaleError: An earlier step has failed, or the call is of an earlier epoch.
        """
        worker = worker_in(self._member)
        with self._refusals.attempt(begins=worker.context.label):
            worker.start("train", step, epoch, stream)

    def act(self, action: Action, *after: None) -> None:
        """Perform the next action of the row in the step that ``start_step`` began.

        Args:
            action: The action.
            *after: The results of the tasks that had to be done before.
        """
        with self._refusals.attempt():
            worker_in(self._member).perform(action)

    def end_step(self, step: int, copy_within: int = 0) -> StepResult:
        """End the steps that ``start_step`` began, the last of which is ``step``; see ``train`` for ``copy_within``."""
        with self._refusals.attempt():
            result = worker_in(self._member).end()
        copied = keep_after(there(self._member), self._keeper, step, copy_within)
        return with_lines(self, replace(result, copied=copied))

    def open(self, step: int) -> None:
        """Begin a training step by hand."""
        there(self._member).open(step)

    def perform(self, action: Action) -> None:
        """Perform one action of the open step; see ``Worker.perform``."""
        there(self._member).perform(action)

    def end(self) -> StepResult:
        """End the open step and return its result."""
        member = there(self._member)
        result = member.end()
        if self._keeper is not None:
            self._keeper.after(member.probe.step.number + 1, member.state)
        return with_lines(self, result)

    def rewind(self) -> None:
        """Restore the state that the actor had when the step by hand was opened, and open the step again."""
        there(self._member).rewind()

    def generate(self, order: Order) -> Drawn | Scores:
        """Take a step of a generation; see ``Generator.perform``."""
        return worker_in(self._member).generator.perform(order)

    def use_averages(self, use: bool) -> None:
        """Replace the weights by their averages, or restore them; see ``WorkerState.use_averages``."""
        there(self._member).state.use_averages(use=use)

    # --- checkpoints ---

    def make_room(self) -> None:
        """Allocate the memory for a copy of the state, in a thread."""
        there(self._member).state.make_room()

    def stage(self, weights_only: bool = False) -> None:
        """Copy this actor's share of a checkpoint, or of its weights alone."""
        there(self._member).state.stage(weights_only=weights_only)

    def write(self, folder: str, beside: bool = False) -> ShardReport | None:
        """Write the copy as a shard, in Ray's "disk" concurrency group; see ``WorkerState.write``."""
        written = there(self._member).state.write(folder, beside=beside)
        return None if written is None else shard_report(written)

    def load(self, folder: str, tensors: Mapping[str, Logical]) -> None:
        """Load a checkpoint; see ``WorkerState.load``."""
        member = there(self._member)
        with member.probe.idle():
            member.state.load(ShardFolder(Path(folder)), tensors)

    def rewind_to(self, folder: str, tensors: Mapping[str, Logical], step: int, bad: int) -> None:
        """Load a checkpoint of ``step`` steps, and skip the data of the steps from there to the step ``bad``."""
        member = there(self._member)
        with member.probe.idle():
            member.state.rewind_to(folder, tensors, step, bad)
        if self._keeper is not None:
            self._keeper.forget_after(step - 1)  # the one after ``step`` steps does not know of the skipped data

    # --- snapshots in memory ---

    def keep_snapshots(self) -> None:
        """Take snapshots of the present run from now on."""
        plan = self._plan
        taken = partial(there(self._member).faults.reach, "snapshot")
        self._keeper = self._keeper or SnapshotKeeper(plan, taken)
        self._keeper.join(plan, taken)

    def snapshots(self, method: str, *args: object) -> Any:
        """Call the method of this actor's ``SnapshotKeeper`` that has this name, and return its result."""
        return getattr(keeper_of(self._keeper), method)(*args)

    def begin_snapshots(self, step: int) -> None:
        """Make sure that there is a snapshot of the step after which the run goes on; see ``SnapshotKeeper.begin``."""
        member = there(self._member)
        with member.probe.idle():
            keeper_of(self._keeper).begin(step, member.state)

    def expect_copies(self, expected: Mapping[str, SnapshotOwner], files: int) -> tuple[str, int, list[Address]]:
        """Prepare to receive copies from other nodes; see ``SnapshotKeeper.expect_copies``."""
        return keeper_of(self._keeper).expect_copies(ray_groups.node_address(), expected, files)

    def send_snapshots(self, step: int, to: Sequence[tuple[SnapshotOwner, Recipient]]) -> None:
        """Send snapshots of a step to other nodes, which load them; see ``SnapshotKeeper.send``."""
        with nullcontext() if self._member is None else self._member.probe.idle():
            keeper_of(self._keeper).send(step, to)

    def needed_shares(self, index: ShareIndex) -> list[SnapshotOwner]:
        """Return the owners of the snapshots that have parts of this actor's state."""
        return index.needed(there(self._member).state.wanted(index.shapes))

    def restore(self, step: int, shares: Sequence[SnapshotOwner], arrived: Sequence[Address], *sent: None) -> None:
        """Load the snapshots of a step, once those of other nodes are ``sent``; see ``SnapshotKeeper.restore``."""
        member = there(self._member)
        with member.probe.idle():
            keeper_of(self._keeper).restore(step, shares, arrived, member.state)
        self._handover = None

    # --- another layout ---

    def hand_over(self) -> HeldTensors:
        """Copy this actor's part of the state to the host, for the actors of another layout, and describe it."""
        member = there(self._member)
        with member.probe.idle():
            self._handover = Handover(member.state.pieces(), member.state.storage.accessible)
        return self._handover.holding

    def want(self, kinds: Mapping[str, Kind]) -> Boxes:
        """Return the parts of tensors that this actor needs in the layout that it has joined; see ``Handover.want``."""
        self._handover = self._handover or Handover()
        return self._handover.want(there(self._member).state.wanted_tensors(), kinds)

    def pass_on(self, moves: Sequence[TensorMove], transfer: TransferGroup | None) -> dict[str, int]:
        """Send the parts that others need in the new layout, and receive and load those that this actor needs.

        Args:
            moves: The moves from and to this actor; see ``Handover.pass_on``.
            transfer: The group of all senders and receivers; None if nothing is sent.

        Returns:
            The bytes that this actor has sent and received, by op.

        Raises:
            ActionError: Another actor failed.
        """
        member, joined = self._member, self._joined  # the transfer's group is aborted with the others
        assert self._handover is not None
        with nullcontext() if member is None else member.probe.idle():
            try:
                if transfer is not None:
                    device = torch.device("cpu") if member is None else member.context.device.device
                    joined[RELAYOUT] = ray_groups.join(transfer.name, RELAYOUT, *transfer[1:], device=device)
                group = joined.get(RELAYOUT)
                self._handover.pass_on(moves, group)
                if member is not None:
                    member.state.adopt(self._handover.read)
            except Exception as error:
                if member is None:
                    raise
                raise member.context.failed("relayout", None, error) from None
        self._handover = None
        if group is None:
            return {}
        ray_groups.leave(joined.pop(RELAYOUT).name)
        return {op: entry.bytes for (_, op), entry in group.ledger.entries().items()}

    # --- called from another thread during a step ---

    def progress(self) -> Progress:
        """Return how far this actor is in its step."""
        if self._member is None:
            return Progress(-1, 0, None, idle=self._handover is not None)
        return self._member.probe.progress()

    def printed(self) -> tuple[str, ...]:
        """Return the lines that the user's code has printed here since the last result or call."""
        return () if self._printed is None else self._printed.take()

    def located(self) -> Located:
        """Return where this actor is."""
        gpu = ("", "") if self._member is None else self._member.context.device.gpu
        return Located(socket.gethostname(), own_identity(), self._last_action.share(), gpu)

    def now(self) -> tuple[float, float]:
        """Return the times of this machine's clock and of its time of day, in seconds."""
        return time.perf_counter(), time.time()

    def set_clock(self, offset: float, wall: float) -> None:
        """Add so many seconds to this machine's clocks wherever times are reported; see ``ComputeDevice``."""
        device = there(self._member).context.device
        device.clock_offset, device.wall_offset = offset, wall

    def abort(self) -> None:
        """Abort all communication under way, and take no step after the present one."""
        self._refusals.has_failed = True  # refuses all steps after the present one
        for group in list(self._joined.values()):
            group.abort()
        if self._keeper is not None:
            self._keeper.interrupt_copies()

    # --- looking inside ---

    def probe(self, look: str, *args: object) -> Any:
        """Call the method of this actor's ``Probe`` that has this name, and return its result."""
        return getattr(there(self._member).probe, look)(*args)
