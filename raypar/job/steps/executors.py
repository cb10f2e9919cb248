"""Ways to make actors take a training step: one call to each of them, or one Ray task for each action, in the order of
the rows or as values arrive."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypar.actors.mesh.world import World
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.types import SEND_WINDOW
from raypar.actors.worker.build.boundaries import peers_of
from raypar.cluster.calls.calls import Calls, Waiting
from raypar.job.start.loaded_run import LoadedRun
from raypar.schedules.action import RECVS, Action
from raypar.schedules.dynamic_order import DynamicOrder
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.rules import awaited
from raypar.schedules.schedule import Schedule


@dataclass
class _Begun:
    """A step, or steps of a stream, that were handed to the actors.

    Attributes:
        number: The number of the last one, counted from 0.
        copy_within: See ``Executor.begin``.
        last: By rank, the object ref of its latest call.
    """

    number: int
    copy_within: int
    last: list[Any]


class Executor(ABC):
    """Makes the actors of a run take training steps.

    Args:
        loaded: The run.
    """

    def __init__(self, loaded: LoadedRun) -> None:
        self._calls, self._world, self._schedule = loaded.calls, loaded.world, loaded.schedule

    @abstractmethod
    def begin(self, step: int, epoch: int, copy_within: int, stream: int = 0) -> Any:
        """Hand a step, or steps of an asynchronous schedule, to the actors, without waiting for them.

        Args:
            step: Its number, counted from 0.
            epoch: The job's epoch; see ``Lifetime``.
            copy_within: In how many steps a copy of its snapshots should be on other nodes; 0: none is made.
            stream: Number of steps of an asynchronous schedule; 0 if it is synchronous.

        Returns:
            What ``results`` and ``drop`` take.
        """

    @abstractmethod
    def results(self, begun: Any, what: str) -> list[StepResult]:
        """Wait for a step, and return the actors' results by rank. Raises what ``Calls.gather`` raises.

        Args:
            begun: What ``begin`` has returned.
            what: What is going on, for messages.
        """

    def drop(self, begun: Any) -> None:
        """Wait for a step whose results do not matter."""
        self._calls.drop(begun.last)


class Compiled(Executor):
    """One call to each actor, which performs its row by itself."""

    def begin(self, step: int, epoch: int, copy_within: int, stream: int = 0) -> _Begun:
        order = _order(step, epoch, copy_within, stream)
        return _Begun(step, copy_within, [handle.train.remote(order) for handle in self._calls.handles])

    def results(self, begun: _Begun, what: str) -> list[StepResult]:
        return self._calls.gather(begun.last, what)


class Tasks(Executor):
    """One Ray task for each action, named like it: ``1F0``.

    An actor performs its tasks in the order in which it gets them. A task that needs what another rank provides, a
    RECV, gets the other one's object ref, and is submitted when that is there: as long as a call waits for a ref, Ray
    holds back all later calls, also those that ask an actor whether it is alive. All others are submitted without
    waiting. Parameter servers, whose step is one action, get one call.

    Args:
        loaded: The run.
    """

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(loaded)
        self._rows, world = self._rows_of(loaded.schedule), loaded.world
        members = [] if world.mesh.is_uneven else [world.trainers_of(pp) for pp in range(world.mesh.pp)]
        index = {rank: at for of_one in members for at, rank in enumerate(of_one)}
        self._needs: dict[tuple[int, Action], tuple[int, Action]] = {}  # by rank and action, those of another rank
        for rank, row in enumerate(self._rows):
            for action in row:
                for need in awaited(action, loaded.schedule) if action.op in RECVS else ():  # its SEND
                    (peer,) = peers_of(world, rank, action, loaded.schedule)
                    self._needs[rank, action] = members[peer][index[rank]] if members else peer, need
        self._awaited = frozenset(self._needs.values())

    def begin(self, step: int, epoch: int, copy_within: int, stream: int = 0) -> _TaskStep:
        is_part = stream and stream != self._schedule.stream
        rows = self._rows_of(first_steps(self._schedule, stream)) if is_part else self._rows
        last = _started(self._calls, self._world, step, epoch, copy_within, stream)
        return _TaskStep(step + max(0, stream - 1), copy_within, last, rows, self._calls.waiting())

    def results(self, begun: _TaskStep, what: str) -> list[StepResult]:
        """Submit tasks as those that they need are done, and return the actors' results; see ``Executor``."""
        ready: list[int] = list(range(len(begun.rows)))
        has_failed = False
        while not has_failed:
            for rank in ready:
                self._submit(begun, rank)
            if not begun.blocked:
                break
            ready = []
            for answer in begun.sends.next(what):
                has_failed = has_failed or answer.error is not None
                send = begun.awaited.pop(answer.ref)
                begun.done[send] = answer.ref
                ready += begun.blocked.pop(send, ())
        # After a failure the later calls of that actor fail like the one that did, and none is submitted after them.
        return self._calls.gather(begun.last, what)

    def _rows_of(self, schedule: Schedule) -> list[Sequence[Action]]:
        """Return the row of each rank; servers have none."""
        world = self._world
        ranks = range(world.size)
        return [() if rank in world.server_ranks else schedule.rows[world.row(rank)] for rank in ranks]

    def _submit(self, begun: _TaskStep, rank: int) -> None:
        """Submit the tasks of a rank up to the first one that waits for a task of another rank."""
        handle, row = self._calls.handles[rank], begun.rows[rank]
        while begun.at[rank] < len(row):
            action = row[begun.at[rank]]
            need = self._needs.get((rank, action))
            if need is not None and need not in begun.done:
                begun.blocked.setdefault(need, []).append(rank)
                return
            after = () if need is None else (begun.done[need],)
            ref = begun.last[rank] = handle.act.options(name=str(action)).remote(action, *after)
            if (rank, action) in self._awaited:
                begun.awaited[ref] = rank, action
                begun.sends.expect(ref, rank)
            begun.at[rank] += 1
            if begun.at[rank] == len(row):
                begun.last[rank] = handle.end_step.remote(begun.number, begun.copy_within)


