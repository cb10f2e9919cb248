"""How long a launch takes: from the start of the processes to the end of the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.contestants import Contestant
from tests.bench.processes import LAUNCH, ProcessError, start
from tests.bench.workload import Size

log = logging.getLogger(__name__)


def time_launches(contestants: Sequence[Contestant], size: Size, times: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of so many launches of each contestant, by its name; of one that fails, those before it failed.

    Each is alone on the machine, and starting Ray is part of it. They take turns, so that the disk's cache is the same
    for all.
    """
    found: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    failed = set[str]()
    for number in range(times):
        for contestant in contestants:
            if contestant.name not in failed:
                try:
                    seconds = _launch(contestant, size, folder)
                except ProcessError as error:
                    failed.add(contestant.name)
                    log.warning("%s", error)
                    continue
                found[contestant.name].append(seconds)
                log.info("%s: launch %d of %d: %s %.1f s", size.name, number + 1, times, contestant.name, seconds)
    return found


def _launch(contestant: Contestant, size: Size, folder: Path) -> float:
    begin = time.perf_counter()
    processes = start(contestant, size, folder)
    try:
        processes.answers(LAUNCH)
        return time.perf_counter() - begin
    finally:
        processes.close()
