"""The profiled steps of a run: when they come, what the log says of them, and all of them in one Chrome trace."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import FailFast

from raypar.actors.inspect.profile_file import SUFFIX, plain_trace
from raypar.actors.machine.files import read_plain
from raypar.actors.mesh.world import World
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.paths import PROFILED_TIMES, PROFILES, absolute
from raypar.reporting.run_folder.damage import DamagedError, json_of
from raypar.reporting.run_folder.metrics_line import Figure, Number
from raypar.reporting.run_folder.timeline_rows import TimelineRows, timeline_of
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.formatting import steps_in_words
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline

log = logging.getLogger(__name__)
_MOST_TIMES = 1 << 30  # bytes
_FIRST_THREAD = 1000  # the number of the first thread of a profile; lower ones are those of the run's own times
_TRACE_PHASES = ("X", "i", "s", "t", "f", "M", "C")
_PROCESS = ("process_name", "process_sort_index", "process_labels")


class ProfiledSteps:
    """Knows which steps of a run are profiled, and says in the log which profiles were written.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._done = set[int]()
        self._has_warned = False

    def next_due(self, step: int, last: int) -> int:
        """Return the number of steps after which the actors are asked for the times of a step that was profiled.

        Args:
            step: Number of steps taken so far.
            last: The result if none is to be profiled before.
        """
        if self._run.profile is None or self._run.folder is None:
            return last
        first, final = self._run.profile
        due = max(step + 1, first)
        return min(last, due) if due <= final else last

    def note(self, steps: Sequence[int], results: Sequence[StepResult], world: World) -> bool:
        """Note the results of a step, or of steps that overlap; return whether they were profiled.

        Args:
            steps: The steps, counted from 1.
            results: The actors' results, by rank.
            world: The ranks.
        """
        if all(result.profile is None for result in results):
            return False
        for rank, result in enumerate(results):
            if result.profile and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "step %d: no profile of actor %s: %s; said once", steps[-1], world.label(rank), result.profile
                )
        if not any(result.profile == "" for result in results):
            return False
        self._done |= {*steps}
        if self._run.profile is not None and steps[-1] >= self._run.profile[1]:
            self.report()
        return True

    def report(self) -> None:
        """Say in the log which steps were profiled since the last report, and where the profiles are."""
        if self._done and self._run.folder is not None:
            folder = absolute(self._run.folder)
            where = f"{folder / PROFILES}; raypar trace {folder} merges its files for ui.perfetto.dev"
            log.info("profile of %s: %s", steps_in_words(self._done), where)
        self._done.clear()


@dataclass(frozen=True)
class _Head:
    """The schema of what the file of an actor says of all its steps, and of its events."""

    actor: str
    baseTimeNanoseconds: Number  # noqa: N815  (torch's name)
    steps: list[Number]
    distributedInfo: Mapping[str, Any]  # noqa: N815  (torch's name)
    traceEvents: Annotated[list[dict[str, Any]], FailFast()]  # noqa: N815  (torch's name)


@dataclass(frozen=True)
class _Times:
    """The schema of the times of a step."""

    steps_taken: Number
    wall: Figure
    timelines: Annotated[list[TimelineRows], FailFast()]


class Merged(NamedTuple):
    """The profiles of a run in one trace.

    Attributes:
        trace: A dict for ``json.dump``; None if there are no profiles.
        steps: The steps in it, counted from 1.
        faults: What could not be read, and so is left out.
    """

    trace: dict[str, Any] | None
    steps: tuple[int, ...]
    faults: tuple[str, ...]


def merged_profiles(folder: Path, schedule: Schedule | None) -> Merged:
    """Merge the profiles of a run with its own times of the same steps.

    Each actor is a process, which has the actions and messages as the run has measured them, and below them the threads
    of the actor and the streams of its GPU, as torch has recorded them. All times are by the clock of the driver's
    machine.

    Args:
        folder: The run folder.
        schedule: Its schedule; None if it is not known, so that the run's own times are left out.
    """
    faults, heads = list[str](), list[_Head]()
    for path in sorted((folder / PROFILES).glob(f"*{SUFFIX}")):
        try:
            heads.append(json_of(plain_trace(path), _Head))
        except (OSError, ValueError, DamagedError) as error:
            faults.append(f"{PROFILES}/{path.name} can't be read ({_why(error)})")
    heads.sort(key=lambda head: str(head.distributedInfo.get("rank")).rjust(12))
    merging = _Merging(heads[0].baseTimeNanoseconds / 1e3 if heads else 0.0)
    merging.add_processes(head.actor for head in heads)  # by rank; the first event may be another one's
    for step, wall, timelines in _times(folder, schedule, faults) if heads else ():
        if any(step in head.steps for head in heads):
            merging.add_times(chrome_trace(*timelines)["traceEvents"], wall * 1e6)
    for head in heads:
        merging.add_profile(head)
    steps = sorted({step for head in heads for step in head.steps})
    return Merged(merging.trace() if heads else None, tuple(steps), tuple(faults))