class Dynamic(Executor):
    """One Ray task for each action, which is submitted when it is ready: arrival decides, not the row.

    All actors of a row get the same actions in the same order, so that their collectives agree. What comes
    next is decided when all of them have done what they compute.

    Args:
        loaded: The run. Its schedule gathers no weights, and its groups have tags.
    """

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(loaded)
        self._members = [loaded.world.trainers_in(row) for row in range(loaded.schedule.num_ranks)]

    def begin(self, step: int, epoch: int, copy_within: int, stream: int = 0) -> _DynamicStep:
        assert not stream
        last = _started(self._calls, self._world, step, epoch, copy_within)
        return _DynamicStep(step, copy_within, last, DynamicOrder(self._schedule, SEND_WINDOW), self._calls.waiting())

    def results(self, begun: _DynamicStep, what: str) -> list[StepResult]:
        """Submit tasks as they become ready, and return the actors' results; see ``Executor``."""
        rows = set(range(len(self._members)))
        while True:
            for row in sorted(rows):
                self._submit(begun, row)
            if begun.order.is_over:
                break
            answers = begun.waiting.next(what)
            if any(answer.error for answer in answers):  # the other calls of that actor fail like the one that did
                return self._calls.gather(begun.last, what)
            rows = {row for answer in answers for row in self._note(begun, *begun.tasks.pop(answer.ref))}
        for rank, handle in enumerate(self._calls.handles):
            if rank not in self._world.server_ranks:
                begun.last[rank] = handle.end_step.remote(begun.number, begun.copy_within)
        return self._calls.gather(begun.last, what)

    def _submit(self, begun: _DynamicStep, row: int) -> None:
        """Submit the actions that the actors of a row may take now."""
        for action in begun.order.take(row):
            for rank in self._members[row]:
                ref = begun.last[rank] = self._calls.handles[rank].act.options(name=str(action)).remote(action)
                begun.tasks[ref] = row, action
                begun.waiting.expect(ref, rank)

    def _note(self, begun: _DynamicStep, row: int, action: Action) -> Sequence[int]:
        """Note that an actor of a row has done an action; return the row that may go on, if all its actors have."""
        begun.num_done[row, action] += 1
        return [begun.order.done(row, action)] if begun.num_done[row, action] == len(self._members[row]) else []


@dataclass
class _DynamicStep(_Begun):
    """A step whose order arrival decides.

    Attributes:
        order: Its order.
        waiting: The tasks that are not done.
        tasks: The row and the action of each of them, by object ref.
        num_done: By row and action, how many of its actors have done it. Equal actions count together: only
            those of one microbatch are waited for.
    """

    order: DynamicOrder
    waiting: Waiting
    tasks: dict[Any, tuple[int, Action]] = field(default_factory=dict)
    num_done: Counter[tuple[int, Action]] = field(default_factory=Counter)


@dataclass
class _TaskStep(_Begun):
    """A step, or steps of a stream, whose actions are tasks.

    Attributes:
        rows: By rank, its actions.
        sends: The tasks that are not done for which another rank waits.
        awaited: The rank and the action of each of them, by object ref.
        at: By rank, how many of its actions were submitted.
        blocked: The ranks whose next task waits for a SEND, by the rank and the action of that.
        done: The object refs of the SENDs that are done, by rank and action.
    """

    rows: Sequence[Sequence[Action]]
    sends: Waiting
    awaited: dict[Any, tuple[int, Action]] = field(default_factory=dict)
    at: Counter[int] = field(default_factory=Counter)
    blocked: dict[tuple[int, Action], list[int]] = field(default_factory=dict)
    done: dict[tuple[int, Action], Any] = field(default_factory=dict)


def _order(step: int, epoch: int, copy_within: int, stream: int = 0) -> bytes:
    """Return the argument of ``RayparActor.train``.

    Ray packs each argument for each actor anew: one of bytes halves what the calls cost the driver.
    """
    return json.dumps([step, epoch, copy_within, stream]).encode()


def _started(calls: Calls, world: World, step: int, epoch: int, copy_within: int, stream: int = 0) -> list[Any]:
    """Begin a step, or a stream, on all workers, and perform it on all servers. Returns the object refs by rank."""
    return [
        handle.train.remote(_order(step, epoch, copy_within))
        if rank in world.server_ranks
        else handle.start_step.remote(step, epoch, stream)
        for rank, handle in enumerate(calls.handles)
    ]


def executor_of(loaded: LoadedRun) -> Executor:
    """Return the executor of a run."""
    if loaded.run.executor == "compiled":
        return Compiled(loaded)
    return Dynamic(loaded) if loaded.run.order == "dynamic" else Tasks(loaded)
