"""From what a run calls its schedule to the programs that actors perform: lowered and proved safe."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from raypar.actors.plan import SEND_WINDOW, ProgramName
from raypar.schedules.action import Op
from raypar.schedules.catalog import build
from raypar.schedules.check import check
from raypar.schedules.lower import lower
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.table import from_csv

Programs = Mapping[ProgramName, Schedule]

MOST_BYTES = 128 << 20  # of a CSV file
MOST_CELLS = 5_000_000  # microbatches x stages; to lower and to check one takes about 700 bytes and 70 us


def programs_of(
    schedule: str | Schedule, ranks: int, microbatches: int, chunks: int | None, *, reduce_grad: bool = False
) -> Programs:
    """The training step and its evaluation: the same forwards in the same order, without the backwards.

    ``reduce_grad``: there are replicas or servers, so that every stage reduces its gradients.

    Raises ScheduleError if there is no such schedule, if it does not fit the sizes, or if it breaks a rule.
    """
    train = lower(load_schedule(schedule, ranks, microbatches, chunks), reduce_grad=reduce_grad)
    if train.forward_only:
        raise ScheduleError(f"schedule {train.name!r} has no backward: it can evaluate but not train; use 1f1b, say")
    if train.num_ranks != ranks:
        raise ScheduleError(f"schedule {train.name!r} is for {train.num_ranks} ranks: set mesh.pp to {train.num_ranks}")
    if train.num_microbatches != microbatches:
        raise ScheduleError(
            f"schedule {train.name!r} is for {train.num_microbatches} microbatches: "
            f"set microbatches to {train.num_microbatches}"
        )
    if any(action.op in (Op.I, Op.W) for row in train.rows for action in row):
        raise ScheduleError(
            f"schedule {train.name!r} splits backwards into I and W, which actors do not compute yet: write B for both"
        )
    forwards = ([action for action in row if action.op is Op.F] for row in train.rows)
    evaluate = lower(Schedule.of(f"{train.name} forwards", forwards))
    for program in (train, evaluate):
        check(program, send_capacity=SEND_WINDOW)
    return {"train": train, "evaluate": evaluate}


def load_schedule(schedule: str | Schedule, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """A schedule by name, from a CSV file, or as it is. Raises ScheduleError, for a file that can't be read too."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"{schedule!r} is no schedule: give a name, the path of a CSV file, or a Schedule")
    path = Path(schedule)
    if path.suffix != ".csv":
        if ranks * microbatches * (chunks or 1) > MOST_CELLS:
            sizes = f"{ranks} ranks x {microbatches} microbatches x {chunks or 1} chunks"
            raise ScheduleError(f"schedule {schedule!r}: {sizes} are more than {MOST_CELLS}: use smaller numbers")
        return build(schedule, ranks, microbatches, chunks)
    from raypar.actors.disk import read_named  # to draw a schedule by its name takes no file

    try:
        return from_csv(read_named(path, MOST_BYTES).decode(), path.stem)
    except OSError as error:
        raise ScheduleError(f"schedule file {schedule!r} can't be read ({error.strerror}): correct the path") from error
    except ScheduleError:
        raise
    except (ValueError, csv.Error) as error:  # no UTF-8, a NUL in the path
        raise ScheduleError(f"schedule file {schedule!r} is not a CSV text ({error}): write one with to_csv") from error


def schedule_faults(schedule: str | Schedule) -> list[str]:
    """What is wrong with what a run calls its schedule, whatever the sizes of the run."""
    try:
        load_schedule(schedule, 1, 1, None)
    except ScheduleError as error:
        return [str(error)]
    return []


def only_row(schedule: Schedule, rank: int) -> Schedule:
    """The schedule with the other ranks' rows empty: what one actor has to know."""
    return replace(schedule, rows=tuple(row if i == rank else () for i, row in enumerate(schedule.rows)))
