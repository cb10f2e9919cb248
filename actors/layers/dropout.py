"""Dropout of a tensor that is sharded over actors: each actor applies its part of the whole tensor's mask."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.sharding import Sharding


class DropoutOfShard(nn.Dropout):
    """Dropout of a tensor of which this actor holds a part.

    Every actor draws the whole mask and takes its part of it. The actors' generators start equal, and stay equal
    because all draw the same amount.

    Args:
        p: Probability of zeroing an element.
        sharding: Which part this actor holds, in equal pieces.
    """

    def __init__(self, p: float, sharding: Sharding) -> None:
        super().__init__(p)
        self.sharding = sharding

    def forward(self, x: Tensor) -> Tensor:
        """Apply this actor's part of the whole tensor's mask to its part of the tensor, of any shape."""
        if not self.p or not self.training:
            return x
        sharding = self.sharding.for_dims(x.dim())
        mask = sharding.take(F.dropout(x.new_ones(sharding.whole_shape(x.shape)), self.p))
        return x * mask.clone()  # the backward keeps it: a view would keep the whole mask


def sharded_dropout(drop: nn.Dropout, sharding: Sharding) -> DropoutOfShard:
    """Return the dropout for a part of the tensors that ``drop`` was applied to.

    Args:
        drop: A dropout of the whole tensor, or of a part if it was sharded before.
        sharding: The part that this actor holds of what ``drop`` was applied to.
    """
    before = drop.sharding if isinstance(drop, DropoutOfShard) else Sharding()
    return DropoutOfShard(drop.p, before.then(sharding))
