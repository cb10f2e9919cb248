"""Parallel styles that tensor parallelism on any grid shares.

Every matrix is sharded by rows and columns, and every activation by the batch and by features. So norms see only parts
of vectors. A parameter that an axis of the grid does not shard is the same on all members along that axis, but each
member's gradient of it is partial: it is that of the member's own tokens.

Attributes that several styles have:

- ``layout``: how the grid shards activations;
- ``linear``: shards a linear layer on this grid;
- ``column``: the style of linear layers from hidden features to heads, columns or the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective.autograd import all_gathered, reduce_from
from raypar.actors.collective.group import Group, Groups
from raypar.actors.layers.attention.attention import Attention
from raypar.actors.layers.positions import Learned, Sinusoidal
from raypar.actors.models.base import IGNORED, Kind
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle, ShardedDropout, apply_to_children
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


class NormOfShard(nn.Module):
    """A LayerNorm or RMSNorm of vectors that are sharded over a group: (..., own part) -> (..., own part).

    Args:
        whole: The norm to shard.
        shard: This member's part of the weight (D,) and of the bias.
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
    return apply_function(_Normalised, x, whole, eps, group, centred)


class _Normalised(torch.autograd.Function):
    """The norm, with one message of one or two numbers per token in the forward and another in the backward.

    The forward sends the sum of squares of the member's part, and the part's mean if the norm is centred. The squares
    are of the differences from that mean, so that no large numbers cancel (Chan et al. 1979). Half precision is
    computed in fp32. The forward saves only its result, which the next layer saves too, and the scale of the vectors.
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


class GridAxes(NamedTuple):
    """The axes of a grid that shard an activation (B, S, features); each is this member's group along it.

    Attributes:
        batch: The axes that shard the batch, the outermost first.
        features: The axis that shards the features.
    """

    batch: Groups
    features: Group

    @property
    def sharding(self) -> Sharding:
        """Sharding of the activation."""
        return Sharding({0: pieces_along(self.batch), 2: pieces_along((self.features,))})


@dataclass(frozen=True)
class GridLayout:
    """How a grid shards activations.

    Attributes:
        axes: This member's group along each axis of the grid.
        outside: The axes that shard the values between layers.
        inside: The axes that shard the values inside attention and MLP, and the logits.
    """

    axes: Groups
    outside: GridAxes
    inside: GridAxes

    @property
    def flow(self) -> Sharding:
        """Sharding of the values between layers (B, S, D)."""
        return self.outside.sharding

    def same_along(self, *sharding: Group) -> Groups:
        """Return the axes along which all members hold the same part of a tensor that these axes shard."""
        return tuple(axis for axis in self.axes if axis not in sharding)


def pieces_along(axes: Groups) -> Pieces:
    """Return this member's pieces of a dim.

    Args:
        axes: The axes that shard the dim, the outermost first.
    """
    pieces = Pieces()
    for axis in axes:
        pieces = pieces.then(Pieces.at(axis.rank, axis.size))
    return pieces


def shard_along(whole: Sequence[int], dims: Mapping[int, Groups]) -> Shard:
    """Return this member's part of a tensor.

    Args:
        whole: Shape of the whole tensor.
        dims: By dim, the axes that shard it, the outermost first.
    """
    return Shard(tuple(whole), Sharding({dim: pieces_along(axes) for dim, axes in dims.items()}))


GridLinear = Callable[[nn.Linear, GridAxes, GridAxes], Applied]  # shards a layer; the axes of its input and output


def grid_styles(
    layout: GridLayout, embedding: ParallelStyle, linear: GridLinear, enter: ParallelStyle | None = None
) -> AxisStyles:
    """Return the styles of tensor parallelism on a grid.

    Args:
        layout: How the grid shards activations.
        embedding: Shards the embedding.
        linear: Shards a linear layer.
        enter: Gathers the input of attention, MLP and logits, if the grid's linear layers need that.
    """
    column = GridProjection(linear, layout.outside, layout.inside)
    styles: dict[Kind, ParallelStyle] = {
        "vocab": embedding,
        "table": GridTable(layout),
        "norm": GridNorm(layout),
        "heads": GridHeads(layout, column),
        "column": column,
        "row": GridProjection(linear, layout.inside, layout.outside),
        "logits": GridLogits(layout, column),
        "drop": ShardedDropout(layout.flow),
    }
    return AxisStyles(styles if enter is None else styles | {"enter": enter}, layout.flow)


@dataclass(frozen=True)
class GridTable(ParallelStyle):
    """Shard a table of positions along its features."""

    layout: GridLayout

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Shard the table, or the rows that it computes."""
        axis = self.layout.outside.features
        if isinstance(module, Sinusoidal):
            pieces = pieces_along((axis,))
            module.register_forward_hook(lambda _, inputs, rows: pieces.take(rows, 1))
        if not isinstance(module, Learned):
            return Applied(module)
        shard = shard_along(module.weight.shape, {1: (axis,)})
        module.weight = nn.Parameter(torch.empty(shard.shape, dtype=module.weight.dtype))
        return Applied(module, {"weight": shard}, {"weight": self.layout.same_along(axis)})


@dataclass(frozen=True)
class GridNorm(ParallelStyle):
    """Shard a LayerNorm or RMSNorm along its features."""

    layout: GridLayout

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        axis = self.layout.outside.features
        shard = shard_along(module.weight.shape, {0: (axis,)})
        made = NormOfShard(module, shard, axis)
        names = [parameter for parameter, _ in made.named_parameters()]
        return Applied(made, dict.fromkeys(names, shard), dict.fromkeys(names, self.layout.same_along(axis)))


@dataclass(frozen=True)
class GridProjection(ParallelStyle):
    """Shard a linear layer from hidden features to heads, columns or the vocabulary, or back.

    Attributes:
        linear: Shards a linear layer on this grid.
        source: The axes that shard its input.
        target: The axes that shard its output.
    """

    linear: GridLinear
    source: GridAxes
    target: GridAxes

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Linear)
        return self.linear(module, self.source, self.target)._replace(outputs={"": self.target.sharding})


@dataclass(frozen=True)
class GridHeads(ParallelStyle):
    """Let each member compute some of the heads of an attention, for some samples."""

    layout: GridLayout
    column: GridProjection

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, Attention)
        batch, heads = pieces_along(self.layout.inside.batch), pieces_along((self.layout.inside.features,))
        module.core.narrow(module.q.out_features // module.width, Sharding({0: batch, 1: heads}))
        applied = apply_to_children(name, module, dict.fromkeys(("q", "k", "v"), self.column))
        normed = [inner for inner, _ in module.named_parameters() if inner.startswith(("q_norm.", "k_norm."))]
        return applied._replace(partial={**applied.partial, **dict.fromkeys(normed, self.layout.axes)})


@dataclass(frozen=True)
class GridLogits(ParallelStyle):
    """Shard the projection to the vocabulary, and compute the loss from sharded logits."""

    layout: GridLayout
    column: GridProjection

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the projection, and return the loss that goes with it."""
        applied, (axes, vocab) = self.column.apply(name, module), self.layout.inside
        batch = pieces_along(axes)
        shard = Shard(applied.shards["weight"].whole[:1], Sharding({0: pieces_along((vocab,))}))

        def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
            total = vocab_parallel_cross_entropy(logits, batch.take(labels, 0), shard, vocab, IGNORED)
            for axis in axes:
                total = reduce_from(total, axis)
            return total

        return applied._replace(cross_entropy=cross_entropy)
