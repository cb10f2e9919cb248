"""Who is where and does what: a table of a job's actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypar.actors.specs.results import Located, Progress, Span
from raypar.actors.specs.types import ProgramName
from raypar.schedules.action import Op
from raypar.schedules.drawing.cells import lines_in_width
from raypar.schedules.drawing.notebook import box, notebook_table
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import aligned

_HEAD = ("node", "pid", "step", "action", "done", "F ms", "B ms", "W ms")
_SPELLED = {"F": (Op.F,), "B": (Op.B, Op.I), "W": (Op.W,)}


class Actor(NamedTuple):
    """An actor now.

    Attributes:
        actor: Its name; "spare" if it has no rank, "missing" if it is lost and no other one has come yet.
        node: The name of its machine; "" if it does not answer.
        pid: Its process there; 0 if it does not answer.
        step: The step that it is in, or was in last, counted from 1; 0 before the first, or if it does not answer.
            After ``job.evaluate()``, the batch of the evaluation.
        action: The action under way; "" between two; "no answer"; of one that is missing "starts" or "no room".
        done: Number of actions of that step that are done.
        seconds: Mean seconds of a forward (F), a backward or its first half (B), and a second half (W), in the latest
            step that was measured; of those that it has.
        program: "train", or "evaluate" if the step is a batch of an evaluation.
    """

    actor: str
    node: str
    pid: int
    step: int
    action: str
    done: int
    seconds: dict[str, float]
    program: ProgramName = "train"


class Whereabouts(list[Actor]):
    """A row for each actor, by rank. A REPL and a notebook show a table."""

    def __repr__(self) -> str:
        cells = [list(_HEAD), *map(_cells, self)]
        return "\n".join(lines_in_width(["actor", *(one.actor for one in self)], aligned(cells)))

    def _repr_html_(self) -> str:
        return box(notebook_table([(one.actor, *_cells(one)) for one in self], ("actor", *_HEAD)))


def actor_of(label: str, at: Located | None, progress: Progress | None, events: Sequence[Span]) -> Actor:
    """Describe an actor.

    Args:
        label: Its name.
        at: Its machine and process; None if it does not answer.
        progress: How far it is; None if it does not answer.
        events: The spans of its latest measured step.
    """
    seconds = {}
    for spelled, ops in _SPELLED.items():
        spans = [span.end - span.start for span in events if span.action.op in ops]
        if spans:
            seconds[spelled] = float_sum(spans) / len(spans)
    if at is None or progress is None:
        return Actor(label, "", 0, 0, "no answer", 0, seconds)
    doing = str(progress.action or "")
    return Actor(label, at.machine, at.process.pid, progress.step + 1, doing, progress.done, seconds, progress.program)


def without_rank(at: Located | None) -> Actor:
    """Describe an actor that waits to take a rank. ``at`` is its machine and process; None if it does not answer."""
    if at is None:
        return Actor("spare", "", 0, 0, "no answer", 0, {})
    return Actor("spare", at.machine, at.process.pid, 0, "", 0, {})


def lost_actor_row(*, has_room: bool) -> Actor:
    """Describe an actor that is lost, and for which another one starts if a node has room."""
    return Actor("missing", "", 0, 0, "starts" if has_room else "no room", 0, {})


def _cells(one: Actor) -> list[str]:
    times = [f"{one.seconds[spelled] * 1e3:.1f}" if spelled in one.seconds else "-" for spelled in _SPELLED]
    number = f"eval {one.step}" if one.program == "evaluate" else str(one.step)
    step = number if one.step else "-"
    return [one.node or "-", str(one.pid or "-"), step, one.action or "-", str(one.done), *times]
