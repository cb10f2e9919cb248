"""The stepper: one training step, performed action by action, with an actor call for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.actors.bounds import Steps
from raypar.actors.errors import NonFiniteError
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.types import DeviceKind
from raypar.cluster.interrupts import patience
from raypar.config.arguments import checked_methods
from raypar.config.programs import lowered_step
from raypar.errors import JobError
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.stepping.peeking import Peeking, demand_tensors, predicate_faults
from raypar.job.stepping.recording import Recorder
from raypar.job.stepping.views import Ready, State, StepDrawing, Taken
from raypar.reporting.report import Report
from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.schedule import Schedule, Written
from raypar.schedules.step_board import Board, Move, MoveError, Why, maker_of, makes_tensors

if TYPE_CHECKING:
    from raypar.actors.inspect.step import ComputedValue


@checked_methods
class Stepper:
    """One training step, performed move by move.

    A move is a compute action, an action of a whole stage, a SEND with its RECV, or the STEP of all actors; every
    replica performs it. The name of a repeated action means its next occurrence. The schedule's order is only a
    proposal: any move that is ``ready`` may be taken. Gradients equal those of a compiled step within rounding, and
    bitwise if each stage runs its backwards in the order of the microbatches. Weights change only in the STEP, and
    ``rewind`` undoes even that. Wrong arguments of methods raise a ConfigError.

    Attributes:
        schedule: The schedule of this step: the job's, or the one of the last ``swap``.
        step: The number of the step, counted from 0; texts count from 1.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        device: DeviceKind,
        step: int,
        *,
        guard: Callable[[Callable[[], Any]], Any],
        commit: Callable[[list[StepResult], float], Report],
    ) -> None:
        """Begin the step on the actors. A job does so in ``job.stepper()``.

        Args:
            loaded: The run.
            device: The kind of device that its actors compute on.
            step: The number of the step, counted from 0.
            guard: Makes a call to the actors, and handles its failure as the job does.
            commit: Called when the step is complete, with the actors' results and the step's seconds; returns its
                report.
        """
        self.step = step
        self._loaded, self._board = loaded, Board(loaded.schedule)
        self._guard = guard
        self._commit = commit
        self._recorder = Recorder(loaded, device)
        self._peeking = Peeking(loaded, guard)
        self._predicate: Callable[[ComputedValue], object] | None = None
        self._report: Report | None = None
        self._over: Exception | None = None
        self._note = ""
        self._seconds = 0.0  # spent in moves, without the user's pauses between them
        self._guard(lambda: self._loaded.calls.all("open", step, what=f"step {step + 1}"))

    # --- state ---

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule of the step."""
        return self._board.schedule

    @property
    def midway(self) -> bool:
        """Return whether the step is neither finished nor given up."""
        return self._report is None and self._over is None

    @property
    def done(self) -> tuple[Action, ...]:
        """Return the actions taken so far, in their order."""
        return self._board.done

    @property
    def left(self) -> tuple[Action, ...]:
        """Return the actions that are left, in the schedule's order."""
        return tuple(name for move in self._board.left for name in move.names)

    def ready(self) -> Ready:
        """Return every action that may be taken next with ``do``; ``next`` takes the first one."""
        return Ready.of(self._board.ready() if self.midway else ())

    def why(self, action: str | Action) -> Why:
        """Explain what an action waits for, down to ready actions. Raises MoveError if the step has no such action."""
        return self._board.why(action)

    def peek(self, action: str | Action, dp: int = 0, cp: int = 0, tp: int = 0) -> ComputedValue:
        """Return the results of an action on one actor: outputs, the loss, or gradients for the previous stage.

        Args:
            action: The action; for a SEND, the tensors that it sent.
            dp: The replica.
            cp: The coordinate on the context-parallel axis.
            tp: The coordinate on the tensor-parallel axis.

        Returns:
            The tensors, with their statistics. If a tensor is divided over actors, this actor's part.

        Raises:
            MoveError: If the action is not done or makes no tensors, or if there is no such coordinate.
        """
        self._demand_midway()
        wanted = maker_of(self.why(action).asked, (*self.done, *self.left))
        demand_tensors(wanted, self.done)
        if wanted not in self.done:
            raise MoveError(f"{wanted} is not done: there is nothing to see yet\n{self.why(wanted).brief}")
        return self._peeking.at(wanted, self.schedule, dp=dp, cp=cp, tp=tp)

    def state(self) -> State:
        """Return the memory that every actor holds."""
        self._demand_midway()
        return self._peeking.state(self.done)

    def __repr__(self) -> str:
        return str(self._drawing())

    def _repr_svg_(self) -> str:
        """Draw the step so far, for a notebook."""
        return self._drawing().svg()

    def _repr_html_(self) -> str:
        return self._drawing().html()

    def _drawing(self) -> StepDrawing:
        """Return the step so far, as it is shown."""
        moves = f"{len(self._board.taken)} of {len(self._board.taken) + len(self._board.left)} moves done"
        heading = (self._note if self.midway else "") + f"step {self.step + 1}, {moves}, next: {self._cursor()}"
        return StepDrawing(heading, self.schedule, frozenset(self.done), self._next_compute())

    # --- moves ---

    def next(self) -> Taken:
        """Take the next move of the schedule. Raises StopIteration if only ``finish`` is left."""
        if self._over is None and not self._board.left:
            another = "" if self.midway else ": s = job.stepper() begins another one"
            raise StopIteration(f"every action is taken; next: {self._cursor()}{another}")
        return self.run(1)

    def run(self, moves: Steps | None = None) -> Taken:
        """Take the next moves of the schedule. Stops early after a move that ``break_on`` selects.

        Args:
            moves: Number of moves, or None for all that are left.

        Returns:
            The actions taken.
        """
        return self._take(self._board.left[:moves])

    def run_to(self, action: str | Action) -> Taken:
        """Take the moves of the schedule up to and including one action. Stops early as ``break_on`` says.

        Args:
            action: The action.

        Returns:
            The actions taken.

        Raises:
            MoveError: If the step has no such action, or if it is done already.
        """
        self._demand_midway()
        left = self._board.left
        return self._take(left[: left.index(self._board.find(action)) + 1])

    def do(self, action: str | Action) -> Taken:
        """Take one ready move, in any order.

        Args:
            action: An action of the move.

        Returns:
            The actions taken.

        Raises:
            MoveError: If the move is not ready; the text says what it waits for.
        """
        self._demand_midway()
        return self._take([self._board.demand_ready(action)])

    def break_on(self, predicate: Callable[[ComputedValue], object] | None) -> None:
        """Stop after the first move whose result fulfils a predicate.

        Examples: ``break_on(lambda seen: not seen.finite)``, or ``seen.norm > 100``, or ``seen.memory > 2**30``.

        Args:
            predicate: A function of the result of an action on an actor, or None to stop nowhere.

        Raises:
            MoveError: If it uses an attribute that a result does not have; the text names the nearest one. The previous
                predicate stays then.
        """
        if predicate is not None and (faults := predicate_faults(predicate)):
            raise MoveError("\n".join(faults))
        self._predicate = predicate

    def swap(self, schedule: str | Schedule | Written) -> Taken:
        """Perform the remaining actions of the step in the order of another schedule.

        Args:
            schedule: A name, a CSV file, a Schedule, or rows of Actions or texts, one for each rank: ``[["0F0", "0B0"],
                ["1F0", "1B0"]]``.

        Returns:
            No actions; a REPL and a notebook show the drawing.

        Raises:
            ScheduleError: If the schedule, together with the actions that are done, breaks a rule. Nothing has changed
                then.
        """
        self._demand_midway()
        wanted = schedule if isinstance(schedule, str | Schedule) else Schedule.of("edited", schedule)
        self._board.swap(lowered_step(self._loaded.run, wanted))
        return Taken.of((), self._drawing())

    def record(self, path: str | PathLike[str], stage: int, dp: int = 0) -> None:
        """Record the inputs and results of a stage of a replica in this step, for ``raypar.replay``.

        ``finish`` writes the file.

        Args:
            path: The file.
            stage: The stage.
            dp: The replica.

        Raises:
            MoveError: If the stage has done an action already.
            ConfigError: If there is no such stage or replica, or if the file can't be written.
        """
        self._demand_midway()
        begun = [action for action in self.done if action.stage == stage]
        if begun:
            raise MoveError(f"stage {stage} has done {begun[0]} already: rewind() first")
        self._recorder.begin(Path(path), stage, dp, self.schedule)
        self._guard(self._recorder.start)

    # --- end of the step ---

    def finish(self) -> Report:
        """Take all moves that are left, regardless of ``break_on``, close the step, and return its report."""
        if self._report is None:
            with patience(f"step {self.step + 1}") as ctrl_c:
                self._perform(self._board.left)
                results = self._timed(lambda: self._loaded.calls.all("end", what=f"step {self.step + 1}"))
                self._report = self._commit(results, self._seconds)
                self._report = replace(self._report, picture=self._drawing().html)
                self._guard(lambda: self._recorder.save(self.step))
            ctrl_c.heed()
        return self._report

    def rewind(self) -> Taken:
        """Return to the start of the step and to its first schedule.

        Weights, optimizer state and buffers are restored bitwise.
        """
        with patience(f"rewinding step {self.step + 1}") as ctrl_c:
            self._take_back()
            self._board, self._note = Board(self._loaded.schedule), ""
            self._guard(self._recorder.start)
        ctrl_c.heed()
        return Taken.of((), self._drawing())

    def abort(self) -> None:
        """Give up the step: the state from before it is restored, and the job can go on."""
        with patience(f"giving step {self.step + 1} up") as ctrl_c:
            self._take_back()
            self._over = JobError(f"step {self.step + 1} was given up: job.stepper() begins the next one")
        ctrl_c.heed()

    def lose(self, error: JobError) -> None:
        """Give up the step because of a failure; all further moves raise the error. The job calls this."""
        self._over = error

    # --- internals ---

    def _take_back(self) -> None:
        """Make the actors restore their state from the start of the step."""
        self._demand_midway()
        self._guard(lambda: self._loaded.calls.all("rewind", what=f"rewinding step {self.step + 1}"))

    def _take(self, chosen: Sequence[Move]) -> Taken:
        """Take moves: together, or one by one if there is a predicate to evaluate after each."""
        self._demand_midway()
        before, size = len(self._board.taken), len(chosen) if self._predicate is None else 1
        self._note = ""
        with patience(f"the moves of step {self.step + 1}") as ctrl_c:
            for at in range(0, len(chosen), max(1, size)):
                self._perform(chosen[at : at + size])
                if ctrl_c.raises is not None or (self._predicate is not None and self._stops(chosen[at])):
                    break
        ctrl_c.heed()
        return Taken.of(self._board.taken[before:], self._drawing())

    def _perform(self, chosen: Sequence[Move]) -> None:
        """Submit the moves without waiting in between; each actor performs its calls in the order of submission."""
        self._demand_begun()
        calls = [(rank, action) for move in chosen for row, action in move.actions for rank in self._ranks(row, action)]

        def perform() -> None:
            refs = [self._loaded.handles[rank].perform.remote(action) for rank, action in calls]
            self._loaded.calls.gather(refs, f"step {self.step + 1}", [rank for rank, _ in calls])

        if calls:
            try:
                self._timed(perform)
            except NonFiniteError as error:
                self._over = error  # no actor has performed the STEP: this step is over
                raise
            for move in chosen:
                self._board.take(move)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Make a guarded call, and add its time to that of the step."""
        start = time.perf_counter()
        answer = self._guard(call)
        self._seconds += time.perf_counter() - start
        return answer

    def _stops(self, move: Move) -> bool:
        """Return whether the predicate holds for a result of a move."""
        assert self._predicate is not None
        for action in filter(makes_tensors, move.names):
            for seen in self._peeking.everywhere(action, self.schedule):
                if self._predicate(seen):
                    self._note = f"stopped after {seen!r}\n"
                    return True
        return False

    def _ranks(self, row: int, action: Action) -> tuple[int, ...]:
        """Return the ranks that perform an action of a row: all replicas and expert actors, for STEP servers."""
        servers = range(self._loaded.world.servers if action.op is Op.STEP else 0)
        return (
            *self._loaded.world.trainers_in(row),
            *(self._loaded.world.server_rank(row, index) for index in servers),
        )

    def _demand_begun(self) -> None:
        if self._over is not None:
            raise self._over.with_traceback(None)  # without the traceback of the first raise

    def _demand_midway(self) -> None:
        self._demand_begun()
        if self._report is not None:
            raise JobError(f"step {self.step + 1} is finished: job.stepper() begins the next one")

    def _next_compute(self) -> Action | None:
        """Return the next compute action of the rank that moves next; the drawings show compute only."""
        left = self._board.left
        rank = left[0].actions[0][0] if left else None
        return next((move.head for move in left if move.head.op in COMPUTE and move.actions[0][0] == rank), None)

    def _cursor(self) -> str:
        """Name the next move."""
        if not self.midway:
            return f"nothing, the step is {'finished' if self._over is None else 'given up'}"
        return str(self._board.left[0]) if self._board.left else "finish()"
