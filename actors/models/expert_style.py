"""The parallel style of experts: each actor keeps some of a layer's experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from raypar.actors.collective.group import Group
from raypar.actors.expert_parallel.exchange import ExpertShard
from raypar.actors.models.parallel_style import Applied, ParallelStyle
from raypar.actors.sharding import Pieces


@dataclass(frozen=True)
class ExpertParallel(ParallelStyle):
    """Keep this actor's experts of an nn.ModuleList, each under its number.

    Attributes:
        group: The actors that have tokens or experts.
        holders: The ranks in the group that hold experts.
        tokens: Actors that all have the same tokens, which they divide for the experts; None if there are no others.
        shadows: The most experts that are shadowed at a time.
        orders: By the name of a list, the order in which actors divide its experts if that is not by number.
        rounds: The rounds in which tokens travel.
    """

    group: Group
    holders: range
    tokens: Group | None
    shadows: int = 0
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rounds: int = 1

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the list by this actor's slice of it."""
        assert isinstance(module, nn.ModuleList)
        order = self.orders.get(name, range(len(module)))
        own = dict[int, nn.Module]()
        if self.group.rank in self.holders:
            first, last = Pieces.at(self.group.rank - self.holders.start, len(self.holders)).span(len(order))
            own = {number: module[number] for number in order[first:last]}
        module._modules.clear()  # the replacement gets the modules that are left here
        shard = ExpertShard(own, order, self.group, self.holders, self.tokens, self.shadows, self.rounds)
        return Applied(shard)
