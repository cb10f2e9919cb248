"""What routers tell of a step beside their outputs: auxiliary losses, and the load of each expert."""

from __future__ import annotations

from torch import Tensor


class RouterRecord:
    """Drops what it is told."""

    def loss(self, layer: str, kind: str, value: Tensor) -> None:
        """Tell an auxiliary loss as it is added to the objective."""

    def scores(self, layer: str, scores: Tensor) -> None:
        """Tell the scores of a router."""

    def tokens(self, layer: str, asked_E: Tensor, dropped_E: Tensor) -> None:
        """Tell how many tokens have chosen each expert, and how many of those were dropped."""


class Routed:
    """A module that tells a record what it does."""

    record: RouterRecord | None = None
    name: str = ""


def attach_loss(x: Tensor, loss: Tensor, record: RouterRecord | None) -> Tensor:
    """Return ``x``."""
    return x
