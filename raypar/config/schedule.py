"""From what a run calls its schedule to the programs that actors perform: every pass, and the check behind the last."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from raypar.actors.specs.types import SEND_WINDOW, Backward, ProgramName
from raypar.schedules.action import Op
from raypar.schedules.catalog import entry_of
from raypar.schedules.checking.counterexample import Generate, demand_sound
from raypar.schedules.passes.lower import Order, lower
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs
from raypar.schedules.torch_csv import from_csv

Programs = Mapping[ProgramName, Schedule]

MOST_BYTES = 128 << 20  # of a CSV file
MOST_CELLS = 5_000_000  # microbatches x stages; to lower and to check one takes about 700 bytes and 70 us


def programs_of(
    schedule: str | Schedule, ranks: int, microbatches: int, chunks: int | None, *, reduce_grad: bool = False
) -> Programs:
    """The training step and its evaluation: the same forwards in the same order, without the backwards.

    ``reduce_grad``: there are replicas or servers, so that every stage reduces its gradients. Backwards are as the
    schedule writes them: ``with_backward`` is the pass that is left.

    Raises ScheduleError if there is no such schedule, if it does not fit the sizes, or if it breaks a rule.
    """
    loaded = load(schedule, ranks, microbatches, chunks)
    train = loaded.schedule
    if train.forward_only:
        raise ScheduleError(f"schedule {train.name!r} has no backward: it can evaluate but not train; use 1f1b, say")
    if train.num_ranks != ranks:
        raise ScheduleError(f"schedule {train.name!r} is for {train.num_ranks} ranks: set mesh.pp to {train.num_ranks}")
    if train.num_microbatches != microbatches:
        raise ScheduleError(
            f"schedule {train.name!r} is for {train.num_microbatches} microbatches: "
            f"set microbatches to {train.num_microbatches}"
        )
    forwards = ([action for action in row if action.op is Op.F] for row in train.rows)
    lowered = loaded.lowered(reduce_grad=reduce_grad)
    return {"train": lowered, "evaluate": Loaded(Schedule.of(f"{train.name} forwards", forwards)).lowered()}


def with_backward(programs: Programs, backward: Backward, costs: Costs, *, hold: bool) -> Programs:
    """The programs with the backwards of the training step split into I and W; proved safe, as they will run.

    Args:
        programs: lowered and checked.
        backward: "auto" splits where it makes the step shorter, "split" every backward, "whole" none.
        costs: what the actions of the training step last, on paper.
        hold: a W may come later than the SEND of its I; see ``split_backward``.

    Raises:
        ScheduleError: the rows break a rule, which would be a fault of the pass.
    """
    if backward == "whole":
        return programs
    train = split_backward(programs["train"], costs, every=backward == "split", hold=hold)
    if train is not programs["train"]:
        demand_sound(train, send_capacity=SEND_WINDOW)
    return {**programs, "train": train}


@dataclass(frozen=True)
class Loaded:
    """A schedule, and what makes it for other sizes; None where there are only its rows."""

    schedule: Schedule
    generate: Generate | None = None

    def lowered(
        self, order: Order = "just_in_time", *, reduce_grad: bool = False, send_capacity: int = SEND_WINDOW
    ) -> Schedule:
        """The schedule lowered and proved safe; raises ScheduleError with what does not hold, the smallest case of it
        too.
        """
        generate = self.generate

        def full(schedule: Schedule) -> Schedule:
            return lower(schedule, order, reduce_grad=reduce_grad)

        try:
            lowered = full(self.schedule)
        except ScheduleError:
            demand_sound(self.schedule, generate)  # it says more: what is missing, and where
            raise
        smaller = None if generate is None else lambda *sizes: full(generate(*sizes))
        demand_sound(lowered, smaller, send_capacity=send_capacity)
        return lowered


def load(schedule: str | Schedule, ranks: int, microbatches: int, chunks: int | None) -> Loaded:
    """A schedule by name, by the code that generates it (``my.py:zigzag``), from a CSV file, or as it is.

    Raises ScheduleError, for a file that can't be read and for code that fails, too.
    """
    if isinstance(schedule, Schedule):
        return Loaded(schedule)
    path = Path(schedule)
    if path.suffix != ".csv":
        if ranks * microbatches * (chunks or 1) > MOST_CELLS:
            sizes = f"{ranks} ranks x {microbatches} microbatches x {chunks or 1} chunks"
            raise ScheduleError(f"schedule {schedule!r}: {sizes} are more than {MOST_CELLS}: use smaller numbers")
        generate = partial(entry_of(schedule).build, schedule)
        return Loaded(generate(ranks, microbatches, chunks), generate)
    from raypar.actors.files import read_named  # to draw a schedule by its name takes no file

    try:
        return Loaded(from_csv(read_named(path, MOST_BYTES).decode(), path.stem))
    except OSError as error:
        raise ScheduleError(f"schedule file {schedule!r} can't be read ({error.strerror}): correct the path") from error
    except ScheduleError:
        raise
    except (ValueError, csv.Error) as error:  # no UTF-8, a NUL in the path
        raise ScheduleError(f"schedule file {schedule!r} is not a CSV text ({error}): write one with to_csv") from error


def schedule_faults(schedule: str | Schedule) -> list[str]:
    """What is wrong with what a run calls its schedule, whatever the sizes of the run."""
    try:
        if isinstance(schedule, str) and Path(schedule).suffix != ".csv":
            entry_of(schedule)
        else:
            load(schedule, 1, 1, None)
    except ScheduleError as error:
        return [str(error)]
    return []


def only_row(schedule: Schedule, rank: int) -> Schedule:
    """The schedule with the other ranks' rows empty: what one actor has to know."""
    return replace(schedule, rows=tuple(row if i == rank else () for i, row in enumerate(schedule.rows)))
