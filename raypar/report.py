"""What a step leaves behind for the user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raypar.actors.plan import StepResult


@dataclass(frozen=True)
class Report:
    """One training step.

    step          its number, from 0
    loss          mean over the step's microbatches
    grad_norm     global 2-norm of the gradients before clipping
    lr            learning rate of the update
    tokens        target elements of the step
    tokens_per_s  as the driver saw it
    step_ms       milliseconds, likewise
    bubble        share of the actors' time in which they computed nothing, 0 to 1
    in_flight     activations in flight: most microbatches held between forward and backward, for each pipeline rank
    peak_memory   bytes: largest resident memory during the step, for each pipeline rank
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_ms: float
    bubble: float
    in_flight: tuple[int, ...]
    peak_memory: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """The loss on validation data: the mean over all its microbatches, in nats a token for text.

    perplexity is exp(loss); seconds is what it took.
    """

    step: int
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {"step": self.step, "val_loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}


def report_of(step: int, lr: float, seconds: float, results: Sequence[StepResult]) -> Report:
    """Put together what the actors said of a step, by rank."""
    losses = [loss for result in results for loss in result.losses]
    tokens = sum(result.tokens for result in results)
    idle = [1.0 - result.busy / result.span for result in results if result.span > 0]
    return Report(
        step=step,
        loss=sum(losses) / len(losses),
        grad_norm=results[0].grad_norm or 0.0,
        lr=lr,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        step_ms=seconds * 1e3,
        bubble=sum(idle) / len(idle) if idle else 0.0,
        in_flight=tuple(result.in_flight for result in results),
        peak_memory=tuple(result.peak_memory for result in results),
    )
