"""A run that is stopped in the middle of a step: whether its actors keep copies of their state, to be saved at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from raypar.cluster.nodes.nodes import facts_of, living_nodes
from raypar.job.start.loaded_run import LoadedRun
from raypar.planner.hardware.stop_wait import outlasts, stop_wait
from raypar.planner.prediction import IN_SLOTS, before_run
from raypar.planner.resource_needs import sum_over_actors
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.formatting import size

log = logging.getLogger(__name__)
_SPARE = 1.5  # times as much memory as copies take is free on a node that keeps them


class Stops:
    """What a step takes, and so whether a run that is stopped in it can be saved in time after it.

    Args:
        loaded: The run.
    """

    def __init__(self, loaded: LoadedRun) -> None:
        self._loaded, self._has_room = loaded, True
        self._seconds = _predicted(loaded) if self._may_be_saved else 0.0

    @property
    def _may_be_saved(self) -> bool:
        run = self._loaded.run
        return run.folder is not None and run.snapshot_every > 0 and not self._loaded.schedule.stream

    def learn(self, seconds: float) -> None:
        """Note what a step has taken."""
        self._seconds = seconds

    def need_copies(self) -> bool:
        """Return whether a step takes so long that copies of the actors' state are to be kept, and there is room."""
        return self._may_be_saved and self._has_room and outlasts(self._seconds)

    def is_too_long(self, steps: int, since: float) -> bool:
        """Return whether steps that are under way must not be waited for by a run that is stopped now.

        Those that take longer than the one before are expected to take as much again.

        Args:
            steps: Number of the steps.
            since: When the first one has begun, in seconds of ``time.perf_counter``.
        """
        passed = time.perf_counter() - since
        left = steps * self._seconds - passed
        return outlasts(left if left > 0 else passed)

    def has_room(self, nodes: Collection[str]) -> bool:
        """Return whether the nodes have memory for copies, and say what is kept there, or why nothing is.

        Args:
            nodes: Ray's ids of the nodes that have actors.
        """
        loaded = self._loaded
        run = replace(loaded.run, max_failures=1, buddy_every=0)
        need = sum_over_actors(run, loaded.schedule, loaded.skeleton, lambda memory: memory.snapshots)
        answers = facts_of([node for node in living_nodes() if node.id in nodes], _free_memory_task()).values()
        free = [float(answer["free"]) if isinstance(answer, dict) else 0.0 for answer in answers]  # a text if it failed
        self._has_room = bool(free) and min(free) * len(free) > _SPARE * need
        step = f"a step takes {self._seconds:.1f} s, and who stops a run may kill it {stop_wait():g} s later"
        if self._has_room:
            log.info("%s: actors keep copies of their state (%s in all), which are saved then", step, size(need))
        else:
            log.warning("%s: it would lose all since its last checkpoint; copies (%s) have no room", step, size(need))
        return self._has_room


def _predicted(loaded: LoadedRun) -> float:
    """Return the seconds that a step is predicted to take; 0 if it is not."""
    prediction = before_run(SizedRun.of(loaded.run, loaded.schedule, loaded.skeleton))
    return 0.0 if prediction.source == IN_SLOTS else prediction.step


def _free_memory_task() -> Callable[[], dict[str, Any]]:
    """Return a function that returns how many bytes of memory are free where it runs, which is beside actors."""

    def report() -> dict[str, Any]:
        """Return the bytes that a node, or a container's limit on it, leaves."""
        from raypar.actors.machine.this_machine import free_memory

        return {"free": free_memory() or 0}

    return report
