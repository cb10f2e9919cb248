"""The steps of a run that its actors profile: when they come, and what the log says of their profiles."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raypar.actors.mesh.world import World
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.paths import PROFILES, absolute
from raypar.schedules.formatting import steps_in_words

log = logging.getLogger(__name__)


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
