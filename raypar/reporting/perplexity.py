"""Whether the exponential of a loss is a perplexity."""

from __future__ import annotations

from raypar.actors.specs.loss_name import names_cross_entropy
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import TOKENS
from raypar.config.toml import plain_of


def is_cross_entropy(run: Run) -> bool:
    """Return whether a run's loss is known to be a cross-entropy."""
    return not isinstance(run.model, Layers) or names_cross_entropy(str(plain_of(run)["model"].get("loss")))


def are_tokens(run: Run) -> bool:
    """Return whether the targets of a run are known to be tokens, and not classes of images, say."""
    return run.model.seq is not None or run.unit in TOKENS
