"""The return values of a stepper, which a REPL shows as drawings and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.actors.specs.results import Kind
from raypar.schedules.action import Action
from raypar.schedules.drawing.cells import lines, lines_in_width
from raypar.schedules.drawing.notebook import box, notebook_table, text_block
from raypar.schedules.drawing.svg import svg
from raypar.schedules.drawing.text import text
from raypar.schedules.formatting import aligned
from raypar.schedules.schedule import Schedule
from raypar.schedules.step_board import Move

if TYPE_CHECKING:
    from raypar.actors.inspect.step import ActorContents

_KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "gathered", "buckets")
_HEAD = (*_KINDS, "peak", "in flight", "values for other actions")
_LEAST = 0.001  # MiB: smaller sizes are shown as less than this


@dataclass(frozen=True)
class StepDrawing:
    """A step by hand as it is at one time: a grid of text, or a picture. It is drawn only where it is shown.

    Attributes:
        heading: Lines above it.
        schedule: The schedule of the step.
        done: The actions that are done.
        cursor: The computation that comes next; None if there is none.
    """

    heading: str
    schedule: Schedule
    done: frozenset[Action]
    cursor: Action | None

    def __str__(self) -> str:
        return f"{self.heading}\n{text(self.schedule, done=self.done, cursor=self.cursor)}"

    def svg(self) -> str:
        """Return the picture alone."""
        return svg(self.schedule, done=self.done, cursor=self.cursor)

    def html(self) -> str:
        """Return the heading and the picture, for a notebook."""
        return box(text_block(self.heading), self.svg())


class Taken(tuple[Action, ...]):
    """The actions of the moves just taken. A REPL and a notebook show the drawing of the step so far."""

    _drawing: StepDrawing

    @classmethod
    def of(cls, moves: Sequence[Move], drawing: StepDrawing) -> Taken:
        """Make the value.

        Args:
            moves: The moves taken.
            drawing: What is shown.
        """
        taken = cls(name for move in moves for name in move.names)
        taken._drawing = drawing
        return taken

    def __repr__(self) -> str:
        return str(self._drawing)

    def _repr_html_(self) -> str:
        return self._drawing.html()


class Ready(tuple[Action, ...]):
    """The actions that may be taken next; for a SEND and its RECV only the SEND.

    A REPL shows one line for each pipeline rank.
    """

    _ranks: tuple[int, ...]

    @classmethod
    def of(cls, moves: Sequence[Move]) -> Ready:
        """Make the value from the ready moves."""
        ready = cls(move.head for move in moves)
        ready._ranks = tuple(move.actions[0][0] for move in moves)
        return ready

    def __repr__(self) -> str:
        if not self:
            return "nothing: take finish()"
        ranks = sorted(set(self._ranks))
        rows = [[str(action) for action, at in zip(self, self._ranks, strict=True) if at == rank] for rank in ranks]
        return "\n".join(lines([f"rank {rank}" for rank in ranks], rows))


class State(tuple["ActorContents", ...]):
    """The memory that every actor holds. A REPL shows a table, with sizes in MiB."""

    def __repr__(self) -> str:
        rows = [_HEAD, *map(_cells, self)]
        return "\n".join(lines_in_width(["MiB", *(held.actor for held in self)], aligned(rows)))

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return box(notebook_table([(held.actor, *_cells(held)) for held in self], ("MiB", *_HEAD)))


def _cells(held: ActorContents) -> tuple[str, ...]:
    kinds = [held.now.get(kind) for kind in _KINDS]
    sizes = ("-" if size is None else _mib(size) for size in (*kinds, held.memory))
    flying = (f"{stage}F{microbatch}" for stage, all_of_it in held.in_flight.items() for microbatch in all_of_it)
    values = (f"{action} ({_mib(size)})" for action, size in held.values.items())
    return (*sizes, " ".join(flying) or "-", ", ".join(values) or "-")


def _mib(count: int) -> str:
    """Format bytes as MiB, with about three digits; only 0 bytes are shown as 0."""
    size = count / 2**20
    if 0 < size < _LEAST:
        return f"<{_LEAST}"
    return f"{size:,.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}" if count else "0"
