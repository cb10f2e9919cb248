"""The text drawing of a schedule or timeline: a line for each rank, a column for each time slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.drawing.cells import lines, padded, widest
from raypar.schedules.drawing.palette import TERMINAL
from raypar.schedules.formatting import milliseconds
from raypar.schedules.rules import gathers, opens_and_closes
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import UNIT, Outcome, simulate_to_deadlock
from raypar.schedules.timeline import Timeline
from raypar.schedules.versions import most_versions, versions_in

MOST_LANES = 64
WIDTH = 160

_MOST_NUMBERS = 8  # of ranks or stages that a line lists one by one
_PLAIN = "\x1b[0m"
_GOES_ON = "--"


def text(
    drawn: Schedule | Timeline,
    *,
    color: bool = False,
    width: int | None = WIDTH,
    done: Collection[Action] | None = None,
    cursor: Action | None = None,
    whole: str = '.save("FILE.svg")',
) -> str:
    """Draw the compute actions of a schedule or a timeline as a grid of characters.

    In a schedule every action is one slot long. In a timeline a slot is as long as the shortest kind of action, a
    longer action continues with ``--``, and a line counts the actions that are too short to be drawn. ``F0`` is the
    forward of microbatch 0; where ranks hold several stages the stage comes first, ``3F0``. In an asynchronous schedule
    ``F4.1`` is the forward of microbatch 4 with version 1 of its stage's weights. If the schedule gathers
    weights, ``(F0`` is the first action for which a stage is whole, and ``B3)`` the last one. The last line gives
    makespan, bubble, the most activations that each rank holds at once, and skips. For a schedule the times are "in
    slots", which are no prediction; the times of a measured timeline are in milliseconds.

    Args:
        drawn: The schedule or timeline.
        color: Whether to colour the cells by op, with ANSI escapes for a terminal.
        width: The most characters of a line, or None for no limit. A last line says if the grid was cut.
        done: The actions of a step under way that have happened; the others are lower case, ``f0``, and not coloured.
        cursor: The action that comes next, drawn as ``>f0``.
        whole: What draws all of it, for the line that says what was left out.

    Returns:
        The text, of several lines. A schedule that deadlocks is drawn as far as it goes, and the last line says why.
    """
    timeline, deadlock = simulate_to_deadlock(drawn, UNIT) if isinstance(drawn, Schedule) else (drawn, "")
    picture = grid({"": timeline}, color=color, width=width, done=done, cursor=cursor, whole=whole)
    picture.append(summary(timeline, named=f"{drawn.name} in slots" if isinstance(drawn, Schedule) else ""))
    return "\n".join([*picture, *deadlock_lines(timeline, deadlock)])


def deadlock_lines(timeline: Timeline, deadlock: str) -> list[str]:
    """Return what to read below a picture of a schedule that ends in a deadlock; [] if it has none."""
    drawn = f"drawn as far as it goes, {len(timeline.events)} of {timeline.schedule.num_actions} actions"
    return [f"{drawn}: {deadlock}"] if deadlock else []


def grid(
    timelines: Mapping[str, Timeline],
    *,
    color: bool = False,
    width: int | None = WIDTH,
    done: Collection[Action] | None = None,
    cursor: Action | None = None,
    whole: str = '.save("FILE.svg")',
) -> list[str]:
    """Return the lines of ``text`` without the last one, for timelines of one schedule, by name, on one time axis.

    Each rank has a line for each timeline. A slot is that of the first timeline. The other arguments are those of
    ``text``.
    """
    first = next(iter(timelines.values()))
    schedule, length = first.schedule, slot_length(first)
    several = schedule.num_stages > schedule.num_pipeline_ranks
    shown = range(min(schedule.num_ranks, MOST_LANES))
    labels = [f"{schedule.label(rank)} {name}".rstrip() for rank in shown for name in timelines]
    spans = [
        (rank * len(timelines) + number, start, end, action)
        for number, timeline in enumerate(timelines.values())
        for rank, start, end, action in _spans(timeline, length)
    ]
    columns = max((end for _, _, end, _ in spans), default=0)
    opens_closes = [opens_and_closes(row) for row in schedule.rows] if gathers(schedule) else []
    opens, closes = (
        (set[Action]().union(*found) for found in zip(*opens_closes, strict=True)) if opens_closes else ((), ())
    )
    versions = _versions(schedule)
    cell = max(len(_GOES_ON), widest(_label(action, several, versions) for _, _, _, action in spans))
    cell += (cursor is not None) + 2 * bool(opens)
    style = _Style(several, versions, cell, done, cursor, opens, closes)
    visible = columns if width is None else max(1, (width - widest(labels) - 2) // (cell + 1))
    lanes: list[dict[int, Action]] = [{} for _ in range(schedule.num_ranks * len(timelines))]
    for line, start, end, action in spans:
        for column in range(start, min(end, visible)):
            lanes[line].setdefault(column, action)
    paint = _painted if color else _cells
    rows = []
    for lane in lanes[: len(labels)]:
        actions = [lane.get(column) for column in range(max(lane, default=-1) + 1)]
        rows.append(paint(actions, style))
    picture = lines(labels, rows)
    if opens:
        picture.append("( before an action: UNSHARD gathers its stage's weights; ) after it: RESHARD frees them")
    left_out = [
        f"{name} {first} to {of - 1} of {of}"
        for name, first, of in (("ranks", len(shown), schedule.num_ranks), ("slots", visible, columns))
        if first < of
    ]
    if left_out:
        picture.append(f"(left out: {' and '.join(left_out)}; {whole} draws all)")
    drawn = [set(lane.values()) for lane in lanes]
    hidden = sum(
        1 for line, start, _, action in spans if line < len(labels) and start < visible and action not in drawn[line]
    )
    if hidden:
        picture.append(f"({hidden} {'action is' if hidden == 1 else 'actions are'} too short to be drawn)")
    return picture


def plain(time: float) -> str:
    """Format a time in the timeline's own unit."""
    return f"{time:.6g}"


