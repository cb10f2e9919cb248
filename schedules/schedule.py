"""The schedule: rows of actions, one row per pipeline rank; the whole training step as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action, Op
from raypar.schedules.drawing.notebook import own_lines
from raypar.schedules.written_rows import (
    number_faults,
    read_rows,
    replicas_of,
    turns_of,
    unlike_replicas,
    written_skips,
)

MOST_SHOWN = 10


def first_faults(faults: Iterable[str], most: int = MOST_SHOWN) -> list[str]:
    """List the first faults and how many more there are.

    Args:
        faults: The faults; all of them are consumed.
        most: How many to list.

    Returns:
        One text for each fault listed, and one for the rest; an empty list if there are no faults.
    """
    every = iter(faults)
    first = list(islice(every, most))
    more = sum(1 for _ in every)
    return [*first, f"... and {more} more"] if more else first


Written = Iterable[Sequence[Action | str | tuple[int | None, str, int | None]]]

MOST_DRAWN = 20_000  # actions of a schedule that still draws itself


class Drawer(NamedTuple):
    """The functions that draw a schedule or a timeline; see ``register_drawer``.

    Attributes:
        text: Returns the grid of characters.
        svg: Returns the picture as standalone SVG.
        save: Writes the drawing that a path's ending names to that path, and returns the path.
    """

    text: Callable[[Any], str]
    svg: Callable[[Any], str]
    save: Callable[[Any, str | Path], Path]


_drawers: list[Drawer] = []


def register_drawer(drawer: Drawer) -> None:
    """Make schedules and timelines draw themselves with this drawer. Importing ``raypar.schedules`` registers one."""
    _drawers[:] = [drawer]


def drawer() -> Drawer:
    """Return the registered drawer."""
    return _drawers[0]


class ScheduleError(ValueError):
    """A schedule that its definition does not allow, or that breaks a rule; the text says which and where."""

    _render_traceback_ = own_lines


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of actions, frozen. This one object is drawn, checked, simulated, stepped and run.

    Make one with a generator (``catalog.build``), from a CSV file, or from any rows with ``Schedule.of``.

    Attributes:
        name: The name in messages and pictures.
        rows: One tuple of actions for each pipeline rank, or for each replica of one; see ``replicas``.
        placement: ``placement[stage]`` is the pipeline rank that holds the stage.
        num_microbatches: Number of microbatches of all steps, or of all their slices.
        lowered: Whether the rows contain their communication (SEND and RECV), so that actors can run them.
        forward_only: Whether there is no backward: an evaluation.
        stream: Number of steps of an asynchronous schedule, in which every stage updates its weights by itself, so that
            steps overlap. 0 for a synchronous one, which is one step.
        replicas: By pipeline rank, the number of its replicas, if ranks have different numbers: each replica has a row,
            and replica k mod r has microbatch k (PipeDream's 1F1B-RR). Empty if a rank is one row.
        skips: The skip connections, as pairs of stages: the first one sends values to the second one, besides those
            that each stage sends to the next. ``with_skips`` adds them.
        validated: Whether a stream updates weights before the gradients of all stages are known, and validates the
            updates afterwards: there is a VALIDATE for each STEP. ``without_flush`` makes such schedules.
        slices: Number of slices along its sequence into which each microbatch is cut. If several, number n in the rows
            is slice n mod ``slices`` of microbatch n // ``slices``. ``with_slices`` makes such schedules.
        turns: By stage, which of its replicas takes microbatch 0, if that is not always the first: with turn t,
            replica (k + t) mod r has microbatch k. ``dualpipe`` makes such schedules.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    num_microbatches: int
    lowered: bool
    forward_only: bool
    stream: int = 0
    replicas: tuple[int, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    validated: bool = False
    slices: int = 1
    turns: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, rows: Written, *, lowered: bool | None = None) -> Schedule:
        """Make a schedule from rows, which determine all its attributes except skips between stages of one rank.

        Args:
            name: The name of the schedule.
            rows: One row for each rank, or for each replica of one; see ``read_rows``.
            lowered: Whether the rows contain their communication. None: whether there is a SEND or RECV. A schedule
                without boundaries between ranks has none, so that the caller must set it.

        Raises:
            ScheduleError: The rows can't be read, have nothing to compute, have a stage on two ranks that do not take
                its microbatches in turn, leave out a stage, name a microbatch that they have too few forwards for, or
                have steps of unequal length.
        """
        try:
            frozen = read_rows(rows)
        except ValueError as error:
            raise ScheduleError(f"schedule {name!r}: {error}") from error
        holders: dict[int, list[int]] = {}  # by stage, the rows that have it
        last_microbatch, forwards, stream = -1, 0, 0
        communicates, forward_only = False, True
        faults: dict[str, None] = {}
        for rank, row in enumerate(frozen):
            for stage, op, microbatch, _ in row:
                if op in COMPUTE:
                    assert stage is not None and microbatch is not None
                    if (rows_of := holders.setdefault(stage, [rank]))[-1] != rank:
                        rows_of.append(rank)
                    if microbatch > last_microbatch:
                        last_microbatch = microbatch
                    if op is Op.F:
                        forwards += 1
                    else:
                        forward_only = False
                elif op in SENDS or op in RECVS:
                    communicates = True
                elif op is Op.STEP and microbatch is not None:
                    stream = max(stream, microbatch + 1)
        replicas = replicas_of(len(frozen), holders)
        turns = turns_of(frozen, holders) if replicas else ()
        if replicas:
            faults |= dict.fromkeys(unlike_replicas(frozen, holders, replicas, turns))
        faults |= dict.fromkeys(number_faults(holders, last_microbatch, forwards, stream))
        if faults:
            raise ScheduleError(f"schedule {name!r}: " + "; ".join(faults))
        rank_of_row = [rank for rank, count in enumerate(replicas) for _ in range(count)] or range(len(frozen))
        return cls(
            name,
            frozen,
            placement=tuple(rank_of_row[holders[stage][0]] for stage in range(len(holders))),
            num_microbatches=last_microbatch + 1,
            lowered=communicates if lowered is None else lowered,
            forward_only=forward_only,
            stream=stream,
            replicas=replicas,
            skips=written_skips(frozen),
            validated=any(action.op is Op.VALIDATE for row in frozen for action in row),
            turns=turns,
        )

    @property
    def num_ranks(self) -> int:
        """Number of rows: of pipeline ranks, or of all their replicas if each replica has a row."""
        return len(self.rows)

    @property
    def num_pipeline_ranks(self) -> int:
        """Number of pipeline ranks, each counted once with all its replicas."""
        return len(self.replicas) or len(self.rows)

    def pipeline_rank_of(self, row: int) -> int:
        """Return the pipeline rank of a row."""
        if not self.replicas:
            return row
        return next(rank for rank, end in enumerate(accumulate(self.replicas)) if row < end)

    def rows_of(self, rank: int) -> range:
        """Return the rows of a pipeline rank: one, or one for each of its replicas."""
        if not self.replicas:
            return range(rank, rank + 1)
        first = sum(self.replicas[:rank])
        return range(first, first + self.replicas[rank])

    def row_of(self, stage: int, microbatch: int) -> int:
        """Return the row in which a stage computes a microbatch."""
        rank = self.placement[stage]
        if not self.replicas:
            return rank
        return sum(self.replicas[:rank]) + (microbatch + self.turn(stage)) % self.replicas[rank]

    def turn(self, stage: int) -> int:
        """Return which of a stage's replicas takes microbatch 0."""
        return self.turns[stage] if stage < len(self.turns) else 0

    def microbatches_of(self, row: int, stage: int) -> range:
        """Return the microbatches of one of a row's stages: all, or each r-th one of a replica among r."""
        if not self.replicas:
            return range(self.num_microbatches)
        same = self.rows_of(self.pipeline_rank_of(row))
        return range((row - same.start - self.turn(stage)) % len(same), self.num_microbatches, len(same))

    def label(self, row: int) -> str:
        """Name a row in drawings and messages: ``rank 1``, or ``rank 1.0`` for the first of several replicas."""
        if not self.replicas:
            return f"rank {row}"
        same = self.rows_of(rank := self.pipeline_rank_of(row))
        return f"rank {rank}.{row - same.start}" if len(same) > 1 else f"rank {rank}"

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return len(self.placement)

    @property
    def num_actions(self) -> int:
        """Number of actions of all rows."""
        return sum(map(len, self.rows))

    @property
    def num_steps(self) -> int:
        """Number of steps, each of which is an update of all weights."""
        return self.stream or 1

    @property
    def microbatches_a_step(self) -> int:
        """Number of microbatches of one step."""
        return self.num_microbatches // self.num_steps // self.slices

    @property
    def numbers_a_step(self) -> int:
        """Number of forwards of a stage in one step: one for each microbatch, or for each slice of one."""
        return self.num_microbatches // self.num_steps

    def stages_of(self, row: int) -> tuple[int, ...]:
        """Return the stages that a row holds, in order."""
        return self.stages_on(self.pipeline_rank_of(row))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.rows)

    def _repr_svg_(self) -> str | None:
        """Return the picture for a notebook, or None if the schedule is too large for one."""
        return drawer().svg(self) if self.num_actions <= MOST_DRAWN else None

    _repr_html_ = _repr_svg_  # within the page, so that it has its colours

    def save(self, path: str | Path) -> Path:
        """Write a drawing, and return its path.

        Args:
            path: The file. Its ending selects the format: the picture (.svg), the whole grid (.txt), torch's table
                (.csv) or a trace for Perfetto (.json).

        Raises:
            ScheduleError: The path has another ending.
            OSError: The file can't be written.
        """
        return drawer().save(self, path)

    @property
    def title(self) -> str:
        """The schedule in one line."""
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {self.num_actions} actions{', lowered' if self.lowered else ''}>"
        )

    def __repr__(self) -> str:
        """Return the grid for a REPL, or one line if the schedule is too large for one or can't run."""
        try:
            return drawer().text(self) if self.num_actions <= MOST_DRAWN else self.title
        except ScheduleError:
            return self.title
