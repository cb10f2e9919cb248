"""Tied weights: logical weights that several layers use, on one pipeline rank or on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from raypar.actors.models.base import Model


@dataclass(frozen=True)
class Tie:
    """A logical weight whose original and copy are on different ranks.

    Attributes:
        original, copy: Names of the two parameters.
        original_rank, copy_rank: The pipeline ranks that hold them.
    """

    original: str
    original_rank: int
    copy: str
    copy_rank: int


@dataclass(frozen=True)
class Ends:
    """The ranks that hold each end of a tied weight: the embedding and the head.

    Attributes:
        original, copy: Names of the two parameters.
        originals, copies: The members that hold them. All that hold one have the same gradient of it.
    """

    original: str
    originals: tuple[int, ...]
    copy: str
    copies: tuple[int, ...]

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The members that exchange gradients: one that holds the original, and one that holds the copy."""
        ends = {(one, self.reversed().original_for(index)) for index, one in enumerate(self.originals)}
        return ends | {(self.original_for(index), one) for index, one in enumerate(self.copies)}

    def reversed(self) -> Ends:
        """Return the tie with the copy as the original."""
        return Ends(self.copy, self.copies, self.original, self.originals)

    def original_for(self, index: int) -> int:
        """Return the member that sends the original's gradient, or the sum, to ``copies[index]``."""
        return self.originals[index % len(self.originals)]


def ties_of(model: Model, ranks: Mapping[int, int]) -> tuple[list[Tie], dict[str, str]]:
    """Sort a model's ties into those between pipeline ranks and those within one rank.

    A rank holds a tied weight once: as its original, or else as the first of its copies on that rank.

    Args:
        model: The model.
        ranks: The pipeline rank of each layer index.

    Returns:
        The ties between ranks; and for each copy that needs no memory of its own, the parameter on the same rank
        that it shares its memory with.
    """
    ties: list[Tie] = []
    same: dict[str, str] = {}
    first: dict[tuple[str, int], str] = {}
    for original, copy in model.ties:
        original_rank, copy_rank = ranks[_layer(model, original)], ranks[_layer(model, copy)]
        owner = original if original_rank == copy_rank else first.setdefault((original, copy_rank), copy)
        if owner == copy:
            ties.append(Tie(original, original_rank, copy, copy_rank))
        else:
            same[copy] = owner
    return ties, same


def tie_parameters(model: Model, modules: dict[int, nn.Module], same: dict[str, str]) -> None:
    """Make tied parameters on this rank one object.

    Args:
        model: The model.
        modules: This rank's layers by index. Ties with other ranks' layers are skipped.
        same: Copy -> owner, as ``ties_of`` returned it.
    """
    for copy, owner in same.items():
        target, source = _locate(model, modules, copy), _locate(model, modules, owner)
        if target is not None and source is not None:
            target[0]._parameters[target[1]] = source[0]._parameters[source[1]]


def _layer(model: Model, parameter: str) -> int:
    """Return the index of a parameter's layer: the layer with the longest name that is a prefix of the parameter's."""
    names = model.names
    return max((i for i, name in enumerate(names) if parameter.startswith(f"{name}.")), key=lambda i: len(names[i]))


def _locate(model: Model, modules: dict[int, nn.Module], parameter: str) -> tuple[nn.Module, str] | None:
    """Return the module that holds a parameter and the name there, or None if the layer is not in ``modules``."""
    index = _layer(model, parameter)
    if index not in modules:
        return None
    inner, _, name = parameter[len(model.names[index]) + 1 :].rpartition(".")
    return modules[index].get_submodule(inner), name
