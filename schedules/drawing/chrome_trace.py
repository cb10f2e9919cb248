"""Timelines as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import Any

from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action
from raypar.schedules.rules import awaited, leaving
from raypar.schedules.timeline import Call, Event, Timeline

_ACTIONS = 0  # the track of a rank's actions; the tracks after it are for buckets and units, whose times overlap


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """Convert timelines to the Trace Event Format.

    Each rank is a process and each action a slice on its first track, in which collective ops are slices. The reduction
    of a gradient bucket and the gather of a unit of weights are slices on further tracks; there are as many tracks as
    run at one time. An arrow goes from the action that makes a value to the action on another rank that needs it.

    Args:
        *timelines: Timelines with one clock, one for each replica, in seconds. In the trace, rank 0 of all timelines
            comes first, then rank 1, and so on.

    Returns:
        A dict for ``json.dump``. Times are in microseconds, from the first event on.
    """
    zero = min(timeline.start for timeline in timelines)
    traces = [_Trace(timeline, zero, index, len(timelines)) for index, timeline in enumerate(timelines)]
    return {"traceEvents": [event for trace in traces for event in trace.events()], "displayTimeUnit": "ms"}


class _Trace:
    """The trace events of one timeline, which is number ``index`` of ``count``."""

    def __init__(self, timeline: Timeline, zero: float, index: int, count: int) -> None:
        self._timeline = timeline
        self._zero = zero
        self._index = index
        self._count = count

    def events(self) -> list[dict[str, Any]]:
        """Return the timeline's slices, the names of its tracks, and its arrows."""
        named: set[tuple[int, int]] = set()
        events: list[dict[str, Any]] = []
        lanes: dict[int, list[float]] = {}  # by rank: when each track of buckets and units becomes free
        for event in self._timeline.events:
            if (event.rank, _ACTIONS) not in named:
                events.append(self._metadata(event, "process_name", name=event.actor))
                events.append(self._metadata(event, "process_sort_index", sort_index=self._pid(event)))
            track = _ACTIONS if event.bucket is None else 1 + _lane(lanes.setdefault(event.rank, []), event)
            if (event.rank, track) not in named:
                name = "actions" if track == _ACTIONS else "communication"
                events.append(self._metadata(event, "thread_name", name=name) | {"tid": track})
            named |= {(event.rank, _ACTIONS), (event.rank, track)}
            events.append(self._slice(event, track))
            events += (self._within(event, track, call) for call in event.calls)
        return events + self._arrows()

    def _pid(self, event: Event) -> int:
        return event.rank * self._count + self._index

    def _slice(self, event: Event, track: int) -> dict[str, Any]:
        stage, op, microbatch, _ = event.action
        name, kind = str(event.action), "step"
        if event.bucket is not None:
            name, kind = f"{name} {event.part}", "communication"
        elif op in COMPUTE:
            kind = "compute"
        elif op in SENDS or op in RECVS:
            kind = "communication"
        return {
            "ph": "X",
            "name": name,
            "cat": kind,
            "pid": self._pid(event),
            "tid": track,
            "ts": (event.start - self._zero) * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": stage, "microbatch": microbatch, "bytes": event.bytes},
        }

    def _within(self, event: Event, track: int, call: Call) -> dict[str, Any]:
        """Return the slice of a collective op within an action."""
        times = {"ts": (call.start - self._zero) * 1e6, "dur": (call.end - call.start) * 1e6}
        return {"ph": "X", "name": call.name, "cat": "communication", "pid": self._pid(event), "tid": track, **times}

    def _arrows(self) -> list[dict[str, Any]]:
        """Return two flow events for each value, at its maker and its user, if the timeline has both of them."""
        timeline, schedule = self._timeline, self._timeline.schedule
        makers = {value: event for event in timeline.events for value in leaving(event.action, schedule)}
        arrows: list[dict[str, Any]] = []
        for event in timeline.events:
            for need in awaited(event.action, schedule):
                if (maker := makers.get(need)) is None:
                    continue
                # The middle of a slice is inside it despite rounding; an arrow must not point back in time.
                leaves = self._middle(maker)
                arrives = max(leaves, self._middle(event))
                number = self._index + self._count * (len(arrows) // 2)
                arrows.append(self._arrow("s", need, number, maker, leaves))
                arrows.append({**self._arrow("f", need, number, event, arrives), "bp": "e"})
        return arrows

    def _arrow(self, phase: str, value: Action, number: int, event: Event, ts: float) -> dict[str, Any]:
        pid = self._pid(event)
        return {"ph": phase, "id": number, "name": str(value), "cat": "value", "pid": pid, "tid": _ACTIONS, "ts": ts}

    def _middle(self, event: Event) -> float:
        return ((event.start + event.end) / 2 - self._zero) * 1e6

    def _metadata(self, event: Event, kind: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._pid(event), "args": args}


def _lane(taken: list[float], event: Event) -> int:
    """Return the first lane that is free when the event starts, and take it; slices of one track must not overlap."""
    lane = next((lane for lane, end in enumerate(taken) if end <= event.start), len(taken))
    taken[lane : lane + 1] = [event.end]
    return lane
