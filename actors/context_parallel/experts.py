"""The parallel style of a layer of experts whose sequences are divided over a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.actors.collective.autograd import all_gathered, reduce_from
from raypar.actors.collective.group import Group
from raypar.actors.models.moe import MixtureOfExperts
from raypar.actors.models.parallel_style import Applied, ParallelStyle
from raypar.actors.sharding import Pieces, Sharding


@dataclass(frozen=True)
class ExpertsOfTokens(ParallelStyle):
    """Make a layer of experts compute losses, noise and capacity as with whole sequences.

    Attributes:
        tokens: The tokens of each rank.
        group: The ranks: a context-parallel group, or a tensor-parallel one with sequence parallelism.
        is_tensor: Whether it is a tensor-parallel group.
    """

    tokens: Sequence[Pieces]
    group: Group
    is_tensor: bool = False

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Set the layer's sums and capacity to functions over all ranks."""
        assert isinstance(module, MixtureOfExperts)
        own = Sharding({1: self.tokens[self.group.rank]})
        noise = module.router.noise
        noise.sharding = noise.sharding.then(own)
        module.divides_tokens |= self.is_tensor
        sums, over = module.sums, module.over
        module.sums = lambda own_sum: reduce_from(sums(own_sum), self.group)
        module.over = lambda chosen_BSK: own.take(over(self._whole(chosen_BSK)))
        return Applied(module)

    def _whole(self, part_BSK: Tensor) -> Tensor:
        """Return the choices of whole sequences."""
        ranks = all_gathered(self.group, 0, part_BSK.unsqueeze(0))
        whole = torch.empty_like(torch.cat([*ranks], 1))
        for pieces, theirs in zip(self.tokens, ranks, strict=True):
            for number, piece in zip(pieces.own, theirs.chunk(len(pieces.own), 1), strict=True):
                Pieces(pieces.count, (number,)).take(whole, 1).copy_(piece)
        return whole
