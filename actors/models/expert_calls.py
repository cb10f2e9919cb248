"""Record the order in which a layer calls its lists of experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from raypar.actors.expert_parallel.experts import DividedExperts, run_experts
from raypar.actors.models.module_tree import replace_modules


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
