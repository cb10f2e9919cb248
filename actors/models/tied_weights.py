"""Tied weights: logical weights that stand in more than one layer, on one rank or on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from raypar.actors.models.base import Model


@dataclass(frozen=True)
class Tie:
    """A logical weight with a home and a copy, and the ranks of the Updater's group that hold them."""

    home: str
    home_rank: int
    copy: str
    copy_rank: int


def ties_of(model: Model, homes: Mapping[int, int]) -> tuple[list[Tie], dict[str, str]]:
    """The ties between pipeline ranks, and on one rank which parameter is the same as which.

    ``homes`` is the pipeline rank of each layer.
    A rank holds a tied weight once: as its home, or else as the first of its copies there.
    """
    ties: list[Tie] = []
    same: dict[str, str] = {}
    first: dict[tuple[str, int], str] = {}
    for home, copy in model.ties:
        home_rank, copy_rank = homes[_layer(model, home)], homes[_layer(model, copy)]
        owner = home if home_rank == copy_rank else first.setdefault((home, copy_rank), copy)
        if owner == copy:
            ties.append(Tie(home, home_rank, copy, copy_rank))
        else:
            same[copy] = owner
    return ties, same


def share(model: Model, modules: dict[int, nn.Module], same: dict[str, str]) -> None:
    """Make the parameters that are the same one object, where they are among ``modules``."""
    for copy, owner in same.items():
        target, source = _locate(model, modules, copy), _locate(model, modules, owner)
        if target is not None and source is not None:
            target[0]._parameters[target[1]] = source[0]._parameters[source[1]]


def _layer(model: Model, parameter: str) -> int:
    """The layer of a parameter, by the longest layer name that begins its own."""
    return max(
        (i for i, name in enumerate(model.names) if parameter.startswith(name + ".")), key=lambda i: len(model.names[i])
    )


def _locate(model: Model, modules: dict[int, nn.Module], parameter: str) -> tuple[nn.Module, str] | None:
    index = _layer(model, parameter)
    if index not in modules:
        return None
    inner, _, name = parameter[len(model.names[index]) + 1 :].rpartition(".")
    return modules[index].get_submodule(inner), name
