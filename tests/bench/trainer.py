"""What a process of the bench can be asked: to train, and how much memory that took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from raypar.actors.machine.device import ComputeDevice

Step = Callable[[int], float | None]  # takes a step by its number; its mean loss, None where it is not known


class Trainer(Protocol):
    """A training under way."""

    def train(self, first: int, steps: int) -> list[float]:
        """Take so many steps; their losses, none from a process that does not see them."""

    def peak(self) -> list[int]:
        """Bytes: the most that each process that trains held during a step."""

    def waited(self) -> dict[str, float]:
        """Seconds that a process has spent in each communicating op so far, mean over them; {} if nobody counts."""

    def close(self) -> None:
        """End it."""


class LocalTrainer:
    """A training loop in this process."""

    def __init__(
        self, step: Step, close: Callable[[], None] = lambda: None, place: ComputeDevice | None = None
    ) -> None:
        self._step, self._place, self._peak = step, place or ComputeDevice(), 0
        self.close = close

    def train(self, first: int, steps: int) -> list[float]:
        self._place.begin()
        losses = [self._step(number) for number in range(first, first + steps)]
        self._place.finish()
        self._peak = max(self._peak, self._place.peak())
        return [loss for loss in losses if loss is not None]

    def peak(self) -> list[int]:
        return [self._peak]

    def waited(self) -> dict[str, float]:
        return {}


def serve(trainer: Trainer, requests: Iterable[str], answers: TextIO) -> None:
    """Answer requests, a line of JSON each, until they end. Waiting for one takes no CPU.

    ``["train", first, steps]`` asks for losses, ``["peak"]`` for bytes a process, ``["waited"]`` for seconds by op; the
    answer is ``{"seconds": what it took, "found": what was asked for}``.
    """
    ask: dict[str, Callable[..., object]] = {"train": trainer.train, "peak": trainer.peak, "waited": trainer.waited}
    for line in requests:
        what, *arguments = json.loads(line)
        start = time.perf_counter()
        found = ask[what](*arguments)
        answers.write(json.dumps({"seconds": time.perf_counter() - start, "found": found}) + "\n")
        answers.flush()