def spelling(timeline: Timeline) -> Callable[[float], str]:
    """Return the function that formats a timeline's times: milliseconds if measured, plain numbers if simulated."""
    return milliseconds if timeline.measured else plain


def summary(timeline: Timeline, spelled: Callable[[float], str] | None = None, *, named: str = "") -> str:
    """Describe a timeline in one line: makespan, bubble and activations in flight.

    Args:
        timeline: The timeline.
        spelled: Formats the makespan, or None for ``spelling(timeline)``.
        named: What to call it, or "" for the schedule's name.

    Returns:
        The line.
    """
    if timeline.measured and not timeline.events:
        return f"{timeline.name}: nothing was measured (a step by hand is not)"
    return _figures(named or timeline.name, timeline, spelled or spelling(timeline))


def outcome_summary(outcome: Outcome) -> str:
    """Describe the outcome of a simulation in one line, as ``summary`` describes its timeline."""
    return _figures(outcome.schedule.name, outcome, plain)


def _figures(name: str, found: Timeline | Outcome, spelled: Callable[[float], str]) -> str:
    flying = _numbers(found.in_flight, "ranks")
    more = f", versions {_numbers(most_versions(found.schedule), 'stages')}" if found.schedule.stream else ""
    if skips := found.schedule.skips:
        more += f", skips {' '.join(f'{one}-{other}' for one, other in skips)}"
    return f"{name}: makespan {spelled(found.makespan)}, bubble {found.bubble:.1%}, in flight {flying}{more}"


def _numbers(numbers: Sequence[int], of: str) -> str:
    """Return a number for each rank or stage; a range if there are many."""
    if len(numbers) <= _MOST_NUMBERS:
        return " ".join(map(str, numbers))
    least, most = min(numbers), max(numbers)
    return f"{most} on all {of}" if least == most else f"{least} to {most}"


def slot_length(timeline: Timeline) -> float:
    """Return how long the shortest kind of compute action typically lasts, as the unit of the drawing.

    W is left out: in a stage without linear layers it takes almost no time.

    Args:
        timeline: The timeline.

    Returns:
        The smallest of the ops' median durations, in the timeline's unit; 1 if there are none.
    """
    durations: defaultdict[Op, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.action.op in COMPUTE and event.action.op is not Op.W and event.end > event.start:
            durations[event.action.op].append(event.end - event.start)
    return min((sorted(lengths)[len(lengths) // 2] for lengths in durations.values()), default=1.0)


def _spans(timeline: Timeline, length: float) -> Iterator[tuple[int, int, int, Action]]:
    """Yield ``(rank, first slot, slot after the last, action)`` of each compute action.

    Actions shorter than half a slot come last: they are drawn only in slots that are still empty.
    """
    zero = timeline.start
    for event in sorted(timeline.events, key=lambda event: event.end - event.start < length / 2):
        if event.action.op in COMPUTE:
            first = round((event.start - zero) / length)
            yield event.rank, first, max(first + 1, round((event.end - zero) / length)), event.action


@dataclass(frozen=True)
class _Style:
    """The format of the cells of a grid.

    Attributes:
        several: Whether ranks hold several stages, so that a cell names the stage.
        versions: By forward of an asynchronous schedule, the version of the weights that it computes with.
        width: Width of a cell.
        done: As in ``text``.
        cursor: As in ``text``.
        opens: The first actions of the times in which a stage is whole.
        closes: The last ones.
    """

    several: bool
    versions: Mapping[Action, int]
    width: int
    done: Collection[Action] | None
    cursor: Action | None
    opens: Collection[Action]
    closes: Collection[Action]

    def cell(self, action: Action | None, before: Action | None, after: Action | None) -> str:
        """Return the text of one slot, given what is in the slots before and after it."""
        label = "" if action is None else _GOES_ON if action == before else _label(action, self.several, self.versions)
        label = label if self.done is None or action in self.done else label.lower()
        if self.opens:
            left = "(" if action in self.opens and action != before else " "
            right = ")" if action in self.closes and action != after else " "
            label = f"{left}{label}{right}"
        return label if self.cursor is None else (">" if action == self.cursor != before else " ") + label


def _cells(actions: Sequence[Action | None], style: _Style) -> list[str]:
    """Return the cells of one line, padded to a width."""
    triples = zip(actions, [None, *actions], [*actions[1:], None], strict=False)
    return padded([[style.cell(*triple) for triple in triples]], style.width)[0]


def _painted(actions: Sequence[Action | None], style: _Style) -> list[str]:
    """Return the cells of one line, coloured with ANSI escapes."""
    done = style.done
    return [
        cell if action is None or (done is not None and action not in done) else f"{TERMINAL[action.op]}{cell}{_PLAIN}"
        for cell, action in zip(_cells(actions, style), actions, strict=True)
    ]


def _label(action: Action, several: bool, versions: Mapping[Action, int]) -> str:
    name = str(action) if several else f"{action.op.value}{action.microbatch}"
    return f"{name}.{versions[action]}" if action in versions else name


def _versions(schedule: Schedule) -> dict[Action, int]:
    """Return the versions with which the forwards of an asynchronous schedule compute; {} for a synchronous one."""
    if not schedule.stream:
        return {}
    used = ((stage, versions_in(schedule, stage)) for stage in range(schedule.num_stages))
    return {Action(stage, Op.F, number): version for stage, found in used for number, version in found.items()}
