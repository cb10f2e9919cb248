"""The timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import Any

from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action
from raypar.schedules.rules import awaited, provides, travels
from raypar.schedules.timeline import Event, Timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format, ready for ``json.dump``; the seconds of the timeline become µs.

    A rank is a process, an action a slice; an arrow goes from what makes a value to what needs it on another rank.
    """
    zero = timeline.start
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    for event in timeline.events:
        if event.rank not in named:
            named.add(event.rank)
            events.append(_metadata(event, "process_name", name=event.actor))
            events.append(_metadata(event, "process_sort_index", sort_index=event.rank))
        events.append(_slice(event, zero))
    return {"traceEvents": events + _arrows(timeline, zero), "displayTimeUnit": "ms"}


def _slice(event: Event, zero: float) -> dict[str, Any]:
    stage, op, microbatch = event.action
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": "compute" if op in COMPUTE else "communication" if op in SENDS or op in RECVS else "step",
        "pid": event.rank,
        "tid": 0,
        "ts": (event.start - zero) * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": {"stage": stage, "microbatch": microbatch, "bytes": event.bytes},
    }


def _arrows(timeline: Timeline, zero: float) -> list[dict[str, Any]]:
    """A flow event at the maker and one at the user of each value; an incomplete timeline may lack either."""
    schedule = timeline.schedule
    makers = {value: event for event in timeline.events for value in provides(event.action) if travels(value, schedule)}
    arrows: list[dict[str, Any]] = []
    for event in timeline.events:
        need = awaited(event.action, schedule)
        maker = makers.get(need) if need is not None else None
        if need is not None and maker is not None:
            # The middle of a slice is surely inside it; an arrow must not point back in time.
            leaves = _middle(maker, zero)
            arrives = max(leaves, _middle(event, zero))
            number = len(arrows) // 2
            arrows.append(_arrow("s", need, number, maker, leaves))
            arrows.append({**_arrow("f", need, number, event, arrives), "bp": "e"})
    return arrows


def _arrow(phase: str, value: Action, number: int, event: Event, ts: float) -> dict[str, Any]:
    return {"ph": phase, "id": number, "name": str(value), "cat": "value", "pid": event.rank, "tid": 0, "ts": ts}


def _middle(event: Event, zero: float) -> float:
    return ((event.start + event.end) / 2 - zero) * 1e6


def _metadata(event: Event, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": event.rank, "args": args}
