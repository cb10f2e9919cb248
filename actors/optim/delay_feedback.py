"""Delay feedback for asynchronous schedules: stale gradients are extrapolated by their last change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class DelayFeedback:
    """Replaces the gradients u(t) of a step by 2 u(t) - u(t-1), if they are those of older weights.

    This extrapolates a delayed gradient linearly by one step. The first step of a stream has no gradient before it.

    Args:
        masters: The weights that this actor updates, by logical name.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter]) -> None:
        self._masters = masters
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a stream of steps."""
        self._before = {}

    @torch.no_grad()
    def extend(self, *, is_stale: bool) -> None:
        """Replace the gradients of a step if they are stale, and store the original ones for the next step."""
        before, self._before = self._before, {}
        for name, master in self._masters.items():
            if master.grad is not None:
                self._before[name] = master.grad.clone()
                if is_stale and name in before:
                    master.grad.mul_(2.0).sub_(before[name])
