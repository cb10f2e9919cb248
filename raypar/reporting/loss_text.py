"""The loss of a step or an evaluation in words, which may be missing."""

from __future__ import annotations

NO_LOSS = "none, for no target counts"


def loss_text(loss: float | None) -> str:
    """Spell a mean loss with four decimals; say why there is none."""
    return NO_LOSS if loss is None else f"{loss:.4f}"