def _times(folder: Path, schedule: Schedule | None, faults: list[str]) -> Iterator[tuple[int, float, list[Timeline]]]:
    """Yield the steps whose times were written, counted from 1, with their time of day in seconds and timelines."""
    try:
        lines = read_plain(folder / PROFILES / PROFILED_TIMES, _MOST_TIMES).split(b"\n")[:-1]
    except OSError as error:
        faults.append(f"{PROFILES}/{PROFILED_TIMES} can't be read ({error.strerror})")
        return
    latest = dict[int, _Times]()
    for number, line in enumerate(lines, start=1):
        try:
            found = json_of(line, _Times)
        except (ValueError, DamagedError) as error:
            faults.append(f"{PROFILES}/{PROFILED_TIMES} line {number} {_why(error)}")
            continue
        # A step that was taken again, after a failure, replaces the later ones too.
        latest = {step: one for step, one in latest.items() if step < found.steps_taken}
        latest[found.steps_taken] = found
    for step, found in latest.items():
        try:
            if schedule is not None:
                rows = [timeline_of(one.actions, schedule, measured=True) for one in found.timelines]
                yield step, found.wall, rows
        except DamagedError as error:  # the run went on in another layout
            faults.append(f"{PROFILES}/{PROFILED_TIMES}: step {step} {_why(error)}")


def _why(error: Exception) -> str:
    """Return what is wrong with a file, in a line."""
    if isinstance(error, DamagedError):
        return error.faults[0]
    return str(getattr(error, "strerror", None) or error)


def _is_of_a_thread(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a profile is one of a thread or a stream, and says when it was."""
    timed = isinstance(event.get("ts"), float | int) and event.get("ph") in _TRACE_PHASES
    numbered = all(isinstance(event.get(key), int) for key in ("pid", "tid"))
    named = isinstance(event.get("name"), str) and event["name"] not in _PROCESS
    kept = isinstance(event.get("args"), dict) if event.get("ph") == "M" else isinstance(event.get("id", 0), int)
    return timed and numbered and named and kept


@dataclass
class _Merging:
    """Collects events of several sources in one trace, with a process for each actor.

    Attributes:
        zero: The time of day from which times count meanwhile, in microseconds; from 1970 on they would be too large
            for the digits of a float.
    """

    zero: float
    _events: list[dict[str, Any]] = field(default_factory=list)
    _pids: dict[str, int] = field(default_factory=dict)  # by the actor's name
    _tids: dict[tuple[int, Any, Any], int] = field(default_factory=dict)  # by process, and pid and tid of a profile
    _flows: dict[tuple[Any, ...], int] = field(default_factory=dict)  # by source and number there
    _named: set[tuple[Any, ...]] = field(default_factory=set)

    def trace(self) -> dict[str, Any]:
        """Return the trace. Its times are microseconds since the first event."""
        start = min((event["ts"] for event in self._events if event["ph"] != "M"), default=0.0)
        for event in self._events:
            if "ts" in event:
                event["ts"] -= start
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}

    def add_processes(self, actors: Iterable[str]) -> None:
        """Number the processes of actors, in their order."""
        for actor in actors:
            self._pid(actor)

    def add_times(self, events: Iterable[dict[str, Any]], start: float) -> None:
        """Add the run's own times of a step.

        Args:
            events: Events of ``chrome_trace``.
            start: The time of day of the step's first event, in microseconds.
        """
        events = [*events]
        names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
        for event in events:
            pid = self._pid(names[event["pid"]])
            if event["ph"] != "M":
                timed = {**event, "ts": event["ts"] + (start - self.zero)}
                self._add(timed, pid, event.get("tid", 0), ("times", start))
            elif event["name"] not in _PROCESS:
                self._name(event, pid, event["tid"])

    def add_profile(self, head: _Head) -> None:
        """Add the profiled steps of an actor."""
        pid, ahead = self._pid(head.actor), head.baseTimeNanoseconds / 1e3 - self.zero
        for event in filter(_is_of_a_thread, head.traceEvents):
            tid = self._tids.setdefault((pid, event["pid"], event["tid"]), _FIRST_THREAD + len(self._tids))
            if event["ph"] == "M":
                self._name(event, pid, tid)
            else:
                self._add({**event, "ts": event["ts"] + ahead}, pid, tid, ("profile", pid))

    def _pid(self, actor: str) -> int:
        """Return the number of an actor's process, which is named when it is asked for first."""
        if actor not in self._pids:
            pid = self._pids[actor] = len(self._pids)
            for kind, args in (("process_name", {"name": actor}), ("process_sort_index", {"sort_index": pid})):
                self._events.append({"ph": "M", "name": kind, "pid": pid, "args": args})
        return self._pids[actor]

    def _name(self, event: Mapping[str, Any], pid: int, tid: int) -> None:
        """Add what is said of a thread, once."""
        if (key := (pid, tid, event["name"])) not in self._named:
            self._named.add(key)
            self._events.append({"ph": "M", "name": event["name"], "pid": pid, "tid": tid, "args": event["args"]})

    def _add(self, event: dict[str, Any], pid: int, tid: int, source: tuple[Any, ...]) -> None:
        """Add an event. The numbers of arrows count from 0 over all sources."""
        if "id" in event:
            event["id"] = self._flows.setdefault((*source, event.get("cat"), event["id"]), len(self._flows))
        self._events.append({**event, "pid": pid, "tid": tid})
