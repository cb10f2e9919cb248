"""Linear layers of one input, side by side: queries, keys and values, or an MLP's gate and what it gates."""

from __future__ import annotations

from torch import Tensor, nn


class Fan(nn.Module):
    """Calls linear layers on one input: (..., in) -> (..., out) of each.

    It has no weights. Where the layers are divided over actors, what replaces it communicates once for all of them.
    """

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return tuple([linear(x) for linear in linears])
