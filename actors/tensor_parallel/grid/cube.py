"""A linear layer whose weights and inputs are parts on a cube of members (Bian et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.collective.autograd import all_gather, all_gathered, reduce_scatter, reduce_scattered
from raypar.actors.collective.group import Group
from raypar.actors.models.base import Model
from raypar.actors.models.parallel_plan import Made
from raypar.actors.sharding import Cut
from raypar.actors.tensor_parallel.grid.base import GridParallel, Spread, portion_of
from raypar.actors.tensor_parallel.linear import VocabParallelEmbedding
from raypar.actors.tensor_parallel.sequence import Gathering


class CubeLinear(nn.Linear):
    """A part of a linear layer: some of its inputs make parts of some of its outputs, which are summed.

    (b, ..., own inputs) -> (b / size of ``inputs``, ..., own outputs).

    cut      what of the weight (out, in) is here; of the bias the outputs ``bias``
    inputs   the members that have the other inputs
    weights  the members that have the other parts of these inputs' weights
    """

    def __init__(self, whole: nn.Linear, cut: Cut, bias: Cut | None, *, inputs: Group, weights: Group) -> None:
        outputs, held = cut.shape
        super().__init__(held, outputs, bias=False, dtype=whole.weight.dtype)
        if bias is not None:
            self.bias = nn.Parameter(torch.empty(bias.shape, dtype=whole.bias.dtype))
        self.inputs, self.weights = inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Product.apply(x, self.weight, self.weights)  # type: ignore[no-untyped-call]
        out = reduce_scatter(made, self.inputs, 0)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T, of w the members have parts along the inputs. A member keeps its own: others' come again in the backward.

    The members' gradients of w are partial, and each gets the sum for its part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, all_gathered(group, 1, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = gradient @ all_gathered(ctx.group, 1, weight)
        made = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return back, reduce_scattered(ctx.group, 1, made), None


class CubeParallel(GridParallel):
    """3D (Bian et al. 2021): of l x l x l members (x, y, z) each has 1/l^3 of every matrix, and of every activation but
    what goes into linear layers, of which it keeps what it gathers: 1/l^2, unless it is told to gather it anew.

    Outside of attention and MLP the batch is divided over x, then y, and features over z. A linear layer gathers its
    inputs along y and its weights along x, and sums its products along z: behind it y and z have swapped. The next one
    swaps them back.

    groups  ``tp.x``, ``tp.y`` and ``tp.z``, by key
    """

    def __init__(self, model: Model, groups: Mapping[str, Group]) -> None:
        self.x, self.y, self.z = (groups[f"tp.{axis}"] for axis in "xyz")
        super().__init__(
            model, (self.x, self.y, self.z), Spread((self.x, self.y), self.z), Spread((self.x, self.z), self.y)
        )

    def enter(self, module: nn.Module) -> None:
        """Gather the samples along y."""
        Gathering(module, self.y, dim=0)

    def embedding(self, module: nn.Embedding) -> Made:
        """The own ids' vectors for the samples of all along y, then those of the own tokens, summed."""
        cut = self.cut(tuple(module.weight.shape), {0: (self.y,), 1: (self.z, self.x)})
        leave, weights = partial(reduce_scatter, group=self.y, dim=0), partial(all_gather, group=self.x, dim=1)
        made, samples = VocabParallelEmbedding(module, cut, leave, weights), portion_of((self.x,))
        made.register_forward_pre_hook(lambda _, inputs: (samples.take(inputs[0], 0),))
        return Made(made, {"weight": cut})

    def linear(self, module: nn.Linear, inputs: Spread, outputs: Spread) -> Made:
        """Features go from z to y, where ``enter`` has gathered the samples, or from y to z."""
        out, into = outputs.features, inputs.features
        cut = self.cut(tuple(module.weight.shape), {0: (out,), 1: (into, self.x)})
        bias = None if module.bias is None else self.cut(tuple(module.bias.shape), {0: (out,)})
        made = CubeLinear(module, cut, bias, inputs=into, weights=self.x)
        if inputs == self.inside:
            Gathering(made, out, dim=0)
        if bias is None:
            return Made(made, {"weight": cut})
        return Made(made, {"weight": cut, "bias": bias}, {"bias": self.alike(out)})
