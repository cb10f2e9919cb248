"""Parallel styles of 1D tensor parallelism, with or without sequence parallelism.

Attributes that several styles have:

- ``group``: the tensor-parallel group;
- ``column``: the style of linear layers that are sharded by outputs;
- ``leave``: sums partial tensors over the group, and with sequence parallelism keeps this member's tokens;
- ``flow``: the sharding of the values between layers.

Sources: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from raypar.actors.collective.autograd import Move, copy_to, reduce_from, reduce_scatter
from raypar.actors.collective.group import Group
from raypar.actors.layers.adapter import LoraAdapter
from raypar.actors.layers.attention.attention import Attention
from raypar.actors.layers.linear import SharedInputLinears
from raypar.actors.models.base import IGNORED, Kind
from raypar.actors.models.module_tree import replace_modules
from raypar.actors.models.moe import MixtureOfExperts
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle, ShardedDropout, apply_to_children
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.specs.lora import LORA
from raypar.actors.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy, vocabulary_part
from raypar.actors.tensor_parallel.linear import (
    ColumnParallelFan,
    ColumnParallelLinear,
    PostponableLinear,
    RowParallelLinear,
    SharedLinear,
    VocabParallelEmbedding,
    own_product,
    shard_of,
)
from raypar.actors.tensor_parallel.placed import placed_styles
from raypar.actors.tensor_parallel.plan_guard import demand_whole_loss
from raypar.actors.tensor_parallel.plan_styles import demand_whole_dropouts, plan_styles
from raypar.actors.tensor_parallel.sequence import Gathering

_COLUMNS = ("up", "gate")  # of an MLP
_ROW = "down"


class PartialRowLinear(PostponableLinear):
    """A linear layer sharded by inputs, whose products are summed later: (..., own inputs) -> (..., out), partial.

    Args:
        whole: The layer to shard.
        shard: This member's part of the weight (out, in), along dim 1.
        has_bias: Whether this member adds the bias; one member does. Every member has it.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, *, has_bias: bool) -> None:
        super().__init__(whole, shard)
        self.has_bias = has_bias

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None or self.has_bias:
            return own_product(self, input, self.bias)
        return own_product(self, input, None) + self.bias * 0.0  # so that it has a gradient


@dataclass(frozen=True)
class ShardedExperts(ParallelStyle):
    """Shard the MLPs of a layer of experts: up and gate by outputs, down by inputs.

    Every member routes all tokens, and has some columns of every expert. The MLPs' outputs are partial sums, which are
    weighted and added up before one sum over the members for the whole layer. So the gradients of the gates, the router
    and all other replicated parameters are partial.

    Attributes:
        group: The tensor-parallel group.
        enter: The style of a module whose input is the input of sharded layers in it.
        leave: Sums the layer's partial output over the members.
        flow: Sharding of the layer's output.
    """

    group: Group
    enter: ParallelStyle
    leave: Move
    flow: Sharding

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the linear layers of the MLPs, and sum the layer's output."""
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

        def summed(_: nn.Module, inputs: tuple[Any, ...], partial_BSD: Tensor) -> Tensor:
            return self.leave(partial_BSD)

        module.register_forward_hook(summed)
        whole = [inner for inner, _ in module.named_parameters() if inner not in shards]
        return Applied(module, shards, dict.fromkeys(whole, (self.group,)), {"": self.flow})


def megatron_styles(group: Group, *, sequence: bool) -> AxisStyles:
    """Return the styles of 1D tensor parallelism over a group.

    Values between layers are the same on every member; inside attention and MLP each member has its heads and its
    columns. With ``sequence``, values between layers are sharded too, along the sequence (dim 1): as many bytes are
    sent, and norms and dropout are computed once.

    Args:
        group: The tensor-parallel group.
        sequence: Whether to shard the sequence between attention and MLP.
    """
    own = Pieces.at(group.rank, group.size)
    flow = Sharding({1: own}) if sequence else Sharding()
    leave: Move = (
        partial(reduce_scatter, group=group, dim=1) if sequence else partial(reduce_from, group=group, in_place=True)
    )
    column = ColumnParallel(group)
    enter = EnteredInput(group, 1 if sequence else None)
    styles: dict[Kind, ParallelStyle] = {
        "vocab": VocabParallel(group, leave, flow),
        "enter": enter,
        "column": column,
        "heads": HeadParallel(group, column),
        "row": RowParallel(group, leave, flow),
        "adapter_column": AdapterOfColumns(group, column),
        "adapter_row": AdapterOfRows(group),
        "moe": ShardedExperts(group, enter, leave, flow),
        "logits": LogitsParallel(group, column),
        **plan_styles(group),
    }
    if sequence:
        styles |= {"drop": ShardedDropout(flow), "table": TableOfSequence(own)}
    partial_outside = (group,) if sequence else ()
    return AxisStyles(
        styles,
        flow,
        partial_outside,
        placed=placed_styles(group),
        guard=demand_whole_dropouts,
        check_loss=demand_whole_loss,
    )


@dataclass(frozen=True)
class ColumnParallel(ParallelStyle):
    """Shard a linear layer by outputs."""

    group: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Linear)
        weight = shard_of(module.weight.shape, 0, self.group)
        shards = {inner: shard_of(parameter.shape, 0, self.group) for inner, parameter in module.named_parameters()}
        return Applied(ColumnParallelLinear(module, weight), shards, outputs={"": Sharding({-1: weight.sharding[0]})})


