"""Dropout of a divided tensor: the mask is a part of the one that the whole tensor would have."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.sharding import Portion

Portions = Mapping[int, Portion]  # by dim, of which -1 is the last; of others all is here


class DividedDropout(nn.Dropout):
    """Dropout of a tensor of which a part is here.

    Every member draws the whole mask, from equal generators, so that they stay equal.
    """

    def __init__(self, p: float, portions: Portions) -> None:
        super().__init__(p)
        self.portions = portions

    def forward(self, x: Tensor) -> Tensor:
        """What is here of the whole tensor's dropout, of any shape."""
        if not self.p or not self.training:
            return x
        portions = {dim % x.dim(): portion for dim, portion in self.portions.items()}
        shape = [portions.get(dim, Portion()).whole(length) for dim, length in enumerate(x.shape)]
        mask = F.dropout(x.new_ones(shape), self.p)
        for dim, portion in portions.items():
            mask = portion.take(mask, dim)
        return x * mask.clone()  # the backward keeps it, and with a view all of it


def divided(drop: nn.Dropout, portions: Portions) -> DividedDropout:
    """The dropout of what is here of what ``drop`` has been given so far."""
    return DividedDropout(drop.p, narrowed(drop.portions if isinstance(drop, DividedDropout) else {}, portions))


def narrowed(before: Portions, portions: Portions) -> Portions:
    """Of what is here of each dim the part that ``portions`` say."""
    return {**before, **{dim: before.get(dim, Portion()).then(portion) for dim, portion in portions.items()}}
