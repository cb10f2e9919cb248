"""Reading a run folder without trusting it: links, devices, files that are too large and wrong types are faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import FailFast

from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import read_plain
from raypar.actors.specs.types import SEND_WINDOW
from raypar.checkpoint.find import Listed, ls
from raypar.config.conflicts.outputs import is_under_way
from raypar.config.schedule import MOST_BYTES
from raypar.config.toml import parse_toml
from raypar.errors import ConfigError
from raypar.paths import (
    CHECKPOINTS,
    FAILURES,
    FORECAST,
    LEDGER,
    LOG,
    METRICS,
    PROVENANCE,
    RUN,
    SCHEDULE,
    TIMELINE,
    absolute,
    holds_run,
)
from raypar.reporting.run_folder.damage import MOST_FAULTS, DamagedError, json_of
from raypar.reporting.run_folder.failure_line import FailureLine
from raypar.reporting.run_folder.forecast import Forecast, forecast_in
from raypar.reporting.run_folder.metrics_line import EvaluationLine, Figure, Number, StepLine, figures_of
from raypar.reporting.run_folder.timeline_rows import TimelineRows, timeline_of
from raypar.schedules.checking.check import check
from raypar.schedules.passes.lower import lower
from raypar.schedules.reading.torch_csv import from_csv
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.timeline import Timeline

T = TypeVar("T")
Latest = tuple[int | None, list[Timeline]]


class OpCounts(NamedTuple):
    """What an actor counted of one op on one axis.

    Attributes:
        calls: How often the op was called.
        bytes: Its payload bytes.
        seconds: Time that the actor spent in it; None if the folder is of a raypar that did not write it.
    """

    calls: Number
    bytes: Number
    seconds: Figure | None = None


Ledger = dict[str, dict[str, OpCounts]]

_MOST = {  # bytes
    RUN: 1 << 20,
    METRICS: 1 << 30,
    FAILURES: 64 << 20,
    FORECAST: 1 << 30,
    SCHEDULE: MOST_BYTES,
    TIMELINE: 1 << 30,
    LEDGER: 64 << 20,
    LOG: 256 << 20,
    PROVENANCE: 1 << 20,
}
_LONGEST = 1 << 20  # bytes of a line of metrics
_MOST_ACTIONS = 8  # actions of a stage for one microbatch: F, I, W and communication


@dataclass(frozen=True)
class Past:
    """The content of a run folder.

    Attributes:
        folder: The folder.
        config: The run with all defaults, as plain tables; functions are texts.
        metrics: One dict for each step (``Report.to_dict``) and evaluation (``Evaluation.to_dict``, which has
            ``val_loss``).
        schedule: The lowered schedule of a training step, or None if it was not written.
        step: The latest measured step, counted from 0, or None.
        timelines: The timelines of that step, as ``job.timelines()`` returns them; empty if there is none.
        ledger: What each actor counted, by "axis op".
        checkpoints: The checkpoints, newest first; only their manifests were read.
        log: The lines of the log.
        provenance: Where the run comes from, by name: versions, host, commit, command line; empty if not written.
        under_way: Whether a job is writing to the folder.
        failures: One dict for each failure that the run has survived or ended with (``Failure.to_dict``).
        forecast: What was predicted of its steps before the first of them; None if it was not written.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    schedule: Schedule | None
    step: int | None
    timelines: list[Timeline]
    ledger: Ledger
    checkpoints: list[Listed]
    log: list[str] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)
    under_way: bool = False
    failures: list[dict[str, Any]] = field(default_factory=list)
    forecast: Forecast | None = None


@dataclass(frozen=True)
class _Measured:
    """The schema of the timelines file."""

    step: Number
    timelines: Annotated[list[TimelineRows], FailFast()]


def read(folder: Path) -> Past:
    """Read a run folder.

    A file that is missing is no fault, nor is an incomplete last line of the metrics: the run may have been killed.

    Args:
        folder: The folder.

    Returns:
        Its content.

    Raises:
        ConfigError: If it is no run folder or has faults; the text lists all of them.
    """
    past, faults = salvage(folder)
    ConfigError.raise_if(f"run folder {str(past.folder)!r}: {fault}" for fault in faults)
    return past


