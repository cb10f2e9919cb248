"""The result of an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raypar.reporting.notebook import box, table


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on the validation data.

    Attributes:
        step: Number of steps taken before it: it was made after this step, counted from 1.
        loss: Mean of the model's loss over the target elements of the validation data: of a GPT or Llama its
            cross-entropy, in nats a token; of Layers what their ``loss`` returns, in its unit.
        tokens: Number of target elements, as tokens to predict or labels.
        seconds: Duration in seconds.
        is_cross_entropy: Whether the loss is known to be a cross-entropy.
        is_averaged: Whether it is that of the averages of the weights.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    is_cross_entropy: bool = True
    is_averaged: bool = False

    @property
    def steps_taken(self) -> int:
        """Number of steps taken before it."""
        return self.step

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, at most that of 700, which is still finite; None if it says nothing."""
        return math.exp(min(self.loss, 700.0)) if self.is_cross_entropy else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``steps_taken`` as a dict, for a line of JSON."""
        figures = {"val_loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}
        return {"step": self.step, **figures, "steps_taken": self.steps_taken}

    def __repr__(self) -> str:
        """Return the figures in words."""
        perplexity = [] if self.perplexity is None else [f"perplexity {self.perplexity!r}"]
        mean = (
            f"cross-entropy {self.loss!r} nats" if self.is_cross_entropy else f"mean of the model's loss {self.loss!r}"
        )
        figures = [mean, *perplexity, f"{self.tokens:,} targets", f"{self.seconds:.3g} s"]
        return f"<Evaluation after step {self.step}: {', '.join(figures)}>"

    def _repr_html_(self) -> str:
        rows = [
            ("steps taken", self.step),
            ("validation loss", f"{self.loss:.4f}"),
            *([] if self.perplexity is None else [("perplexity", f"{self.perplexity:.4g}")]),
            ("tokens", f"{self.tokens:,}"),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return box(table(rows))
