"""What dividing a model's layers over a grid of members has in common, whichever grid it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.collective.autograd import reduce_from
from raypar.actors.collective.group import Group, Groups
from raypar.actors.layers.attention import Attention
from raypar.actors.layers.dropout import Portions, divided
from raypar.actors.layers.positions import Learned, Sinusoidal
from raypar.actors.models.base import IGNORED, Kind, Model
from raypar.actors.models.parallel_plan import Change, Division, Made, rows_of
from raypar.actors.sharding import Cut, Portion, share_of
from raypar.actors.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from raypar.actors.tensor_parallel.grid.norm import DividedNorm


class Spread(NamedTuple):
    """How (B, S, features) is divided: the batch over lines of the grid one within the other, features over one."""

    batch: Groups
    features: Group


class GridParallel(Division):
    """Divides layers over a grid: every matrix by rows and columns, every activation by the batch and by features.

    No member has more than its part of anything: norms look at parts of vectors, too. What a line of the grid does not
    divide is the same along it, but its gradient is of each member's own tokens.

    The model's plan says what becomes of which modules:

    vocab   an embedding, divided by ids and by hidden
    table   a module that makes a row for every token: of each the part that is here
    norm    a norm of vectors of which parts are here
    enter   what the module is given, once for all that it does with it
    heads   attention over the heads that are here
    column  a linear layer from hidden to what the inside divides: heads, columns, vocabulary
    row     a linear layer back
    logits  a ``column``, and the loss that follows
    drop    dropout of a part

    lines    of the grid that this member is on
    outside  how what goes through the layers is divided
    inside   likewise within attention, MLP and loss
    """

    def __init__(self, model: Model, lines: Groups, outside: Spread, inside: Spread) -> None:
        super().__init__(model)
        self.lines, self.outside, self.inside = lines, outside, inside
        self.flow = {0: portion_of(outside.batch), 2: portion_of((outside.features,))}

    @property
    def changes(self) -> Mapping[Kind, Change]:
        return _CHANGES

    @abstractmethod
    def embedding(self, module: nn.Embedding) -> Made:
        """Ids (B, S) of a whole microbatch -> embeddings, divided as outside."""

    @abstractmethod
    def linear(self, module: nn.Linear, inputs: Spread, outputs: Spread) -> Made:
        """From what is divided one way to what is divided the other."""

    def enter(self, module: nn.Module) -> None:
        """Let a module that begins with ``column`` layers gather what they need, once."""

    def cut(self, shape: tuple[int, ...], over: Mapping[int, Groups]) -> Cut:
        """What is here of a tensor whose dims are divided over lines, one within the other."""
        spans = {}
        for dim, lines in over.items():
            index, count = 0, 1
            for line in lines:
                index, count = index * line.size + line.rank, count * line.size
            spans[dim] = share_of(shape[dim], index, count)
        return Cut(shape, spans)

    def alike(self, *over: Group) -> Groups:
        """The lines along which all members have the same part of what is divided over these."""
        return tuple(line for line in self.lines if line not in over)


def portion_of(lines: Groups) -> Portion:
    """What is here of a dim that is divided over lines, one within the other."""
    portion = Portion()
    for line in lines:
        portion = portion.then(Portion.at(line.rank, line.size))
    return portion


def _vocab(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, nn.Embedding)
    return grid.embedding(module)._replace(outputs={"": grid.flow})


def _table(module: nn.Module, grid: GridParallel) -> Made:
    if isinstance(module, Sinusoidal):
        portion = portion_of((grid.outside.features,))
        module.register_forward_hook(lambda _, inputs, rows: portion.take(rows, 1))
    if not isinstance(module, Learned):
        return Made(module)
    line = grid.outside.features
    cut = grid.cut(tuple(module.weight.shape), {1: (line,)})
    module.weight = nn.Parameter(torch.empty(cut.shape, dtype=module.weight.dtype))
    return Made(module, {"weight": cut}, {"weight": grid.alike(line)})


def _norm(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    line = grid.outside.features
    cut = grid.cut(tuple(module.weight.shape), {0: (line,)})
    made = DividedNorm(module, cut, line)
    names = [name for name, _ in made.named_parameters()]
    return Made(made, dict.fromkeys(names, cut), dict.fromkeys(names, grid.alike(line)))


def _enter(module: nn.Module, grid: GridParallel) -> Made:
    grid.enter(module)
    return Made(module)


def _heads(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, Attention)
    batch, heads = portion_of(grid.inside.batch), portion_of((grid.inside.features,))
    module.core.narrow(module.q.out_features // module.width, {0: batch, 1: heads})
    cuts, partial, outputs = dict[str, Cut](), dict[str, Groups](), dict[str, Portions]()
    for name in ("q", "k", "v"):
        made = _column(module.get_submodule(name), grid)
        setattr(module, name, made.module)
        cuts |= {f"{name}.{inner}": cut for inner, cut in made.cuts.items()}
        partial |= {f"{name}.{inner}": over for inner, over in made.partial.items()}
        outputs[name] = made.outputs[""]
    return Made(module, cuts, partial, outputs)


def _column(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, nn.Linear)
    made = grid.linear(module, grid.outside, grid.inside)
    features = grid.cut((module.out_features,), {0: (grid.inside.features,)})
    return made._replace(outputs={"": {0: portion_of(grid.inside.batch), -1: rows_of(features)}})


def _row(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, nn.Linear)
    return grid.linear(module, grid.inside, grid.outside)._replace(outputs={"": grid.flow})


def _logits(module: nn.Module, grid: GridParallel) -> Made:
    made, (lines, vocab) = _column(module, grid), grid.inside
    batch, cut = portion_of(lines), grid.cut((made.cuts["weight"].whole[0],), {0: (vocab,)})

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        total = vocab_parallel_cross_entropy(logits, batch.take(labels, 0), cut, vocab, IGNORED)
        for line in lines:
            total = reduce_from(total, line)
        return total

    grid.model.cross_entropy = cross_entropy
    return made


def _drop(module: nn.Module, grid: GridParallel) -> Made:
    assert isinstance(module, nn.Dropout)
    batch, features = portion_of(grid.outside.batch), portion_of((grid.outside.features,))
    return Made(divided(module, {0: batch, 2: features}))


_CHANGES: Mapping[Kind, Change] = {
    "vocab": _vocab,
    "table": _table,
    "norm": _norm,
    "enter": _enter,
    "heads": _heads,
    "column": _column,
    "row": _row,
    "logits": _logits,
    "drop": _drop,
}
