"""From a model's layers to an actor's part of them, by the model's plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from raypar.actors.collective.autograd import Move, copy_to, gather_from, reduce_from, reduce_scatter
from raypar.actors.collective.group import Group
from raypar.actors.layers.attention import Attention
from raypar.actors.layers.dropout import divided
from raypar.actors.layers.linear import Fan
from raypar.actors.models.base import IGNORED, Kind, Model
from raypar.actors.models.parallel_plan import Change, Division, Made, named, rows_of
from raypar.actors.sharding import Cut, Portion
from raypar.actors.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from raypar.actors.tensor_parallel.linear import (
    ColumnParallelFan,
    ColumnParallelLinear,
    RowParallelLinear,
    SharedLinear,
    VocabParallelEmbedding,
    cut_of,
)
from raypar.actors.tensor_parallel.plan_guard import demand, mark
from raypar.actors.tensor_parallel.sequence import Entrance, Gathering


class TensorParallel(Division):
    """Divides layers over a group as Megatron does (Shoeybi et al. 2019): the same on every member outside of the
    attention and the MLP, inside each member has its heads and its columns.

    The model's plan says what becomes of which modules, in the order of application:

    vocab   an embedding, divided by ids
    enter   what the module is given, once for all that it does with it (Megatron's f)
    heads   attention over the heads that are here; heads of keys and values are divided, or else shared
    column  a linear layer, divided by outputs
    row     a linear layer, divided by inputs; its outputs are summed (Megatron's g)
    logits  a linear layer, divided by outputs, and the loss that follows
    drop    dropout of what is divided along the sequence
    table   a module that makes a row for every token: of what is divided along the sequence, the rows that are here
    copy    what a linear layer is given, once for those that are given the same one after the other
    gather  what is divided along the last dim is put together again on every member
    dropout of what is divided along the last dim
    shared  a module for what is divided, whole on every member; its gradients are summed

    With ``sequence`` what stands outside of attention and MLP is divided too, along the sequence, dim 1 of what goes
    through the layers (Korthikanti et al. 2022, section 4.2.2): as many bytes, and norms and dropout once.
    """

    def __init__(self, model: Model, group: Group, *, sequence: bool) -> None:
        super().__init__(model)
        self.group, self.sequence = group, sequence
        self.portion = Portion.at(group.rank, group.size)
        self.copy = Entrance(partial(copy_to, group=group))
        self.flow = {1: self.portion} if sequence else {}
        self.leave: Move = (
            partial(reduce_scatter, group=group, dim=1)
            if sequence
            else partial(reduce_from, group=group, in_place=True)
        )

    @property
    def changes(self) -> Mapping[Kind, Change]:
        return _CHANGES

    def divide(self, name: str, layer: nn.Module) -> Mapping[str, Cut]:
        """As every Division; what is whole here is given the tokens of this member only, if they are divided."""
        found = super().divide(name, layer)
        if self.sequence:
            whole = {f"{name}.{inner}" for inner, _ in layer.named_parameters() if inner not in found}
            self.partial |= dict.fromkeys(whole, (self.group,))
        self._look_out(name, layer)
        return found

    def _look_out(self, name: str, layer: nn.Module) -> None:
        """Let the modules of a divided layer tell of a plan that is wrong where no shape would."""
        for inner, module in layer.named_modules(prefix=name):
            if isinstance(module, RowParallelLinear):
                module.label = inner
            elif type(module) is nn.Dropout and module.p:
                what = "is dropout of what each actor of tp has a part of, and all would drop alike"
                demand(module, divided=False, otherwise=f"{inner} {what}: name it in the plan, as 'dropout'")
        for pattern, kind in self.model.tensor_plan:
            if kind in ("dropout", "shared"):
                for inner, module in named(layer, name, pattern):
                    path = f"{name}.{inner}".rstrip(".")
                    what = f"is {kind!r} in the plan, but what it is given is whole on every actor of tp"
                    demand(module, divided=True, otherwise=f"{path} {what}: leave it out of the plan")


def _enter(module: nn.Module, tensors: TensorParallel) -> Made:
    if isinstance(getattr(module, "fan", None), Fan):  # that is where it enters
        module.fan = ColumnParallelFan(tensors.group, 1 if tensors.sequence else None)
    elif tensors.sequence:
        Gathering(module, tensors.group, dim=1)
    else:
        module.register_forward_pre_hook(lambda _, inputs: (copy_to(inputs[0], tensors.group), *inputs[1:]))
    return Made(module)


def _vocab(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Embedding)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    return Made(VocabParallelEmbedding(module, cut, tensors.leave), {"weight": cut}, outputs={"": tensors.flow})


def _column(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    bias = {} if module.bias is None else {"bias": cut_of(tuple(module.bias.shape), 0, tensors.group)}
    return Made(ColumnParallelLinear(module, cut), {"weight": cut} | bias, outputs={"": {-1: rows_of(cut)}})


def _row(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 1, tensors.group)
    return Made(RowParallelLinear(module, cut, tensors.leave), {"weight": cut}, outputs={"": tensors.flow})


def _heads(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, Attention)
    group, width = tensors.group, module.width
    heads, kv_heads = module.q.out_features // width, module.k.out_features // width
    module.core.narrow(heads, {1: tensors.portion})
    made = {"q": _column(module.q, tensors)}
    if kv_heads % group.size == 0:
        made |= {"k": _column(module.k, tensors), "v": _column(module.v, tensors)}
    else:  # several members need the same head of keys and values
        head = group.rank * kv_heads // group.size
        span = head * width, (head + 1) * width
        made |= {"k": _shared(module.k, span, tensors), "v": _shared(module.v, span, tensors)}
    for name, one in made.items():
        setattr(module, name, one.module)
    cuts = {f"{name}.{inner}": cut for name, one in made.items() for inner, cut in one.cuts.items()}
    partial = {f"{name}.{inner}": over for name, one in made.items() for inner, over in one.partial.items()}
    return Made(module, cuts, partial, {name: one.outputs[""] for name, one in made.items() if one.outputs})


def _shared(whole: nn.Linear, span: tuple[int, int], tensors: TensorParallel) -> Made:
    module = SharedLinear(whole, span)
    return Made(module, partial={name: (tensors.group,) for name, _ in module.named_parameters()})


def _logits(module: nn.Module, tensors: TensorParallel) -> Made:
    made = _column(module, tensors)
    tensors.model.cross_entropy = partial(
        vocab_parallel_cross_entropy, cut=made.cuts["weight"], group=tensors.group, ignored=IGNORED
    )
    return made


def _drop(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Dropout)
    return Made(divided(module, {1: tensors.portion}) if tensors.sequence else module)


def _table(module: nn.Module, tensors: TensorParallel) -> Made:
    if tensors.sequence:
        module.register_forward_hook(lambda _, inputs, rows: cut_of(tuple(rows.shape), 0, tensors.group).take(rows))
    return Made(module)


def _copy(module: nn.Module, tensors: TensorParallel) -> Made:
    def copied(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        (x,) = (*inputs, *named.values())
        return (tensors.copy(x),), {}

    module.register_forward_pre_hook(copied, with_kwargs=True)
    return Made(module)


def _gather(module: nn.Module, tensors: TensorParallel) -> Made:
    def gathered(_: nn.Module, inputs: tuple[Any, ...], part: Tensor) -> Tensor:
        return mark(gather_from(part, tensors.group, part.dim() - 1), divided=False)

    module.register_forward_hook(gathered)
    return Made(module)


def _dropout(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Dropout)
    return Made(divided(module, {-1: tensors.portion}))


def _partial(module: nn.Module, tensors: TensorParallel) -> Made:
    return Made(module, partial={name: (tensors.group,) for name, _ in module.named_parameters()})


_CHANGES: Mapping[Kind, Change] = {
    "vocab": _vocab,
    "enter": _enter,
    "column": _column,
    "heads": _heads,
    "row": _row,
    "logits": _logits,
    "drop": _drop,
    "table": _table,
    "copy": _copy,
    "gather": _gather,
    "dropout": _dropout,
    "shared": _partial,
}
