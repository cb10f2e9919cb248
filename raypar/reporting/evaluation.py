"""The result of an evaluation.

Whether the exponential of a loss is a perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import TOKENS, names_cross_entropy
from raypar.config.toml import plain_of
from raypar.reporting.loss_text import loss_text, metric_rows
from raypar.schedules.drawing.notebook import box, notebook_table


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on the validation data.

    Attributes:
        step: Number of steps taken before it: it was made after this step, counted from 1.
        loss: Mean of the model's loss over the target elements of the validation data: of a GPT or Llama its
            cross-entropy, in nats a token; of Layers what their ``loss`` returns, in its unit. None without targets.
        tokens: Number of target elements, as tokens to predict or labels.
        seconds: Duration in seconds.
        is_cross_entropy: Whether the loss is known to be a cross-entropy.
        is_averaged: Whether it is that of the averages of the weights.
        num_bytes: Bytes of the text that the targets stand for, special tokens for none; None if that is not known.
        of_tokens: Whether the targets are tokens, of which a perplexity is reported.
        metrics: The user's metrics (``rp.Layers(metrics=...)``), by name; None where nothing was counted.
    """

    step: int
    loss: float | None
    tokens: int
    seconds: float
    is_cross_entropy: bool = True
    is_averaged: bool = False
    num_bytes: int | None = None
    of_tokens: bool = True
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def steps_taken(self) -> int:
        """Number of steps taken before it."""
        return self.step

    @property
    def perplexity(self) -> float | None:
        """The exponential of a cross-entropy of tokens, at most that of 700, which is still finite; None of others."""
        if not self.is_cross_entropy or not self.of_tokens or self.loss is None:
            return None
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """The cross-entropy of all targets in bits, by the bytes that they stand for; None if it is not known.

        Models with other tokenizers can be compared by it.
        """
        if not self.is_cross_entropy or not self.num_bytes or self.loss is None:
            return None
        return self.loss * self.tokens / math.log(2) / self.num_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``steps_taken`` as a dict, for a line of JSON."""
        figures = {"val_loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}
        figures |= {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        further = {"metrics": dict(self.metrics)} if self.metrics else {}
        return {"step": self.step, **figures, **further, "steps_taken": self.steps_taken}

    def __repr__(self) -> str:
        """Return the figures in words."""
        further = [] if self.perplexity is None else [f"perplexity {self.perplexity!r}"]
        mean = (
            f"cross-entropy {self.loss!r} nats" if self.is_cross_entropy else f"mean of the model's loss {self.loss!r}"
        )
        further += [] if self.bits_per_byte is None else [f"{self.bits_per_byte!r} bits per byte"]
        further += [f"{name} {value!r}" for name, value in self.metrics.items()]
        figures = [mean, *further, f"{self.tokens:,} targets", f"{self.seconds:.3g} s"]
        return f"<Evaluation after step {self.step}: {', '.join(figures)}>"

    def _repr_html_(self) -> str:
        rows = [
            ("steps taken", self.step),
            ("validation loss", loss_text(self.loss)),
            *([] if self.perplexity is None else [("perplexity", f"{self.perplexity:.4g}")]),
            *([] if self.bits_per_byte is None else [("bits per byte", f"{self.bits_per_byte:.4g}")]),
            *metric_rows(self.metrics),
            ("tokens", f"{self.tokens:,}"),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return box(notebook_table(rows))


def is_cross_entropy(run: Run) -> bool:
    """Return whether a run's loss is known to be a cross-entropy."""
    return not isinstance(run.model, Layers) or names_cross_entropy(str(plain_of(run)["model"].get("loss")))


def are_tokens(run: Run) -> bool:
    """Return whether the targets of a run are known to be tokens, and not classes of images, say."""
    return run.model.seq is not None or run.unit in TOKENS
