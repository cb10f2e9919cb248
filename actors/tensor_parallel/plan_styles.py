"""Styles of a user's plan for inputs and outputs of sharded modules, and for replicated modules between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from raypar.actors.collective.autograd import copy_to, gather_from
from raypar.actors.collective.group import Group
from raypar.actors.collective.redistribution import redistribute
from raypar.actors.models.base import Kind
from raypar.actors.models.parallel_style import Applied, ParallelStyle, ShardedDropout
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.tensor_parallel.plan_guard import demand, mark
from raypar.actors.tensor_parallel.sequence import SharedCopy


def plan_styles(group: Group) -> dict[Kind, ParallelStyle]:
    """Return the styles that only a user's plan has, over a group.

    Args:
        group: The tensor-parallel group.
    """
    gathered, split = (SharedCopy(partial(move, group=group)) for move in (_gathered_input, _split_input))
    return {
        "copy": SharedInput(SharedCopy(partial(copy_to, group=group))),
        "gather": GatheredOutput(group),
        "gather_input": RedistributedInput(gathered, "column_gather_input", divided=True),
        "split_input": RedistributedInput(split, "row_split_input", divided=False),
        "dropout": DropoutOfColumns(Sharding({-1: Pieces.at(group.rank, group.size)})),
        "shared": PartialGradients(group),
    }


@dataclass(frozen=True)
class SharedInput(ParallelStyle):
    """Copy or redistribute the input of a module over the members, once for all modules with the same input.

    Attributes:
        copy: Copies the input; its backward sums or redistributes the gradient.
    """

    copy: SharedCopy

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Register a hook that copies the input."""

        def entered(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Tensor], dict[str, Any]]:
            (x,) = (*inputs, *named.values())
            return (self.copy(x),), {}

        module.register_forward_pre_hook(entered, with_kwargs=True)
        return Applied(module)


@dataclass(frozen=True)
class RedistributedInput(ParallelStyle):
    """Redistribute the input of a linear layer along its last dim, between layers that are sharded differently.

    Attributes:
        copy: Redistributes the input, once for all layers with the same input.
        kind: The kind in a plan.
        divided: Whether the input is a part of the features; else it is whole.
    """

    copy: SharedCopy
    kind: str
    divided: bool

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Register a hook that redistributes the input."""
        found, fix = ("a part of the features", "row") if not self.divided else ("whole on every actor of tp", "column")
        what = f"{name} is {self.kind!r} in the plan, but its input is {found} already: use {fix!r}"
        demand(module, divided=self.divided, otherwise=what)
        return SharedInput(self.copy).apply(name, module)


def _gathered_input(x: Tensor, group: Group) -> Tensor:
    """Gather the features of a tensor, for members that use them differently."""
    return mark(redistribute(x, [group], [f"S{x.dim() - 1}"], ["R"], gradient=["P"]), divided=False)


def _split_input(x: Tensor, group: Group) -> Tensor:
    """Return this member's features of a whole tensor."""
    return mark(redistribute(x, [group], ["R"], [f"S{x.dim() - 1}"]), divided=True)


@dataclass(frozen=True)
class GatheredOutput(ParallelStyle):
    """Gather a module's output along its last dim, so that every member has all of it."""

    group: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        def gathered(_: nn.Module, inputs: tuple[Any, ...], part: Tensor) -> Tensor:
            return mark(gather_from(part, self.group, part.dim() - 1), divided=False)

        module.register_forward_hook(gathered, prepend=True)  # the user's own hooks see the whole output
        return Applied(module, outputs={"": Sharding()})


@dataclass(frozen=True)
class DropoutOfColumns(ShardedDropout):
    """Apply dropout, in a user's plan, to a tensor that is sharded along its last dim."""

    def apply(self, name: str, module: nn.Module) -> Applied:
        applied = super().apply(name, module)
        _demand_sharded(name, "dropout", applied.module)
        return applied


@dataclass(frozen=True)
class PartialGradients(ParallelStyle):
    """Keep a module of a user's plan whole although its input is sharded.

    Each member's gradients of its parameters are partial.
    """

    group: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        _demand_sharded(name, "shared", module)
        whole = [inner for inner, _ in module.named_parameters()]
        return Applied(module, partial=dict.fromkeys(whole, (self.group,)))


def _demand_sharded(name: str, kind: str, module: nn.Module) -> None:
    what = f"is {kind!r} in the plan, but its input is whole on every actor of tp"
    demand(module, divided=True, otherwise=f"{name} {what}: leave it out of the plan")


def demand_whole_dropouts(name: str, layer: nn.Module) -> None:
    """Make the dropouts that no style replaced raise ValueError if their input is sharded."""
    for path, module in layer.named_modules(prefix=name):
        if type(module) is nn.Dropout and module.p:
            what = "is a dropout whose input is divided over tp, and every actor would use the same mask"
            demand(module, divided=False, otherwise=f"{path} {what}: name it in the plan, as 'dropout'")
