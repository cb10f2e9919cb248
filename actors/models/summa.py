"""Layers divided over a square of members, or over several squares behind one another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from raypar.actors.group import Group
from raypar.actors.layers.ops import reduce_scatter
from raypar.actors.layers.summa import SummaLinear
from raypar.actors.layers.tensor import VocabParallelEmbedding
from raypar.actors.models.division import Made
from raypar.actors.models.grids import GridParallel, Spread, portion_of
from raypar.actors.models.model import Model


class SquareParallel(GridParallel):
    """2D as in Optimus (Xu & You 2021), 2.5D as in Tesseract (Wang et al. 2021).

    In member (i, j) of a q x q square are the samples i and the features j of every activation, and of every matrix the
    block of outputs i and inputs j. Of d squares each takes a part of the batch, with weights of its own, whose
    gradients are summed once a step.

    groups  ``tp.row``, ``tp.col`` and, if there are several squares, ``tp.depth``, by key
    """

    def __init__(self, model: Model, groups: Mapping[str, Group]) -> None:
        self.row, self.col = groups["tp.row"], groups["tp.col"]
        self.behind = (groups["tp.depth"],) if "tp.depth" in groups else ()
        spread = Spread((*self.behind, self.col), self.row)
        super().__init__(model, (*self.behind, self.col, self.row), spread, spread)

    def embedding(self, module: nn.Embedding) -> Made:
        """The own ids' vectors for all tokens of the square, then those of the own tokens, summed."""
        cut = self.cut(tuple(module.weight.shape), {0: (self.col,), 1: (self.row,)})
        made = VocabParallelEmbedding(module, cut, partial(reduce_scatter, group=self.col, dim=0))
        square = portion_of(self.behind)
        made.register_forward_pre_hook(lambda _, inputs: (square.take(inputs[0], 0),))
        return Made(made, {"weight": cut}, {"weight": self.alike(self.col, self.row)})

    def linear(self, module: nn.Linear, inputs: Spread, outputs: Spread) -> Made:
        """Inside and outside are divided alike."""
        cut = self.cut(tuple(module.weight.shape), {0: (self.col,), 1: (self.row,)})
        made = SummaLinear(module, cut, self.row, self.col)
        cuts, partials = {"weight": cut}, {"weight": self.alike(self.col, self.row)}
        if module.bias is not None:
            cuts["bias"] = self.cut(tuple(module.bias.shape), {0: (self.row,)})
            partials["bias"] = self.alike(self.row)
        return Made(made, cuts, partials)
