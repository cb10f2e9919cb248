"""LayerNorm and RMSNorm of vectors that are sharded over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.collective.autograd import all_gathered
from raypar.actors.collective.group import Group
from raypar.actors.sharding import Shard


class NormOfShard(nn.Module):
    """A LayerNorm or RMSNorm of vectors of which each member holds a part: (..., own part) -> (..., own part).

    Args:
        whole: The norm to shard.
        shard: This member's part of the weight (D,); of the bias it has the same part.
        group: The members that hold the parts of a vector.
    """

    def __init__(self, whole: nn.LayerNorm | nn.RMSNorm, shard: Shard, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shard.shape, dtype=whole.weight.dtype))
        biased = isinstance(whole, nn.LayerNorm) and whole.bias is not None
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if biased else None
        self._centred, self._group = isinstance(whole, nn.LayerNorm), group
        self._whole, self._eps = shard.whole[0], whole.eps

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self._eps is None else self._eps  # torch's default for RMSNorm
        out: Tensor = self.weight * normalised(x, self._whole, eps, self._group, centred=self._centred)
        return out if self.bias is None else out + self.bias


def normalised(x: Tensor, whole: int, eps: float, group: Group, *, centred: bool) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps), or the same of x - mean(x).

    Args:
        x: This member's part of the vectors, along the last dim.
        whole: Length of a whole vector, over which the means are taken.
        eps: Added to the mean square.
        group: The members that hold the parts of a vector.
        centred: Whether to subtract the mean first, as LayerNorm does.
    """
    out: Tensor = _Normalised.apply(x, whole, eps, group, centred)  # type: ignore[no-untyped-call]
    return out


class _Normalised(torch.autograd.Function):
    """The norm, with one message of one or two numbers per token in the forward and another in the backward.

    The forward sends the sum of squares of the member's part, and the part's mean if the norm is centred. The squares
    are of the differences from that mean, so that no large numbers cancel (Chan et al. 1979). Half precision is
    computed in fp32. The forward keeps only its result, which the next layer keeps too, and the factor
    that it multiplied the vectors by.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: int, eps: float, group: Group, centred: bool) -> Tensor:
        exact = x if x.dtype == torch.float64 else x.float()
        own = exact.mean(-1, keepdim=True) if centred else exact.new_zeros(())
        numbers = [(exact - own).square().sum(-1, keepdim=True), *([own] if centred else [])]
        squares, *means = all_gathered(group, 0, torch.stack(numbers)[None]).unbind(1)
        mean = means[0].mean(0) if centred else own
        between = x.shape[-1] * (means[0] - mean).square().sum(0) if centred else 0.0
        scale = torch.rsqrt((squares.sum(0) + between) / whole + eps)
        out = ((exact - mean) * scale).to(x.dtype)
        ctx.save_for_backward(out, scale)
        ctx.whole, ctx.group, ctx.centred = whole, group, centred
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, scale = ctx.saved_tensors
        exact, y = gradient.to(scale.dtype), out.to(scale.dtype)
        sums = [(exact * y).sum(-1, keepdim=True)]
        if ctx.centred:
            sums.append(exact.sum(-1, keepdim=True))
        total = torch.stack(sums)
        ctx.group.all_reduce(total).wait()
        along, *mean = total / ctx.whole
        made = exact - y * along - mean[0] if ctx.centred else exact - y * along
        return (made * scale).to(gradient.dtype), None, None, None, None
