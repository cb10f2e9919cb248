"""The timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import Any

from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action
from raypar.schedules.rules import awaited, provides, travels
from raypar.schedules.timeline import Event, Timeline

_ACTIONS = 0  # the track of what an actor does; those behind it are for buckets, whose times overlap


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """Timelines of one clock in the Trace Event Format, ready for ``json.dump``; their seconds become µs.

    A rank is a process, an action a slice on its first track, the reduction of a bucket one on a track behind it, as
    many as are under way at a time; an arrow goes from what makes a value to what needs it on another rank. Of several
    replicas the ranks come first.
    """
    zero = min(timeline.start for timeline in timelines)
    traces = [_Trace(timeline, zero, place, len(timelines)) for place, timeline in enumerate(timelines)]
    return {"traceEvents": [event for trace in traces for event in trace.events()], "displayTimeUnit": "ms"}


class _Trace:
    """The events of one timeline; it is the ``place``-th of ``count``."""

    def __init__(self, timeline: Timeline, zero: float, place: int, count: int) -> None:
        self._timeline, self._zero, self._place, self._count = timeline, zero, place, count

    def events(self) -> list[dict[str, Any]]:
        """Its slices, the names of its tracks, and its arrows."""
        named: set[tuple[int, int]] = set()
        events: list[dict[str, Any]] = []
        lanes: dict[int, list[float]] = {}  # by rank: until when each track of buckets is taken
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
        return events + self._arrows()

    def _pid(self, event: Event) -> int:
        return event.rank * self._count + self._place

    def _slice(self, event: Event, track: int) -> dict[str, Any]:
        stage, op, microbatch = event.action
        name, kind = str(event.action), "step"
        if event.bucket is not None:
            name, kind = f"{name} bucket {event.bucket}", "communication"
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

    def _arrows(self) -> list[dict[str, Any]]:
        """A flow event at the maker and one at the user of each value; an incomplete timeline may lack either."""
        timeline, schedule = self._timeline, self._timeline.schedule
        makers = {
            value: event for event in timeline.events for value in provides(event.action) if travels(value, schedule)
        }
        arrows: list[dict[str, Any]] = []
        for event in timeline.events:
            need = awaited(event.action, schedule)
            maker = makers.get(need) if need is not None else None
            if need is not None and maker is not None:
                # The middle of a slice is surely inside it; an arrow must not point back in time.
                leaves = self._middle(maker)
                arrives = max(leaves, self._middle(event))
                number = self._place + self._count * (len(arrows) // 2)
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
    """The first lane that is free when the event starts; slices of one track must not overlap."""
    lane = next((lane for lane, end in enumerate(taken) if end <= event.start), len(taken))
    taken[lane : lane + 1] = [event.end]
    return lane
