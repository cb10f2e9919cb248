"""Writing a run folder. During the run a write that fails is only a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from raypar.actors.collective.ledger import LedgerEntry
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors, read_plain, sync_folder, write_whole
from raypar.actors.specs.run import Run
from raypar.config.toml import plain_of, toml_of
from raypar.errors import ConfigError
from raypar.paths import (
    FAILURES,
    FORECAST,
    LEDGER,
    LOG,
    METRICS,
    MOST_METRICS,
    PROFILED_TIMES,
    PROFILES,
    PROVENANCE,
    RUN,
    SCHEDULE,
    TIMELINE,
    absolute,
)
from raypar.reporting.run_folder.append import Lines, LogFile
from raypar.reporting.run_folder.forecast import Forecast, forecast_text
from raypar.reporting.run_folder.metrics_line import metrics_line
from raypar.reporting.run_folder.provenance import renewed
from raypar.reporting.run_folder.timeline_rows import rows_of
from raypar.schedules.reading.torch_csv import to_csv
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline

log = logging.getLogger("raypar")

_HEAD = (
    "# The run with all its defaults, for raypar train; functions are written by their names, and need Python.\n"
    "# Its folder: {}\n\n"
)


class Folder:
    """The run folder of a job, created and locked for it.

    Args:
        folder: The path.

    Raises:
        ConfigError: If the folder can't be made or another job writes to it.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._warned = absolute(folder), False
        self._started = datetime.now().astimezone()
        self._metrics: Lines | None = None
        self._texts: dict[str, str] = {}  # of the files that are written once
        try:
            with checkpoint_errors(f"folder {folder!r} can't be written"):
                self._path.mkdir(parents=True, exist_ok=True)
                self._log = Lines(self._path / LOG)
                try:
                    self._log.lock()
                except BlockingIOError as error:
                    self._log.close()
                    raise CheckpointError([f"folder {folder!r}: another job writes to it: give another"]) from error
        except CheckpointError as error:
            raise ConfigError(error.faults) from error
        self._handler = LogFile(self._log)
        self._handler.open()

    def unlocked(self) -> AbstractContextManager[None]:
        """Return a context in which the folder may be taken by another run."""
        return self._log.unlocked()

    def begin(self, run: Run, schedule: Schedule, step: int, forecast: Forecast | None = None) -> None:
        """Write the configuration, the schedule and the start of the metrics.

        Args:
            run: The run.
            schedule: The lowered schedule of a training step.
            step: Number of steps already taken. The metrics of these steps are kept, and later ones removed.
            forecast: What is predicted of its steps.
        """
        path = self._path

        with self._warned_once():
            self._plan(schedule, forecast)
            _write(path / METRICS, metrics_until(path / METRICS, step) if step else "")
            self._metrics = Lines(path / METRICS)
            if not step:
                (path / FAILURES).unlink(missing_ok=True)
            known = not (path / RUN).exists()
            self._put(PROVENANCE, renewed(path / PROVENANCE, self._started, resumed=step > 0, known=known))
            self._configure(run)
            sync_folder(path)

    def move(self, schedule: Schedule, run: Run | None = None, forecast: Forecast | None = None) -> None:
        """Write the schedule with which the run goes on in another layout, what is predicted of its steps, and the run,
        if it is another one now."""

        with self._warned_once():
            self._plan(schedule, forecast)
            if run is not None:
                self._configure(run)

    def _configure(self, run: Run) -> None:
        """Write the run's configuration anew."""
        config = plain_of(run)
        del config["folder"]  # another run with this configuration needs another folder
        if not isinstance(run.schedule, str):
            config["schedule"] = str(self._path / SCHEDULE)
        self._put(RUN, _HEAD.format(self._path) + toml_of(config))

    def _plan(self, schedule: Schedule, forecast: Forecast | None) -> None:
        """Write the schedule and what is predicted, and remove the times of steps that may have had another one."""
        for name in (TIMELINE, LEDGER, FORECAST):
            (self._path / name).unlink(missing_ok=True)
        self._put(SCHEDULE, to_csv(schedule))
        if forecast is not None:
            self._put(FORECAST, forecast_text(forecast))

    def _put(self, name: str, text: str) -> None:
        """Write a file of the folder, and note what it is in case that it is removed."""
        self._texts[name] = text
        _write(self._path / name, text)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        if (metrics := self._metrics) is None:
            return

        with self._warned_once():
            if not metrics.add(metrics_line(line)):
                return
            log.warning("%s was removed, and is made again, without what only it had", self._path)
            for name, text in self._texts.items():
                if not (self._path / name).exists():
                    _write(self._path / name, text)

    def failed(self, failure: Mapping[str, Any]) -> None:
        """Append a line to the failures, with the time of now. The file is made with the first one."""

        with self._warned_once():
            lines = Lines(self._path / FAILURES)
            try:
                lines.add(metrics_line({"at": datetime.now().astimezone().isoformat(timespec="seconds"), **failure}))
            finally:
                lines.close()

    def measured(
        self, step: int, timelines: Sequence[Timeline], ledger: Mapping[str, Mapping[tuple[str, str], LedgerEntry]]
    ) -> None:
        """Write the times of a step and the bytes moved so far.

        Args:
            step: The step, counted from 0.
            timelines: Its timelines.
            ledger: The calls, bytes and seconds by actor name and (axis, op).
        """
        moved = {
            actor: {f"{axis} {op}": [entry.calls, entry.bytes, entry.seconds] for (axis, op), entry in table.items()}
            for actor, table in ledger.items()
        }

        with self._warned_once():
            _write(self._path / TIMELINE, json.dumps(_measured(step, timelines)))
            _write(self._path / LEDGER, json.dumps(moved))

    def profiled(self, step: int, timelines: Sequence[Timeline], wall: float) -> None:
        """Add the times of a step that was profiled to the folder of the profiles.

        Args:
            step: The step, counted from 0.
            timelines: Its timelines.
            wall: The time of day at which they start, in seconds since 1970.
        """

        with self._warned_once():
            (self._path / PROFILES).mkdir(exist_ok=True)
            lines = Lines(self._path / PROFILES / PROFILED_TIMES)
            try:
                lines.add(json.dumps({**_measured(step, timelines), "wall": wall}) + "\n")
            finally:
                lines.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        self._handler.close()
        self._log.close()
        if self._metrics is not None:
            self._metrics.close()

    @contextmanager
    def _warned_once(self) -> Iterator[None]:
        """Write in the block, and log a warning the first time that it fails."""
        try:
            yield
            if self._warned:
                self._warned = False
                log.warning("%s can be written again", self._path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s can't be written (%s), the training goes on", self._path, error.strerror or error)


def metrics_until(path: Path, step: int) -> str:
    """Return the lines of metrics that belong to the first steps of a run.

    Args:
        path: The metrics file.
        step: Number of steps.

    Returns:
        The lines of these steps; later and incomplete lines are left out. Empty if there is no file.
    """
    try:
        raw = read_plain(path, MOST_METRICS)
    except FileNotFoundError:
        return ""
    lines = []
    for line in raw.decode(errors="replace").split("\n")[:-1]:
        with suppress(ValueError, RecursionError, AttributeError, TypeError):
            plain = json.loads(line)
            if plain.get("step") < step + ("val_loss" in plain):  # an evaluation's step counts the steps before it
                lines.append(line + "\n")
    return "".join(lines)


def _measured(step: int, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the times of a step as plain data."""
    rows = [{"actions": rows_of(timeline)} for timeline in timelines]
    return {"step": step, "steps_taken": step + 1, "timelines": rows}


def _write(path: Path, text: str) -> None:
    write_whole(path, [memoryview(text.encode(errors="replace"))])