@dataclass(frozen=True)
class RowParallel(ParallelStyle):
    """Shard a linear layer by inputs, and sum its outputs (Megatron's g)."""

    group: Group
    leave: Move
    flow: Sharding

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Linear)
        weight = shard_of(module.weight.shape, 1, self.group)
        made = RowParallelLinear(module, weight, self.leave, name)
        return Applied(made, {"weight": weight}, outputs={"": self.flow})


@dataclass(frozen=True)
class VocabParallel(ParallelStyle):
    """Shard an embedding by ids, and sum its vectors."""

    group: Group
    leave: Move
    flow: Sharding

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Embedding)
        weight = shard_of(module.weight.shape, 0, self.group)
        return Applied(VocabParallelEmbedding(module, weight, self.leave), {"weight": weight}, outputs={"": self.flow})


@dataclass(frozen=True)
class HeadParallel(ParallelStyle):
    """Let each member compute some of the heads of an attention.

    Heads of keys and values are sharded too if the group divides their number; otherwise every member holds their
    whole projections, and computes the one head that it needs. Norms of heads are whole on every member, which sees its
    own heads only.
    """

    group: Group
    column: ColumnParallel

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Shard the projections to queries, keys and values."""
        assert isinstance(module, Attention)
        heads, kv_heads = module.q.out_features // module.width, module.k.out_features // module.width
        module.core.narrow(heads, Sharding({1: Pieces.at(self.group.rank, self.group.size)}))
        kv: ParallelStyle = self.column
        if kv_heads % self.group.size:
            kv = SharedOutputs(self.group, Pieces.at(self.group.rank * kv_heads // self.group.size, kv_heads))
        styles = {"q": self.column, "k": kv, "v": kv}
        adapted = {f"{child}{LORA}": AdapterOfColumns(self.group, style) for child, style in styles.items()}
        styles |= {child: style for child, style in adapted.items() if getattr(module, child) is not None}
        applied = apply_to_children(name, module, styles)
        normed = [inner for inner in _parameters_of(module) if inner.startswith(("q_norm.", "k_norm."))]
        return applied._replace(partial={**applied.partial, **dict.fromkeys(normed, (self.group,))})


@dataclass(frozen=True)
class SharedOutputs(ParallelStyle):
    """Let each member compute some outputs of a linear layer that every member holds; other members may need them too.

    Attributes:
        group: The members.
        outputs: The outputs that this member computes.
    """

    group: Group
    outputs: Pieces

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Linear)
        made = SharedLinear(module, self.outputs.span(module.out_features))
        return Applied(made, partial=dict.fromkeys(_parameters_of(made), (self.group,)))


@dataclass(frozen=True)
class AdapterOfColumns(ParallelStyle):
    """Shard the adapter of a linear layer that is sharded by outputs.

    Its first half is whole on every member, and gets the same input; gradients of that are partial, as each member
    has other outputs.

    Attributes:
        group: The members.
        columns: What becomes of the layer, and of the adapter's second half.
    """

    group: Group
    columns: ParallelStyle

    def apply(self, name: str, module: nn.Module) -> Applied:
        applied = apply_to_children(name, module, {"b": self.columns})
        return applied._replace(partial={**applied.partial, "a.weight": (self.group,)})


@dataclass(frozen=True)
class AdapterOfRows(ParallelStyle):
    """Shard the adapter of a linear layer that is sharded by inputs.

    Each member's first half makes an addend from its own inputs. The second half is whole on every member, and what it
    makes is summed with the layer's products.
    """

    group: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, LoraAdapter)
        shard = shard_of(module.a.weight.shape, 1, self.group)
        module.a = type(module.a)(shard.shape[1], shard.shape[0], bias=False, dtype=module.a.weight.dtype)
        return Applied(module, {"a.weight": shard}, {"b.weight": (self.group,)})


@dataclass(frozen=True)
class LogitsParallel(ParallelStyle):
    """Shard the projection to the vocabulary by outputs, and compute the loss from sharded logits."""

    group: Group
    column: ColumnParallel

    def apply(self, name: str, module: nn.Module) -> Applied:
        applied = self.column.apply(name, module)
        shard = applied.shards["weight"]
        loss = partial(vocab_parallel_cross_entropy, shard=shard, group=self.group, ignored=IGNORED)
        return applied._replace(cross_entropy=loss, vocabulary=vocabulary_part(shard, self.group))


@dataclass(frozen=True)
class EnteredInput(ParallelStyle):
    """Sum the gradient of a module's input over the members, once for all layers in the module (Megatron's f).

    Attributes:
        group: The members.
        dim: The dim along which the input is sharded, and gathered here; None if every member has the whole input.
    """

    group: Group
    dim: int | None

    def apply(self, name: str, module: nn.Module) -> Applied:
        if isinstance(getattr(module, "fan", None), SharedInputLinears):
            module.fan = ColumnParallelFan(self.group, self.dim)
        elif self.dim is not None:
            Gathering(self.group, self.dim).attach(module)
        else:
            module.register_forward_pre_hook(lambda _, inputs: (copy_to(inputs[0], self.group), *inputs[1:]))
        return Applied(module)


@dataclass(frozen=True)
class TableOfSequence(ParallelStyle):
    """Keep only the rows of this member's tokens of a module that computes one row per token.

    Attributes:
        tokens: This member's part of the sequence.
    """

    tokens: Pieces

    def apply(self, name: str, module: nn.Module) -> Applied:
        module.register_forward_hook(lambda _, inputs, rows: self.tokens.take(rows, 0))
        return Applied(module)


def _parameters_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]
