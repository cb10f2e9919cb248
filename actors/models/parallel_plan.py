"""What every way of dividing a model's layers has in common: the model's plan is gone through, module by module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from raypar.actors.collective.group import Groups
from raypar.actors.layers.dropout import Portions, narrowed
from raypar.actors.models.base import Kind, Model
from raypar.actors.sharding import Cut, Portion


class Made(NamedTuple):
    """What became of a module; by the names of its parameters what of them is here, and over which groups gradients are
    partial.

    outputs  what of its own output ("") and of those of modules in it is here, by dim, as far as somebody may compare
    """

    module: nn.Module
    cuts: Mapping[str, Cut] = {}
    partial: Mapping[str, Groups] = {}
    outputs: Mapping[str, Portions] = {}


Change = Callable[[nn.Module, Any], Made]  # of a module, by a Division


class Division(ABC):
    """Divides the layers of a model over groups.

    cuts     what of each parameter is here, by logical name; not there: all of it
    partial  the parameters that are here as on every member of these groups, but whose gradients are of this member's
             own part
    flow     what is here of the values between layers, by dim; of others all is
    outputs  what is here of the outputs of layers, and of modules in them that say so, by logical name
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cuts: dict[str, Cut] = {}
        self.partial: dict[str, Groups] = {}
        self.flow: Portions = {}
        self.outputs: dict[str, Portions] = {}

    @property
    @abstractmethod
    def changes(self) -> Mapping[Kind, Change]:
        """What becomes of a module of each kind that the plan knows; of others nothing does."""

    def divide(self, name: str, layer: nn.Module) -> Mapping[str, Cut]:
        """Divide a layer in place, before it has weights; the cuts by names in the layer."""
        found: dict[str, Cut] = {}
        self.outputs[name] = self.flow
        for pattern, kind in self.model.tensor_plan:
            if (change := self.changes.get(kind)) is None:
                continue
            for inner, module in named(layer, name, pattern):
                made = change(module, self)
                _become(module, made.module)
                found |= {f"{inner}.{parameter}": cut for parameter, cut in made.cuts.items()}
                self.partial |= {f"{name}.{inner}.{parameter}": over for parameter, over in made.partial.items()}
                self.outputs |= {f"{name}.{inner}.{own}".rstrip("."): output for own, output in made.outputs.items()}
                if kind == "logits":  # the layer ends in them
                    self.outputs[name] = made.outputs[""]
        self.cuts |= {f"{name}.{inner}": cut for inner, cut in found.items()}
        return found


def outputs_of(divisions: Sequence[Division]) -> Mapping[str, Portions]:
    """What is here of the outputs of modules, by logical name, when layers are divided in all these ways, one after the
    other; a division that does not say it of a module leaves it as it is between layers."""
    names = dict.fromkeys(name for division in divisions for name in division.outputs)
    found: dict[str, Portions] = {name: {} for name in names}
    for division in divisions:
        found = {name: narrowed(before, division.outputs.get(name, division.flow)) for name, before in found.items()}
    return found


def divide(divisions: Sequence[Division], name: str, layer: nn.Module) -> Mapping[str, Cut]:
    """Divide a layer in all these ways, one after the other, in place; the cuts by names in the layer."""
    return {inner: cut for division in divisions for inner, cut in division.divide(name, layer).items()}


def rows_of(cut: Cut) -> Portion:
    """What is here of dim 0, row by row: parts need not be of one length."""
    first = cut.offset[0]
    return Portion(cut.whole[0], tuple(range(first, first + cut.shape[0])))


def named(layer: nn.Module, name: str, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules of a layer that a pattern names: each once, by its first name, whichever of its names fits."""
    every = layer.named_modules(prefix=name, remove_duplicate=False)
    fits = {id(module) for path, module in every if _matches(path, pattern)}
    return [(inner, module) for inner, module in layer.named_modules() if id(module) in fits]


def _matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern, part by part: ``*`` is one part, ``[qkv]`` one of three letters."""
    pair = name.split("."), pattern.split(".")
    return len(pair[0]) == len(pair[1]) and all(map(fnmatchcase, *pair))


def _become(module: nn.Module, made: nn.Module) -> None:
    """Turn a module into what was made of it, in place: whoever else refers to it has it, too. What is of no concern to
    the division stays: hooks, to which those of ``made`` are added, buffers, attributes of the user's."""
    if module is not made:
        module.__class__ = made.__class__
        common = vars(nn.Module()).keys() - {"_parameters"}
        vars(module).update({name: value for name, value in vars(made).items() if name not in common})
        for name in common:
            if "_hooks" in name:
                vars(module)[name].update(vars(made)[name])
