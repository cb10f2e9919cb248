"""From a model's layers to an actor's part of them, by the model's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group
from raypar.actors.layers.attention import DividedAttention
from raypar.actors.layers.cross_entropy import vocab_parallel_cross_entropy
from raypar.actors.layers.dropout import DividedDropout
from raypar.actors.layers.ops import Move, all_gather, copy_to, reduce_from, reduce_scatter
from raypar.actors.layers.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, cut_of
from raypar.actors.models.gpt import AttentionCore
from raypar.actors.models.model import IGNORED, Kind, Model

Change = Callable[[nn.Module, "TensorParallel"], tuple[nn.Module, Mapping[str, Cut]]]


class TensorParallel:
    """Divides layers over a group as Megatron does (Shoeybi et al. 2019): the same on every member outside of the
    attention and the MLP, inside each member has its heads and its columns.

    The model's plan says what becomes of which modules, in the order of application:

    vocab   an embedding, divided by ids
    enter   what the module is given, once for all that it does with it (Megatron's f)
    column  a linear layer, divided by outputs
    heads   attention over the heads that are here
    row     a linear layer, divided by inputs; its outputs are summed (Megatron's g)
    logits  a linear layer, divided by outputs, and the loss that follows
    drop    dropout of what is divided along the sequence
    table   a module that makes a row for every token: of what is divided along the sequence, the rows that are here

    With ``sequence`` what stands outside of attention and MLP is divided too, along the sequence, dim 1 of what goes
    through the layers (Korthikanti et al. 2022, section 4.2.2): as many bytes, and norms and dropout once. What is
    then the same on every member has gradients of its own tokens only: see Divided.

    cuts    what of each parameter is here, by logical name; not there: all of it
    """

    def __init__(self, model: Model, group: Group, *, sequence: bool) -> None:
        self.model, self.group, self.sequence = model, group, sequence
        self.enter: Move = partial(all_gather, group=group, dim=1) if sequence else partial(copy_to, group=group)
        self.leave: Move = (
            partial(reduce_scatter, group=group, dim=1) if sequence else partial(reduce_from, group=group)
        )
        self.cuts: dict[str, Cut] = {}

    def divide(self, name: str, layer: nn.Module) -> Mapping[str, Cut]:
        """Divide a layer in place, before it has weights; the cuts by names in the layer."""
        found: dict[str, Cut] = {}
        for pattern, kind in self.model.tensor_plan:
            inside = [inner for inner, _ in layer.named_modules() if fnmatchcase(f"{name}.{inner}", pattern)]
            for inner in inside:
                made, cuts = _CHANGES[kind](layer.get_submodule(inner), self)
                _put(layer, inner, made)
                found |= {f"{inner}.{parameter}": cut for parameter, cut in cuts.items()}
        self.cuts |= {f"{name}.{inner}": cut for inner, cut in found.items()}
        return found


def _enter(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    module.register_forward_pre_hook(lambda _, inputs: (tensors.enter(inputs[0]), *inputs[1:]))
    return module, {}


def _vocab(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    assert isinstance(module, nn.Embedding)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    return VocabParallelEmbedding(module, cut, tensors.leave), {"weight": cut}


def _column(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 0, tensors.group)
    bias = {} if module.bias is None else {"bias": cut_of(tuple(module.bias.shape), 0, tensors.group)}
    return ColumnParallelLinear(module, cut), {"weight": cut} | bias


def _row(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    assert isinstance(module, nn.Linear)
    cut = cut_of(tuple(module.weight.shape), 1, tensors.group)
    return RowParallelLinear(module, cut, tensors.leave), {"weight": cut}


def _heads(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    assert isinstance(module, AttentionCore)
    return DividedAttention(module.dropout, tensors.group), {}


def _logits(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    made, cuts = _column(module, tensors)
    tensors.model.cross_entropy = partial(
        vocab_parallel_cross_entropy, cut=cuts["weight"], group=tensors.group, ignored=IGNORED
    )
    return made, cuts


def _drop(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    assert isinstance(module, nn.Dropout)
    return (DividedDropout(module.p, tensors.group, dim=1) if tensors.sequence else module), {}


def _table(module: nn.Module, tensors: TensorParallel) -> tuple[nn.Module, Mapping[str, Cut]]:
    if tensors.sequence:
        module.register_forward_hook(lambda _, inputs, rows: cut_of(tuple(rows.shape), 0, tensors.group).take(rows))
    return module, {}


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


def _put(layer: nn.Module, inner: str, made: nn.Module) -> None:
    outer, _, last = inner.rpartition(".")
    setattr(layer.get_submodule(outer), last, made)
