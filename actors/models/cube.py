"""Layers divided over a cube of members."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from raypar.actors.group import Group
from raypar.actors.layers.cube import CubeLinear
from raypar.actors.layers.gathered import Gathering
from raypar.actors.layers.ops import all_gather, reduce_scatter
from raypar.actors.layers.tensor import VocabParallelEmbedding
from raypar.actors.models.division import Made
from raypar.actors.models.grids import GridParallel, Spread, portion_of
from raypar.actors.models.model import Model


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
