"""Lists of experts in a layer: the parallel style that divides them over actors, and a record of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from raypar.actors.collective.group import Group
from raypar.actors.expert_parallel.experts import DividedExperts, run_experts
from raypar.actors.expert_parallel.token_exchange import TokenExchange
from raypar.actors.models.module_tree import replace_modules
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
        shard = TokenExchange(own, order, self.group, self.holders, self.tokens, self.shadows, self.rounds)
        return Applied(shard)


class _Noted(DividedExperts):
    """A list of experts that notes its calls."""

    def __init__(self, name: str, experts: nn.ModuleList, calls: list[str]) -> None:
        super().__init__({str(number): expert for number, expert in enumerate(experts)})
        self._name, self._calls = name, calls

    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        self._calls.append(self._name)
        return run_experts(x_TD, nn.ModuleList(self.values()), chosen_TK, gates_TK)


def note_calls(layer: nn.Module, lists: Mapping[str, str], calls: list[str]) -> None:
    """Let a layer's lists of experts note their calls.

    Args:
        layer: The layer, with weights. It is changed.
        lists: The name of each list inside the layer, by its logical name.
        calls: Each call appends the list's logical name here.
    """
    noted = dict[nn.Module, nn.Module]()
    for name, inner in lists.items():
        experts = layer.get_submodule(inner)
        assert isinstance(experts, nn.ModuleList)
        noted[experts] = _Noted(name, experts, calls)
        experts._modules.clear()  # the replacement gets the modules that are left here
    replace_modules(layer, noted)
