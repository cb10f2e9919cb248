"""From a model's layers to an actor's part of them, by the model's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from torch import nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group
from raypar.actors.layers.cross_entropy import vocab_parallel_cross_entropy
from raypar.actors.layers.dropout import DividedDropout
from raypar.actors.layers.ops import Move, all_gather, copy_to, reduce_from, reduce_scatter
from raypar.actors.layers.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedLinear,
    VocabParallelEmbedding,
    cut_of,
)
from raypar.actors.models.attention import Attention
from raypar.actors.models.model import IGNORED, Kind, Model


class Made(NamedTuple):
    """What became of a module; by the names of its parameters what of them is here, and whose gradients are partial."""

    module: nn.Module
    cuts: Mapping[str, Cut] = {}
    partial: Set[str] = frozenset()


Change = Callable[[nn.Module, "TensorParallel"], Made]


class TensorParallel:
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

    With ``sequence`` what stands outside of attention and MLP is divided too, along the sequence, dim 1 of what goes
    through the layers (Korthikanti et al. 2022, section 4.2.2): as many bytes, and norms and dropout once.

    cuts     what of each parameter is here, by logical name; not there: all of it
    partial  the parameters that are here as on every member, but whose gradients are of this member's own part
    """

    def __init__(self, model: Model, group: Group, *, sequence: bool) -> None:
        self.model, self.group, self.sequence = model, group, sequence
        self.enter: Move = partial(all_gather, group=group, dim=1) if sequence else partial(copy_to, group=group)
        self.leave: Move = (
            partial(reduce_scatter, group=group, dim=1) if sequence else partial(reduce_from, group=group)
        )
        self.cuts: dict[str, Cut] = {}
        self.partial: set[str] = set()

    def divide(self, name: str, layer: nn.Module) -> Mapping[str, Cut]:
        """Divide a layer in place, before it has weights; the cuts by names in the layer."""
        found: dict[str, Cut] = {}
        for pattern, kind in self.model.tensor_plan:
            inside = [inner for inner, _ in layer.named_modules() if _matches(f"{name}.{inner}", pattern)]
            for inner in inside:
                made = _CHANGES[kind](layer.get_submodule(inner), self)
                _put(layer, inner, made.module)
                found |= {f"{inner}.{parameter}": cut for parameter, cut in made.cuts.items()}
                self.partial |= {f"{name}.{inner}.{parameter}" for parameter in made.partial}
        self.cuts |= {f"{name}.{inner}": cut for inner, cut in found.items()}
        if self.sequence:
            self.partial |= {f"{name}.{inner}" for inner, _ in layer.named_parameters() if inner not in found}
        return found


def _enter(module: nn.Module, tensors: TensorParallel) -> Made:
    module.register_forward_pre_hook(lambda _, inputs: (tensors.enter(inputs[0]), *inputs[1:]))
    return Made(module)


def _vocab(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Embedding)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    return Made(VocabParallelEmbedding(module, cut, tensors.leave), {"weight": cut})


def _column(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    bias = {} if module.bias is None else {"bias": cut_of(tuple(module.bias.shape), 0, tensors.group)}
    return Made(ColumnParallelLinear(module, cut), {"weight": cut} | bias)


def _row(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 1, tensors.group)
    return Made(RowParallelLinear(module, cut, tensors.leave), {"weight": cut})


def _heads(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, Attention)
    core, group, width = module.core, tensors.group, module.width
    heads, kv_heads = module.q.out_features // width, module.k.out_features // width
    if core.alibi is not None:
        start = group.rank * heads // group.size
        core.alibi = core.alibi.part(start, start + heads // group.size)
    if core.drop.p:
        core.drop, core.kind = DividedDropout(core.drop.p, group, dim=1), "materialised"
    made = {"q": _column(module.q, tensors)}
    if kv_heads % group.size == 0:
        made |= {"k": _column(module.k, tensors), "v": _column(module.v, tensors)}
    else:  # several members need the same head of keys and values
        head = group.rank * kv_heads // group.size
        span = head * width, (head + 1) * width
        made |= {"k": _shared(module.k, span), "v": _shared(module.v, span)}
    for name, one in made.items():
        setattr(module, name, one.module)
    cuts = {f"{name}.{inner}": cut for name, one in made.items() for inner, cut in one.cuts.items()}
    return Made(module, cuts, {f"{name}.{inner}" for name, one in made.items() for inner in one.partial})


def _shared(whole: nn.Linear, span: tuple[int, int]) -> Made:
    module = SharedLinear(whole, span)
    return Made(module, partial={name for name, _ in module.named_parameters()})


def _logits(module: nn.Module, tensors: TensorParallel) -> Made:
    made = _column(module, tensors)
    tensors.model.cross_entropy = partial(
        vocab_parallel_cross_entropy, cut=made.cuts["weight"], group=tensors.group, ignored=IGNORED
    )
    return made


def _drop(module: nn.Module, tensors: TensorParallel) -> Made:
    assert isinstance(module, nn.Dropout)
    return Made(DividedDropout(module.p, tensors.group, dim=1) if tensors.sequence else module)


def _table(module: nn.Module, tensors: TensorParallel) -> Made:
    if tensors.sequence:
        module.register_forward_hook(lambda _, inputs, rows: cut_of(tuple(rows.shape), 0, tensors.group).take(rows))
    return Made(module)


_CHANGES: Mapping[Kind, Change] = {
    "vocab": _vocab,
    "enter": _enter,
    "column": _column,
    "heads": _heads,
    "row": _row,
    "logits": _logits,
    "drop": _drop,
    "table": _table,
}


def _matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern, part by part: ``*`` is one part."""
    pair = name.split("."), pattern.split(".")
    return len(pair[0]) == len(pair[1]) and all(map(fnmatchcase, *pair))


def _put(layer: nn.Module, inner: str, made: nn.Module) -> None:
    outer, _, last = inner.rpartition(".")
    setattr(layer.get_submodule(outer), last, made)
