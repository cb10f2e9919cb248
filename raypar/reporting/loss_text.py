"""The loss of a step or an evaluation in words, which may be missing."""

from __future__ import annotations

from collections.abc import Mapping

NO_LOSS = "none, for no target counts"


def loss_text(loss: float | None) -> str:
    """Spell a mean loss with four decimals; say why there is none."""
    return NO_LOSS if loss is None else f"{loss:.4f}"


def metric_rows(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return names and values of the user's metrics, as texts."""
    return [(name, "no targets" if value is None else f"{value:.4g}") for name, value in metrics.items()]
