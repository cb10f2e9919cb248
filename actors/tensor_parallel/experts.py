"""The parallel style of a layer of experts under 1D tensor parallelism: every MLP in it is sharded.

Every member routes all tokens, and has some columns of every expert. What the MLPs make are partial sums, which are
weighed and added up before they are summed over the members, once for the layer. The gates' gradients are partial then,
and so are those of the router and of the other parameters that every member has whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from raypar.actors.collective.autograd import Move
from raypar.actors.collective.group import Group
from raypar.actors.models.module_tree import replace_modules
from raypar.actors.models.moe import MixtureOfExperts
from raypar.actors.models.parallel_style import Applied, ParallelStyle
from raypar.actors.sharding import Shard, Sharding
from raypar.actors.tensor_parallel.linear import ColumnParallelLinear, PostponableLinear, own_product, shard_of

_COLUMNS = ("up", "gate")  # of an MLP
_ROW = "down"


class PartialRowLinear(PostponableLinear):
    """A linear layer sharded by inputs, whose products somebody else sums: (..., own inputs) -> (..., out), partial.

    Args:
        whole: The layer to shard.
        shard: This member's part of the weight (out, in), along dim 1.
        has_bias: Whether this member adds the bias, which is to be added once. Every member has it.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, *, has_bias: bool) -> None:
        outputs, inputs = shard.shape
        super().__init__(inputs, outputs, whole.bias is not None, dtype=whole.weight.dtype)
        self.has_bias = has_bias

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None or self.has_bias:
            return own_product(self, input, self.bias)
        return own_product(self, input, None) + self.bias * 0.0  # so that it has a gradient


@dataclass(frozen=True)
class ShardedExperts(ParallelStyle):
    """Shard the MLPs of a layer of experts: up and gate by outputs, down by inputs.

    Attributes:
        group: The tensor-parallel group.
        enter: The style of a module whose input sharded layers in it take.
        leave: Sums the layer's partial output over the members.
        flow: Sharding of the layer's output.
    """

    group: Group
    enter: ParallelStyle
    leave: Move
    flow: Sharding

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the linear layers of its MLPs, and sum its output."""
        assert isinstance(module, MixtureOfExperts)
        self.enter.apply(name, module)
        shards, replacements, is_first = dict[str, Shard](), dict[nn.Module, nn.Module](), self.group.rank == 0
        for path, linear in module.named_modules():
            last = path.rpartition(".")[2]
            if not isinstance(linear, nn.Linear) or last not in (*_COLUMNS, _ROW):
                continue
            weight = shard_of(linear.weight.shape, 1 if last == _ROW else 0, self.group)
            shards[f"{path}.weight"] = weight
            if last == _ROW:
                replacements[linear] = PartialRowLinear(linear, weight, has_bias=is_first)
            else:
                replacements[linear] = ColumnParallelLinear(linear, weight)
                if linear.bias is not None:
                    shards[f"{path}.bias"] = shard_of(linear.bias.shape, 0, self.group)
        replace_modules(module, replacements)
        module.attaches = is_first

        def left(_: nn.Module, inputs: tuple[Any, ...], partial_BSD: Tensor) -> Tensor:
            return self.leave(partial_BSD)

        module.register_forward_hook(left)
        whole = [inner for inner, _ in module.named_parameters() if inner not in shards]
        return Applied(module, shards, dict.fromkeys(whole, (self.group,)), {"": self.flow})
