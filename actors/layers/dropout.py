"""Dropout of a tensor that is divided over actors: each actor applies its part of the whole tensor's mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.sharding import Portion

Portions = Mapping[int, Portion]  # dim (may be negative) -> this actor's portion; it holds all of other dims


class DividedDropout(nn.Dropout):
    """Dropout of a tensor of which this actor holds a part.

    Every actor draws the whole mask and takes its part of it. The actors' generators start equal, and stay equal
    because all draw the same amount.

    Args:
        p: Probability of zeroing an element.
        portions: This actor's portion of each divided dim.
    """

    def __init__(self, p: float, portions: Portions) -> None:
        super().__init__(p)
        self.portions = portions

    def forward(self, x: Tensor) -> Tensor:
        """Apply this actor's part of the whole tensor's mask to its part of the tensor, of any shape."""
        if not self.p or not self.training:
            return x
        portions = {dim % x.dim(): portion for dim, portion in self.portions.items()}
        shape = [portions.get(dim, Portion()).whole(length) for dim, length in enumerate(x.shape)]
        mask = F.dropout(x.new_ones(shape), self.p)
        for dim, portion in portions.items():
            mask = portion.take(mask, dim)
        return x * mask.clone()  # the backward keeps it: a view would keep the whole mask


def divided(drop: nn.Dropout, portions: Portions) -> DividedDropout:
    """Return the dropout for this actor's portions of the tensors that ``drop`` was applied to so far.

    Args:
        drop: A dropout of the whole tensor, or of a part if it was divided before.
        portions: The portion of each dim that this actor keeps of what ``drop`` was applied to.
    """
    return DividedDropout(drop.p, narrowed(drop.portions if isinstance(drop, DividedDropout) else {}, portions))


def narrowed(before: Portions, portions: Portions) -> Portions:
    """Compose two divisions: take ``portions`` of the part that ``before`` describes, dim by dim."""
    return {**before, **{dim: before.get(dim, Portion()).then(portion) for dim, portion in portions.items()}}