def salvage(folder: Path) -> tuple[Past, list[str]]:
    """Read what can be read of a run folder.

    Args:
        folder: The folder.

    Returns:
        Its content, where a damaged file counts as missing (without its run.toml the configuration is empty; of the
        metrics, sound lines stay), and the faults.

    Raises:
        ConfigError: If it is no run folder, nor one in which a run is being launched.
    """
    folder, faults = absolute(folder), list[str]()

    def part(name: str, parse: Callable[[bytes], T], missing: T) -> T:
        """Read and parse one file.

        Returns ``missing`` if the file is missing or nothing of it can be used; damage is added to the faults.
        """
        try:
            return parse(read_plain(folder / name, _MOST[name]))
        except FileNotFoundError:
            return missing
        except DamagedError as error:
            faults.extend(f"{name} {fault}" for fault in error.faults)
            return missing if error.sound is None else error.sound
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            faults.append(f"{name} can't be read ({why})")
        return missing

    if "\0" in str(folder) or not (holds_run(folder) or under_way(folder)):
        raise ConfigError([_no_run(folder)])
    going = under_way(folder)
    config: dict[str, Any] = part(RUN, _config, {})
    schedule: Schedule | None = part(SCHEDULE, lambda raw: _schedule(raw, config), None)
    none_measured: Latest = None, []
    step, timelines = part(TIMELINE, lambda raw: _measured(raw, schedule), none_measured)
    past = Past(
        folder,
        config,
        part(METRICS, _metrics, list[dict[str, Any]]()),
        schedule,
        step,
        timelines,
        part(LEDGER, lambda raw: json_of(raw, Ledger), Ledger()),
        log=part(LOG, lambda raw: raw.decode(errors="replace").splitlines(), list[str]()),
        provenance=part(PROVENANCE, _provenance, dict[str, str]()),
        under_way=going,
        failures=part(FAILURES, partial(_lines, schema_of=lambda plain: FailureLine), list[dict[str, Any]]()),
        forecast=part(FORECAST, lambda raw: forecast_in(raw, schedule), None),
        checkpoints=_checkpoints(folder, faults),
    )
    return past, faults


def _no_run(folder: Path) -> str:
    """Say why a path is no run folder, and what to give."""
    if "\0" not in str(folder) and not folder.exists():
        return f"{str(folder)!r} is no run folder: there is nothing; give one that raypar train has written"
    if "\0" not in str(folder) and folder.is_file():
        parent = repr(str(folder.parent)) if holds_run(folder.parent) else "a folder"
        return f"{str(folder)!r} is no run folder, but a file: give {parent}"
    return f"{str(folder)!r} is no run folder: it has no {RUN}; give one that raypar train has written"


def under_way(folder: Path) -> bool:
    """Return whether a job is writing to a run folder: it holds the lock of the log."""
    with suppress(OSError):
        return is_under_way(folder)
    return False


def _checkpoints(folder: Path, faults: list[str]) -> list[Listed]:
    try:
        if (folder / CHECKPOINTS).is_symlink():
            faults.append(f"{CHECKPOINTS} is a link: put the folder itself there")
        elif (folder / CHECKPOINTS).exists():
            return ls(folder / CHECKPOINTS)
    except CheckpointError as error:
        faults += error.faults
    return []


def _provenance(raw: bytes) -> dict[str, str]:
    """Read where a run comes from, and of each time that it was resumed what was different then."""
    first = json_of(raw, dict[str, Any])
    again = first.pop("resumed", None)
    resumes = [one for one in again if isinstance(one, dict)] if isinstance(again, list) else []
    found = {name: _spelled(value) for name, value in first.items() if value is not None}
    for number, one in enumerate(resumes, 1):
        then = {name: _spelled(value) for name, value in one.items() if value is not None}
        found |= {f"{name}, resumed {number}": value for name, value in then.items() if found.get(name) != value}
    return found


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _config(raw: bytes) -> dict[str, Any]:
    try:
        config = parse_toml(raw)
    except ValueError as error:
        raise DamagedError(f"is not TOML ({error})") from error
    tables = [isinstance(config.get(name), dict) for name in ("model", "mesh", "data", "optim")]
    if not all(tables) or not isinstance(config.get("steps"), int):
        raise DamagedError("is not that of a raypar run")
    return config


def _schedule(raw: bytes, config: dict[str, Any]) -> Schedule:
    named = config.get("schedule")
    try:
        schedule = from_csv(raw.decode(), Path(named).stem if isinstance(named, str) else "schedule")
        cells = schedule.num_stages * schedule.num_microbatches
        if cells > schedule.num_actions:
            raise DamagedError("is no schedule of a training step: it leaves microbatches out")
        if _MOST_ACTIONS * (cells + schedule.num_ranks) < schedule.num_actions:
            raise DamagedError("is no schedule of a training step: it has actions more than once")
        schedule = lower(schedule)
        check(schedule, send_capacity=SEND_WINDOW)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise DamagedError(f"is no schedule that can run ({error})") from error
    return schedule


def _metrics(raw: bytes) -> list[dict[str, Any]]:
    return _lines(raw, lambda plain: EvaluationLine if "val_loss" in plain else StepLine)


def _lines(raw: bytes, schema_of: Callable[[dict[str, Any]], type]) -> list[dict[str, Any]]:
    """Parse lines of JSON, each with the schema that it must have."""
    lines, faults = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):  # after the last newline a line may be incomplete
        try:
            if len(line) > _LONGEST:
                raise DamagedError(f"is longer than {_LONGEST} bytes")
            plain = json_of(line, dict[str, Any])
            json_of(line, schema_of(plain))
            lines.append(figures_of(plain))
        except DamagedError as error:
            faults += [f"line {number} {fault}" for fault in error.faults]
            if len(faults) >= MOST_FAULTS:
                break
    if faults:
        raise DamagedError(*faults, sound=lines)
    return lines


def _measured(raw: bytes, schedule: Schedule | None) -> Latest:
    measured = json_of(raw, _Measured)
    if schedule is None:
        return None, []
    return measured.step, [timeline_of(row.actions, schedule, measured=True) for row in measured.timelines]
