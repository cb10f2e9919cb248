"""3D tensor parallelism: weights and activations are parts on an l x l x l cube of members (Bian et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective.autograd import all_gather, all_gathered, reduce_scatter, reduce_scattered
from raypar.actors.collective.group import Group
from raypar.actors.layers.linear import Postponer, Use
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle
from raypar.actors.sharding import Shard
from raypar.actors.tensor_parallel.grid.base import GridAxes, GridLayout, grid_styles, pieces_along, shard_along
from raypar.actors.tensor_parallel.linear import PostponableLinear, VocabParallelEmbedding
from raypar.actors.tensor_parallel.sequence import Gathering


class CubeLinear(PostponableLinear):
    """A part of a linear layer, whose products are summed: (b, ..., own inputs) -> (b / inputs.size, ..., own outputs).

    Args:
        whole: The layer to shard.
        shard: This member's part of the weight (out, in).
        bias: This member's part of the bias (out,); None without a bias.
        inputs: The group over which products are summed; its members hold the other inputs.
        weights: The group over which the weight is gathered; its members hold the other parts of the same inputs.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, bias: Shard | None, *, inputs: Group, weights: Group) -> None:
        super().__init__(whole, shard, bias=False)
        if bias is not None:
            self.bias = nn.Parameter(torch.empty(bias.shape, dtype=whole.bias.dtype))
        self.inputs, self.weights = inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        later = self.later(x)
        seen = self.weight if later is None else later.anchor
        made = apply_function(_Product, x, seen, self, later)
        out = reduce_scatter(made, self.inputs, 0)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T, where each member holds a part of w along the inputs.

    The forward keeps only the member's own part; the others are gathered again in the backward. The members' gradients
    of w are partial, and each member gets the sum for its part. ``seen`` is w, or the anchor of ``later``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, layer: CubeLinear, later: Postponer | None) -> Tensor:
        ctx.save_for_backward(x, layer.weight)
        ctx.group, ctx.later, ctx.weight = layer.weights, later, layer.weight  # hooks of saved tensors return another
        return F.linear(x, all_gathered(ctx.group, 1, layer.weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = gradient @ all_gathered(ctx.group, 1, weight)
        x_TI, rows_TO, made = x.flatten(0, -2), gradient.flatten(0, -2), partial(_of_weight, ctx.group)
        if ctx.later is not None:
            ctx.later.postpone(ctx.weight, None, Use(x_TI.detach(), rows_TO, made))
        return back, made(rows_TO, x_TI) if ctx.later is None else None, None, None


def _of_weight(group: Group, rows_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return this member's part of the gradient of a weight, summed over the members."""
    return reduce_scattered(group, 1, rows_TO.T @ x_TI)


def cube_styles(groups: Mapping[str, Group]) -> AxisStyles:
    """Return the styles of 3D tensor parallelism (Bian et al. 2021).

    Each of the l x l x l members (x, y, z) holds 1/l^3 of every matrix and of every activation. The exception is the
    gathered input that a linear layer keeps for its backward, 1/l^2, unless it is recomputed selectively.

    Outside of attention and MLP the batch is sharded over x, then y, and features over z. A linear layer gathers its
    inputs along y and its weights along x, and sums its products along z: after it y and z have swapped. The next
    linear layer swaps them back.

    Args:
        groups: This rank's groups ``tp.x``, ``tp.y`` and ``tp.z``, by key.
    """
    x, y, z = (groups[f"tp.{axis}"] for axis in "xyz")
    layout = GridLayout((x, y, z), outside=GridAxes((x, y), z), inside=GridAxes((x, z), y))
    return grid_styles(layout, CubeEmbedding(layout), partial(_linear, layout), CubeInput(y))


@dataclass(frozen=True)
class CubeInput(ParallelStyle):
    """Gather the samples of a module's input along y.

    Attributes:
        y: This member's group along y.
    """

    y: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        Gathering(self.y, dim=0).attach(module)
        return Applied(module)


@dataclass(frozen=True)
class CubeEmbedding(ParallelStyle):
    """Shard an embedding by ids along y, and by features along z and x.

    A member embeds the samples of all members along y with the ids that it holds. Then the vectors are summed along y,
    and each member gets those of its own tokens.
    """

    layout: GridLayout

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Embedding)
        x, y, z = self.layout.axes
        weight = shard_along(module.weight.shape, {0: (y,), 1: (z, x)})
        leave, gather = partial(reduce_scatter, group=y, dim=0), partial(all_gather, group=x, dim=1)
        made, samples = VocabParallelEmbedding(module, weight, leave, gather), pieces_along((x,))
        made.register_forward_pre_hook(lambda _, inputs: (samples.take(inputs[0], 0),))
        return Applied(made, {"weight": weight}, outputs={"": self.layout.flow})


def _linear(layout: GridLayout, module: nn.Linear, inputs: GridAxes, outputs: GridAxes) -> Applied:
    """Shard a linear layer.

    Either its inputs are sharded over z and its outputs over y, and then ``CubeInput`` has gathered the samples of its
    input; or they are the other way round, and then the layer itself gathers the samples.
    """
    x, out = layout.axes[0], outputs.features
    weight = shard_along(module.weight.shape, {0: (out,), 1: (inputs.features, x)})
    bias = None if module.bias is None else shard_along(module.bias.shape, {0: (out,)})
    made = CubeLinear(module, weight, bias, inputs=inputs.features, weights=x)
    if inputs == layout.inside:
        Gathering(out, dim=0).attach(made)
    if bias is None:
        return Applied(made, {"weight": weight})
    return Applied(made, {"weight": weight, "bias": bias}, {"bias": layout.same_along(out)})
