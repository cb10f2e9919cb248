"""Measuring: all contestants of a size are up, and take their steps in turn while the others idle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.calm import calmly
from tests.bench.contestants import Contestant
from tests.bench.figures import mean_losses, tokens_per_s
from tests.bench.processes import LAUNCH, ProcessError, start
from tests.bench.workload import Size

log = logging.getLogger(__name__)

_STEP = 60.0  # seconds that a step may take


@dataclass
class Track:
    """What was seen of one contestant.

    speeds    tokens/s of each round
    stolen    share of the cores' time that was taken from the machine in each round
    turns     that were taken for the rounds, those that were too restless included
    losses    of every step, from the first
    peaks     bytes: the most that each of its training processes held during a step
    waits     shares of the time of each round that it spent in an op, by communicating op; of raypar alone
    launches  seconds, see ``time_launches``
    failure   why it did not finish; None if it did
    """

    speeds: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    turns: int = 0
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    launches: list[float] = field(default_factory=list)
    failure: str | None = None


class _Entry:
    """A contestant that takes part. Once it has failed, it is asked nothing any more, and the others go on."""

    def __init__(self, contestant: Contestant, size: Size, folder: Path) -> None:
        self._contestant, self._size, self.track = contestant, size, Track()
        log.info("%s: starting %s", size.name, contestant.name)
        self._processes = start(contestant, size, folder)
        self._step = 0

    def begin(self) -> None:
        """Wait for the end of the first step; it is not measured."""
        self._attempt(lambda: self._note(self._processes.answers(LAUNCH), 1))

    def take(self, steps: int) -> None:
        """A round of so many steps."""

        def work() -> None:
            measured = calmly(lambda: self._turn(steps))
            speed, shares = measured.value
            self.track.speeds.append(speed)
            self.track.stolen.append(measured.stolen)
            self.track.turns += measured.attempts
            for op, share in shares.items():
                self.track.waits.setdefault(op, []).append(share)

        self._attempt(work)

    def measure_memory(self) -> None:
        """Ask for the peaks of all rounds."""

        def work() -> None:
            answers = self._processes.ask("peak", seconds=_STEP)
            self.track.peaks = [peak for answer in answers for peak in answer["found"]]

        self._attempt(work)

    def close(self) -> None:
        self._processes.close()

    def _turn(self, steps: int) -> tuple[float, dict[str, float]]:
        """Tokens/s of so many steps, and the shares of their time that were spent in each op."""
        before = self._waited()
        answers = self._processes.ask("train", self._step, steps, seconds=steps * _STEP)
        self._note(answers, steps)
        seconds = [answer["seconds"] / steps for answer in answers]
        whole = max(seconds) * steps
        shares = {op: (until - before.get(op, 0.0)) / whole for op, until in self._waited().items()}
        return tokens_per_s(self._contestant, self._size, seconds), shares

    def _waited(self) -> dict[str, float]:
        """Seconds that raypar has spent in each op so far."""
        if not self._contestant.ours:
            return {}
        (answer,) = self._processes.ask("waited", seconds=_STEP)
        return dict(answer["found"])

    def _note(self, answers: list[dict[str, Any]], steps: int) -> None:
        self._step += steps
        self.track.losses += mean_losses([answer["found"] for answer in answers])

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.track.failure is not None:
            return
        try:
            work()
        except ProcessError as error:
            log.warning("%s", error)
            self.track.failure = str(error)
            self._processes.kill()


def run_rounds(
    size: Size, contestants: Sequence[Contestant], rounds: int, steps: int, folder: Path
) -> dict[str, Track]:
    """So many rounds of so many steps, in an order that rotates; what was seen of each, by its name."""
    entries: dict[str, _Entry] = {}
    try:
        for contestant in contestants:
            entries[contestant.name] = _Entry(contestant, size, folder)
            entries[contestant.name].begin()
        names = list(entries)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                entries[name].take(steps)
            speeds = {name: f"{entry.track.speeds[-1]:.0f}" for name, entry in entries.items() if entry.track.speeds}
            log.info("%s: round %d of %d, tokens/s: %s", size.name, number + 1, rounds, speeds)
        for entry in entries.values():
            entry.measure_memory()
    finally:
        for entry in entries.values():
            entry.close()
    return {name: entry.track for name, entry in entries.items()}
