"""The schedule as text: one line a rank, one column a time slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.drawing.cells import lines, padded, widest
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import UNIT, simulate
from raypar.schedules.timeline import Timeline

MOST_LANES = 64
WIDTH = 160

_ANSI = {Op.F: "\x1b[30;44m", Op.B: "\x1b[30;42m", Op.I: "\x1b[30;46m", Op.W: "\x1b[30;43m"}
_PLAIN = "\x1b[0m"
_GOES_ON = "--"


def text(
    drawn: Schedule | Timeline,
    *,
    color: bool = False,
    width: int | None = WIDTH,
    done: Collection[Action] | None = None,
    cursor: Action | None = None,
) -> str:
    """Draw the compute of a schedule, or of a timeline, as a grid of characters.

    A schedule is drawn with every action one slot long. In a timeline a slot is the shortest kind of action, and an
    action that lasts longer goes on with ``--``. ``F0`` is a forward of microbatch 0; the stage stands in front of
    it, ``3F0``, where ranks hold several. The last line tells makespan, bubble and the most activations each rank
    holds at once; of a measured timeline in milliseconds.

    color  paint the cells by op, with ANSI escapes for a terminal
    width  cut the lines to so many characters, and say so; None cuts nothing
    done   actions that have happened, of a step under way: the others are drawn in lower case, ``f0``, without paint
    cursor the one that comes next: ``>f0``
    """
    timeline = simulate(drawn, UNIT) if isinstance(drawn, Schedule) else drawn
    return "\n".join([*grid({"": timeline}, color=color, width=width, done=done, cursor=cursor), summary(timeline)])


def grid(
    timelines: Mapping[str, Timeline],
    *,
    color: bool = False,
    width: int | None = WIDTH,
    done: Collection[Action] | None = None,
    cursor: Action | None = None,
) -> list[str]:
    """The lines of ``text`` for timelines of one schedule, by their names: a rank has a line for each, and a slot is
    that of the first one, so that they share one axis."""
    first = next(iter(timelines.values()))
    schedule, length = first.schedule, slot_length(first)
    several = schedule.num_stages > schedule.num_ranks
    shown = range(min(schedule.num_ranks, MOST_LANES))
    labels = [f"rank {rank} {name}".rstrip() for rank in shown for name in timelines]
    spans = [
        (rank * len(timelines) + place, start, end, action)
        for place, timeline in enumerate(timelines.values())
        for rank, start, end, action in _spans(timeline, length)
    ]
    columns = max((end for _, _, end, _ in spans), default=0)
    cell = max(len(_GOES_ON), widest(_label(action, several) for _, _, _, action in spans)) + (cursor is not None)
    room = columns if width is None else max(1, (width - widest(labels) - 2) // (cell + 1))
    lanes: list[dict[int, Action]] = [{} for _ in range(schedule.num_ranks * len(timelines))]
    for line, start, end, action in spans:
        for column in range(start, min(end, room)):
            lanes[line].setdefault(column, action)
    paint = _painted if color else _cells
    rows = []
    for lane in lanes[: len(labels)]:
        actions = [lane.get(column) for column in range(max(lane, default=-1) + 1)]
        rows.append(paint(actions, several, cell, done, cursor))
    picture = lines(labels, rows)
    if room < columns or len(shown) < schedule.num_ranks:
        picture.append(
            f"(ranks 0 to {shown[-1]} of {schedule.num_ranks}, slots 0 to {min(room, columns) - 1} of {columns})"
        )
    return picture


def plain(time: float) -> str:
    """A time of a timeline, in whatever unit it has."""
    return f"{time:.6g}"


def milliseconds(seconds: float) -> str:
    """A time as people read it."""
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1 if seconds >= 1e-3 else 3}f} ms" if seconds else "0 ms"


def spelling(timeline: Timeline) -> Callable[[float], str]:
    """How its times are written."""
    return milliseconds if timeline.measured else plain


def summary(timeline: Timeline, spelled: Callable[[float], str] | None = None) -> str:
    """One line: makespan, bubble, activations in flight; times are spelled so, or as is the timeline's way."""
    spelled = spelled or spelling(timeline)
    held = timeline.in_flight
    flying = " ".join(map(str, held)) if len(held) <= 16 else f"at most {max(held)}"
    return f"{timeline.name}: makespan {spelled(timeline.makespan)}, bubble {timeline.bubble:.1%}, in flight {flying}"


def slot_length(timeline: Timeline) -> float:
    """How long the shortest kind of compute action typically lasts: a sensible unit to draw in.

    A W does not count: where no linear layer has left it anything to do, it takes next to nothing.
    """
    durations: defaultdict[Op, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.action.op in COMPUTE and event.action.op is not Op.W and event.end > event.start:
            durations[event.action.op].append(event.end - event.start)
    return min((sorted(lengths)[len(lengths) // 2] for lengths in durations.values()), default=1.0)


def _spans(timeline: Timeline, length: float) -> Iterator[tuple[int, int, int, Action]]:
    """For each compute action its rank, its first slot of such a length, the slot behind its last one, and itself.

    Those that take less than half a slot come last: they are drawn where nothing else is.
    """
    zero = timeline.start
    for event in sorted(timeline.events, key=lambda event: event.end - event.start < length / 2):
        if event.action.op in COMPUTE:
            first = round((event.start - zero) / length)
            yield event.rank, first, max(first + 1, round((event.end - zero) / length)), event.action


def _cells(
    actions: list[Action | None], several: bool, width: int, done: Collection[Action] | None, cursor: Action | None
) -> list[str]:
    texts = []
    for action, before in zip(actions, [None, *actions], strict=False):
        label = "" if action is None else _GOES_ON if action == before else _label(action, several)
        mark = "" if cursor is None else ">" if action == cursor != before else " "
        texts.append(mark + (label if done is None or action in done else label.lower()))
    return padded([texts], width)[0]


def _painted(
    actions: list[Action | None], several: bool, width: int, done: Collection[Action] | None, cursor: Action | None
) -> list[str]:
    cells = _cells(actions, several, width, done, cursor)
    return [
        cell if action is None or (done is not None and action not in done) else f"{_ANSI[action.op]}{cell}{_PLAIN}"
        for cell, action in zip(cells, actions, strict=True)
    ]


def _label(action: Action, several: bool) -> str:
    return str(action) if several else f"{action.op.value}{action.microbatch}"
