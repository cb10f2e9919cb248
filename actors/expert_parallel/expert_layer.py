"""A layer as an expert actor has it: its experts, without everything else."""

from __future__ import annotations

from torch import Tensor, nn

from raypar.actors.expert_parallel.exchange import ExpertShard


def strip(layer: nn.Module) -> None:
    """Take all weights and buffers but those of experts out of a layer, in place, before it has values.

    Args:
        layer: The layer, or a container of layers, in which lists of experts are ``ExpertShard``.
    """
    kept = {id(part) for module in layer.modules() if isinstance(module, ExpertShard) for part in module.modules()}
    for module in layer.modules():
        if id(module) not in kept:
            module._parameters.clear()
            module._buffers.clear()


class ExpertLayer(nn.Module):
    """The experts of a layer, which have the same names as in the layer. A layer without experts passes values on.

    Each call serves one forward of the layer on the actors that have tokens: its lists of experts are called once each,
    in the order of their registration.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        found = {name: module for name, module in layer.named_modules() if isinstance(module, ExpertShard)}
        self._shards = tuple(found)
        for name, shard in found.items():
            *parents, last = name.split(".")
            at: nn.Module = self
            for parent in parents:
                if parent not in at._modules:
                    at.add_module(parent, nn.Module())
                at = at.get_submodule(parent)
            at.add_module(last, shard)

    def forward(self, link: Tensor) -> Tensor:
        """Compute what other actors send: no rows (0, 1), from the layer before, to no rows (0, 1)."""
        for name in self._shards:
            shard = self.get_submodule(name)
            assert isinstance(shard, ExpertShard)
            link = shard.serve(link)
        return link
