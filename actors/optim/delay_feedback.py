"""Feedback against the delay of an asynchronous schedule: stale gradients are extended by their last change."""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.actors.optim.masters import Masters


class DelayFeedback:
    """Replaces the gradients u(t) of a step by 2 u(t) - u(t-1), if they are those of older weights.

    A gradient that is some steps behind is one of a trend, which this follows for a step. The first step of a stream
    has none before it.

    Args:
        masters: The weights that this actor updates.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a stream of steps."""
        self._before = {}

    @torch.no_grad()
    def extend(self, *, is_stale: bool) -> None:
        """Replace the gradients of a step, if they are stale; in any case keep what they are for the next step."""
        before, self._before = self._before, {}
        for name, _, gradient in self._masters.with_gradients(writes=True):
            self._before[name] = gradient.clone()
            if is_stale and name in before:
                gradient.mul_(2.0).sub_(before[name])
