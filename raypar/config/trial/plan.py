"""Try the user's own layers with the shapes that a plan of tensor parallelism leaves an actor. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.errors import first_line
from raypar.actors.models.module_tree import modules_named
from raypar.actors.models.own.plan_kinds import PASSING, kind_of
from raypar.actors.models.placed_step import FEATURES
from raypar.actors.models.skip_connections import Skipped, Skips
from raypar.actors.sharding import Pieces
from raypar.actors.tensors import Values, as_values


class _Divided:
    """The shapes on the first actor of the outputs of a plan's modules, while layers are called on the meta device.

    Attributes:
        last: The last module that was called and left its outputs split by features, with its name, its kind and the
            number of features; None if they are whole again.
    """

    def __init__(self, ways: int) -> None:
        self._ways, self._own = ways, Pieces.at(0, ways)
        self.last: tuple[nn.Module, str, str, int] | None = None

    def part(self, name: str, text: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the actor's part of the features that a module outputs."""
        self.last = module, name, text, output.shape[-1]
        return self._own.take(output, -1)

    def whole(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Return the whole inputs of a module that gets a part of them."""
        value, *others = inputs
        width = module.in_features if isinstance(module, nn.Linear) else self.last[-1] if self.last else 0
        if value.shape[-1] == self._own.span(width)[1]:
            value, self.last = value.new_empty(*value.shape[:-1], width), None
        return (value, *others)

    def fault(self, why: str) -> str:
        """Return the fault: which layer leaves its outputs divided, why that does not fit, and the fix."""
        assert self.last is not None
        module, name, text, width = self.last
        held = f"{self._own.span(width)[1]} of its {width} outputs"
        fix = "leave it out of the plan"
        if width % self._ways == 0:
            fix = "this one 'column_gather_output'"
        elif isinstance(module, nn.Linear) and module.in_features % self._ways == 0:
            fix = "this one 'row_split_input'"
        fix = f"make the linear layer that takes them 'row' in the plan, or {fix}"
        return f"model.plan: {name} is {text!r}, so with mesh.tp {self._ways} an actor makes {held}, {why}: {fix}"


def plan_misfits(
    plan: Mapping[str, str], layers: Mapping[str, nn.Module], ways: int, values: Values, skips: Skips = ()
) -> list[str]:
    """Return why the layers, which take the values whole, can't take what a plan leaves an actor; at most one fault.

    Args:
        plan: The kind for each name pattern, checked.
        layers: The model's layers by logical name, without memory, which nothing else uses.
        ways: Number of tensor-parallel ranks.
        values: The first batch's inputs, without memory.
        skips: Pairs of layers, of which the second one takes what the first one returns, too.
    """
    divided = _Divided(ways)
    for layer, module in layers.items():
        for pattern, text in plan.items():
            kind = kind_of(text)
            if kind is None or kind.name in PASSING:
                continue
            for inner, part in modules_named(module, layer, pattern):
                if kind.given == FEATURES:
                    part.register_forward_pre_hook(divided.whole)
                if kind.made == FEATURES:
                    part.register_forward_hook(partial(divided.part, f"{layer}.{inner}".rstrip("."), text))
    skipped = Skipped(skips, tuple(layers))
    with torch.no_grad():
        for index, (layer, module) in enumerate(layers.items()):
            try:
                values = as_values(module(*skipped.inputs(index, values)))
                skipped.keep(index, values)
            except Exception as error:
                return (
                    [] if divided.last is None else [divided.fault(f"which {layer} can't take ({first_line(error)})")]
                )
    return [] if divided.last is None else [divided.fault("and the loss needs all")]
