"""The record of a run: passes every report and evaluation to the run folder and the trackers."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from raypar.actors.errors import first_line
from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.results import Span
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Tracker
from raypar.config.toml import plain_of
from raypar.paths import METRICS, absolute
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.forecasting import forecast_of
from raypar.reporting.overflow import OverflowWarnings
from raypar.reporting.report import Moved, Report, ledger_of, timelines_of
from raypar.reporting.run_folder.write import Folder, metrics_until
from raypar.reporting.scale_warnings import ScaleWarnings
from raypar.reporting.trackers.tracker import Sink, sink_of
from raypar.schedules.schedule import Schedule

log = logging.getLogger(__name__)

_MOST_NAMES = 3  # of parameters without a gradient, that are named
_LOADS = 500  # steps of a run of which the folder has the tokens of each expert

_SECRETS = re.compile(r"(?i)((?:key|token|secret|password)[\w.-]*[\"']?\s*[:=]\s*[\"']?|://)([^\s,\"'@/]+)(@?)")


class Record:
    """Records a run's start, results and end. After construction no error here ends the run.

    Args:
        run: The run.

    Raises:
        ConfigError: If the run's folder can't be made or belongs to another job.
    """

    def __init__(self, run: Run) -> None:
        self._folder = None if run.folder is None else Folder(run.folder)
        self._sinks: dict[str, Sink] = {}
        self._overflow, self._scale = OverflowWarnings(), ScaleWarnings(run.loss_scale)
        self._has_missed_targets = False
        self._loads_every = max(1, run.steps // _LOADS)
        self._step: int | None = None  # the latest compiled step, if its times are not recorded yet
        self._last: int | None = None  # the same, also if they are

    def unlocked(self) -> AbstractContextManager[None]:
        """Return a context in which the run's folder may be taken by the run that replaces it."""
        return nullcontext() if self._folder is None else self._folder.unlocked()

    def begin(self, run: Run, schedule: Schedule, step: int, name: str, skeleton: Skeleton | None = None) -> None:
        """Record that the run starts or continues.

        Args:
            run: The run.
            schedule: The lowered schedule of a training step.
            step: The first step to be taken.
            name: The job's name.
            skeleton: The run's model without weights; built if it is needed and None.
        """
        if self._folder is not None:
            self._folder.begin(run, schedule, step, forecast_of(run, schedule, skeleton, step))
        title = name if run.folder is None else absolute(run.folder).name
        for tracker in _trackers(run):
            self._call(tracker, partial(self._add, tracker, title, run, step, name))

    def validation_losses(self, run: Run, step: int) -> dict[int, float]:
        """Return the losses of the evaluations of the run's first steps that its folder has, by steps taken."""
        if run.folder is None:
            return {}
        lines = map(json.loads, metrics_until(absolute(run.folder) / METRICS, step).splitlines())
        found = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
        return {step: float(loss) for step, loss in found.items()}  # "NaN" is a word there

    def move(self, run: Run, schedule: Schedule, step: int, skeleton: Skeleton, *, is_other: bool = False) -> None:
        """Record that the run goes on in another layout, with another schedule of a training step.

        Args:
            run: The run in this layout.
            schedule: The schedule.
            step: The first step to be taken in it.
            skeleton: The run's model without weights.
            is_other: Whether the run was asked for this layout, and so is another one from now on.
        """
        self._step = self._last = None
        if self._folder is not None:
            forecast = forecast_of(run, schedule, skeleton, step)
            self._folder.move(schedule, run if is_other else None, forecast)

    def write(self, outcome: Report | Evaluation) -> None:
        """Record a step's report or an evaluation."""
        line = outcome.to_dict()
        if isinstance(outcome, Report):
            self._warn(outcome)
        if isinstance(outcome, Report) and not outcome.by_hand:
            self._last = outcome.step
        self._step = self._last  # an evaluation moves bytes as well
        if self._folder is not None:
            few = "loads" in line and outcome.steps_taken % self._loads_every
            self._folder.write(line | {"loads": None} if few else line)
        for tracker, sink in list(self._sinks.items()):
            self._call(tracker, partial(sink.write, line, outcome.steps_taken))

    def failed(self, failure: Mapping[str, Any]) -> None:
        """Record a failure, as its ``to_dict`` makes it."""
        if self._folder is not None:
            self._folder.failed(failure)

    def _warn(self, report: Report) -> None:
        """Log what is wrong with the numbers of a step. One that was skipped has overflowed, as the scaler knows."""
        if report.overflow is not None and not report.skipped:
            for warning in self._overflow.of(report.steps_taken, report.overflow):
                log.warning("%s", warning)
        if (stuck := self._scale.of(report)) is not None:
            log.warning("%s", stuck)
        if report.unreached:
            log.warning("step %d: %s", report.steps_taken, _unreached(report.unreached))
        if report.loss is None and not self._has_missed_targets:
            self._has_missed_targets = True
            missing = (
                "step %d: no target of the step counts, so it changed no weight, and its loss is missing; said once"
            )
            log.warning(missing, report.steps_taken)

    def unmeasured(self) -> int | None:
        """Return the latest step if its times were not recorded yet, else None. A second call returns None."""
        step, self._step = self._step, None
        return None if self._folder is None else step

    def measured(
        self,
        step: int,
        schedule: Schedule,
        world: World,
        rows: Sequence[Sequence[Span]],
        moved: Sequence[Moved],
        *,
        profiled: bool = False,
    ) -> None:
        """Record the times of a step and the bytes moved so far.

        Args:
            step: The step.
            schedule: The schedule as it was performed.
            world: The ranks.
            rows: The spans of every rank, by rank.
            moved: The calls and bytes of every rank so far, by rank.
            profiled: Whether the step was profiled.
        """
        if self._folder is not None:
            timelines = timelines_of(schedule, world, rows)
            self._folder.measured(step, timelines, ledger_of(world, moved))
            if profiled and (start := min((span.start for row in rows for span in row), default=None)) is not None:
                self._folder.profiled(step, timelines, start + time.time() - time.perf_counter())

    def close(self) -> None:
        """End the record. A second call does nothing."""
        for tracker, sink in list(self._sinks.items()):
            self._call(tracker, sink.close)
        self._sinks.clear()
        if self._folder is not None:
            self._folder.close()

    def _add(self, tracker: Tracker, title: str, run: Run, step: int, job: str) -> None:
        sink = self._sinks[tracker] = sink_of(tracker, title, run.folder, step, job)
        sink.begin(plain_of(run))

    def _call(self, tracker: str, call: Callable[[], None]) -> None:
        """Call a tracker. If it raises, log a warning and drop the tracker."""
        try:
            call()
        except Exception as error:
            log.warning("%s gets no more of this run (%s)", tracker, _without_secrets(first_line(error)))
            with suppress(Exception):
                if (sink := self._sinks.pop(tracker, None)) is not None:
                    sink.close()


def _trackers(run: Run) -> tuple[Tracker, ...]:
    """Return the trackers of a run: in a cluster Ray's metrics are always one, as its operators look at them."""
    return run.track if "ray" in run.track or starts_own_ray() else (*run.track, "ray")


def _without_secrets(text: str) -> str:
    """Mask keys, tokens, secrets, passwords and the user part of URLs in a tracker's error message."""

    def hide(found: re.Match[str]) -> str:
        url = found[1] == "://"
        return found[0] if url and not found[3] else f"{found[1]}***{found[3]}"

    return _SECRETS.sub(hide, text)


def _unreached(names: Sequence[str]) -> str:
    """Say that parameters got no gradient, and what may be the cause."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    which = f"{', '.join(names[:_MOST_NAMES])}{more} got no gradient, so nothing is learned there"
    return (
        f"{which}: look for a detach, a no_grad or an output that nobody uses, or freeze them (requires_grad_(False))"
    )
