"""The sections of a report on actors: the latest measured step, how each actor spent it, and what memory it needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from markupsafe import Markup

from raypar.planner.prediction import from_steps
from raypar.reporting.html.charts import stacked
from raypar.reporting.html.figures import History
from raypar.reporting.html.markup import COLORS, NUMBER, element, folded, html_table, note, section
from raypar.reporting.run_folder.read import Past
from raypar.schedules.action import COMPUTE, RECVS, Op
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.drawing.svg import svg
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import milliseconds, percentage, size
from raypar.schedules.timeline import Event, Timeline

_MOST = 16  # timelines that are drawn
_COMPUTE = "compute"
_UPDATE = "update"
_OTHER = "other actions"
_WAITING = "waiting between actions"
_STYLES = {_COMPUTE: "one", _UPDATE: "three", _OTHER: "soft", _WAITING: "idle"}
_TIMES_NOTE = (
    "From the first action of any actor to the last. Communication, by its axis and op, is the time in which an actor "
    "starts it or waits for it, late peers included; what runs beside compute costs none. {}"
)
_OLDER = "This folder is of a raypar that did not write communication within actions: it is a part of compute here."
_PROCESS = "process"
_APART = "Not drawn: what a process needs before the run, with Python and torch, up to {}."
_WHOLE = "The process, with Python and torch, is a part of it."


def steps(past: Past) -> Markup:
    """Draw the latest measured step over its prediction; the folder has no steps before it to predict it from."""
    title = "Measured over predicted"
    if not past.timelines or not past.timelines[0].events or past.step is None:
        return section(title, note("No step was measured."))
    measured, *others = past.timelines
    prediction = from_steps(measured, [])
    overlay = Overlay(measured, prediction.timeline, prediction.source)
    which = f" of replica {measured.events[0].actor}" if others else ""
    text = note(
        f"Step {past.step + 1:,}{which}. Predicted with the median costs of its own actions: what differs is waiting "
        "that the schedule does not ask for. Its bubble counts the step's whole time on every rank, and is so larger "
        "than the curve's. Point at a box for its times; raypar trace writes them for Perfetto."
    )
    return section(title, _fitted(overlay.svg()), text, *map(_folded, others[:_MOST]), *_left_out(others))


def _folded(timeline: Timeline) -> Markup:
    if not timeline.events:
        return Markup()
    return folded(f"Replica {timeline.events[0].actor}", _fitted(svg(timeline)))


def _left_out(others: Sequence[Timeline]) -> Sequence[Markup]:
    left = len(others) - _MOST
    return [note(f"Left out: {left:,} timelines more, which raypar trace has.")] if left > 0 else []


def _fitted(drawn: str) -> Markup:
    return element("div", Markup(drawn), class_="wide")


def times(past: Past) -> Markup:
    """Draw how each actor spent the latest measured step: compute, communication by axis and op, and waiting."""
    events: dict[str, list[Event]] = defaultdict(list)
    for timeline in past.timelines:
        for event in sorted(timeline.events, key=lambda event: event.rank):
            if event.bucket is None:
                events[event.actor].append(event)
    if not events:
        return Markup()
    start = min(timeline.start for timeline in past.timelines if timeline.events)
    end = max(timeline.end for timeline in past.timelines)
    rows = {actor: _parts(own, end - start) for actor, own in events.items()}
    talk = sorted({part for parts in rows.values() for part in parts} - set(_STYLES))
    styles = {_COMPUTE: _STYLES[_COMPUTE]}
    styles |= {kind: f"{COLORS[1 + index % (len(COLORS) - 1)]} hatched" for index, kind in enumerate(talk)} | _STYLES
    whole = float_sum(value for parts in rows.values() for value in parts.values())
    sums = {name: float_sum(parts.get(name, 0.0) for parts in rows.values()) for name in (_COMPUTE, *talk, _WAITING)}
    shares = [f"{name} {percentage(seconds / whole)}" for name, seconds in sums.items() if seconds]
    text = f"Of all actors' time: {', '.join(shares)}." if whole else ""
    known = any(event.calls for own in events.values() for event in own) or len(events) == 1
    drawn = stacked(rows, styles, milliseconds)
    return section("Time of each actor", drawn, note(text), note(_TIMES_NOTE.format("" if known else _OLDER)))


def _kind(op: Op) -> str:
    """Return what an action does that is not communication within it; a receive is nothing else."""
    if op in COMPUTE:
        return _COMPUTE
    return _UPDATE if op is Op.STEP else "pp recv" if op in RECVS else _OTHER


def _parts(events: Sequence[Event], whole: float) -> dict[str, float]:
    """Divide an actor's time in a step, in seconds.

    Args:
        events: Its actions.
        whole: The length of the step.
    """
    found: dict[str, float] = defaultdict(float)
    for event in events:
        length = event.end - event.start
        for call in event.calls:
            part = max(0.0, min(call.end, event.end) - max(call.start, event.start))
            found[call.name] += part
            length -= part
        found[_kind(event.action.op)] += max(0.0, length)
    found[_WAITING] = max(0.0, whole - float_sum(event.end - event.start for event in events))
    return found


def memory(history: History) -> Markup:
    """Draw the peak memory of every pipeline rank, by kind where the steps have it."""
    kinds = history.memory() or {"peak": history.peaks()}
    apart = kinds.pop(_PROCESS, [])
    columns = kinds | ({_PROCESS: apart} if apart else {})
    ranks = range(max(map(len, columns.values()), default=0))
    if not ranks:
        return section("Peak memory", note("No step was taken yet."))
    whole = [
        [f"pp={rank}", *(size(sizes[rank], tenths=True) if rank < len(sizes) else "" for sizes in columns.values())]
        for rank in ranks
    ]
    rows = {
        f"pp={rank}": {kind: float(sizes[rank]) for kind, sizes in kinds.items() if rank < len(sizes)} for rank in ranks
    }
    styles = {kind: COLORS[index % len(COLORS)] for index, kind in enumerate(kinds)}
    text = _APART.format(size(max(apart), tenths=True)) if apart else _WHOLE
    return section(
        "Peak memory",
        stacked(rows, styles, partial(size, tenths=True)),
        note(f"The most in a step, and of replicas the one with the most. {text}"),
        folded("Figures", html_table(["", *columns], whole, ["", *[NUMBER] * len(columns)])),
    )
