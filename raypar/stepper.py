"""A training step by hand: the schedule's actions one after the other, each an actor call of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raypar.actors.plan import NonFiniteError, StepResult
from raypar.actors.world import World
from raypar.calls import Calls
from raypar.report import Report
from raypar.schedules.action import RECVS, SENDS, STEP, Action, Op
from raypar.schedules.draw import text
from raypar.schedules.rules import partner, rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulate import simulate

Move = tuple[tuple[int, Action], ...]  # (pipeline rank, action) of everything that happens at once


class Stepper:
    """One training step, move by move. A move is a compute action, a SEND with its RECV, or the STEP of all actors;
    every replica takes it.

    The order is the simulated one, so it is an order that the actors could take. ``repr`` draws the schedule with what
    is done; ``finish`` does the rest and returns the step's report, the same bits as a compiled step.
    """

    def __init__(
        self,
        schedule: Schedule,
        step: int,
        world: World,
        handles: Sequence[Any],
        calls: Calls,
        guard: Callable[[Callable[[], Any]], Any],
        commit: Callable[[list[StepResult], float], Report],
    ) -> None:
        self.schedule, self.step = schedule, step
        self._world, self._handles = world, handles
        self._calls, self._guard, self._commit = calls, guard, commit
        self._moves, self._at = tuple(moves(schedule)), 0
        self._report: Report | None = None
        self._error: NonFiniteError | None = None
        self._start = time.perf_counter()
        self._guard(lambda: self._calls.all("begin", "train", step, what=f"step {step}"))

    @property
    def midway(self) -> bool:
        """Whether the step has begun and is not finished."""
        return self._report is None and self._error is None

    @property
    def done(self) -> tuple[Action, ...]:
        """The actions taken so far, in their order."""
        return tuple(action for move in self._moves[: self._at] for _, action in move)

    def next(self) -> tuple[Action, ...]:
        """Take the next move; returns its actions. Raises StopIteration when only ``finish`` is left."""
        if self._at == len(self._moves):
            raise StopIteration(f"every action is taken; next: {self._cursor()}")
        move = self._moves[self._at]
        self._take([move])
        return tuple(action for _, action in move)

    def run_to(self, action: str | Action) -> tuple[Action, ...]:
        """Take every move up to and with this action; returns the actions taken.

        Raises ValueError if the schedule has no such action, or if it is taken already.
        """
        wanted = Action.parse(action) if isinstance(action, str) else action
        places = [at for at, move in enumerate(self._moves) if any(taken == wanted for _, taken in move)]
        if not places:
            raise ValueError(f"schedule {self.schedule.name!r} has no action {wanted}")
        end = places[0]
        if end < self._at:
            raise ValueError(f"{wanted} is done: the step is at {self._cursor()}")
        chosen = self._moves[self._at : end + 1]
        self._take(chosen)
        return tuple(action for move in chosen for _, action in move)

    def finish(self) -> Report:
        """Take what is left, close the step, and return its report."""
        if self._report is None:
            self._take(self._moves[self._at :])
            results = self._guard(lambda: self._calls.all("end", what=f"step {self.step}"))
            self._report = self._commit(results, time.perf_counter() - self._start)
        return self._report

    def __repr__(self) -> str:
        grid = text(self.schedule, done=frozenset(self.done))
        return f"step {self.step}, {self._at} of {len(self._moves)} moves done, next: {self._cursor()}\n{grid}"

    def _take(self, chosen: Sequence[Move]) -> None:
        """Issue the moves without waiting in between; every actor performs its calls in the order they were made."""
        if self._error is not None:
            raise self._error
        calls = [(rank, action) for move in chosen for pp, action in move for rank in self._ranks(pp, action)]

        def perform() -> None:
            refs = [self._handles[rank].perform.remote(action) for rank, action in calls]
            self._calls.gather(refs, f"step {self.step}", [rank for rank, _ in calls])

        if calls:
            try:
                self._guard(perform)
            except NonFiniteError as error:
                self._error = error  # nobody took the STEP: this step is over
                raise
            self._at += len(chosen)

    def _ranks(self, pp: int, action: Action) -> tuple[int, ...]:
        """Who takes an action of a pipeline rank: all its replicas, and for STEP its servers too."""
        servers = range(self._world.servers if action.op is Op.STEP else 0)
        return (*self._world.replicas_of(pp), *(self._world.server_rank(pp, index) for index in servers))

    def _cursor(self) -> str:
        if not self.midway:
            return "nothing, the step is finished"
        if self._at == len(self._moves):
            return "finish()"
        return " + ".join(dict.fromkeys(str(action) for _, action in self._moves[self._at]))


def moves(schedule: Schedule) -> Iterator[Move]:
    """A lowered training schedule as moves, in an order in which every action finds what it needs."""
    # Sorting by start time keeps simulate's own order where times are equal, and that order is causal.
    for event in sorted(simulate(schedule).events, key=lambda event: event.start):
        action = event.action
        if action.op in SENDS:
            other = partner(action)
            yield ((event.rank, action), (rank_of(other, schedule), other))
        elif action.op not in RECVS and action.op is not Op.STEP:
            yield ((event.rank, action),)
    if not schedule.forward_only:
        yield tuple((rank, STEP) for rank in range(schedule.num_ranks))
