"""Try the user's own layers with the shapes that a plan of tensor parallelism leaves an actor. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.errors import first_line
from raypar.actors.models.module_tree import modules_named
from raypar.actors.models.skips import Skipped, Skips
from raypar.actors.tensors import Values, as_values

_FIX = "make the linear layer that takes them 'row' in the plan, or this one 'column_gather_output'"


class _Divided:
    """What the linear layers of a plan make on one actor, while layers are called with tensors that have only shapes.

    Attributes:
        column: The last layer that was called and left its outputs divided; None if they are whole again.
    """

    def __init__(self, ways: int) -> None:
        self._ways = ways
        self.column: tuple[str, nn.Linear] | None = None

    def part(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the outputs that an actor makes of those of a column layer."""
        assert isinstance(module, nn.Linear)
        self.column = name, module
        return output.narrow(-1, 0, module.out_features // self._ways)

    def whole(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Return inputs of a row layer as all actors have them together."""
        assert isinstance(module, nn.Linear)
        value, *others = inputs
        if value.shape[-1] == module.in_features // self._ways:
            value, self.column = value.new_empty(*value.shape[:-1], module.in_features), None
        return (value, *others)

    def told(self, why: str) -> str:
        """Say which layer leaves its outputs divided, what becomes of that, and the fix."""
        assert self.column is not None
        name, module = self.column
        held = f"{module.out_features // self._ways} of its {module.out_features} outputs"
        return f"model.plan: {name} is 'column', so with mesh.tp {self._ways} an actor makes {held}, {why}: {_FIX}"


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
        for pattern, kind in plan.items():
            for inner, linear in modules_named(module, layer, pattern):
                name = f"{layer}.{inner}" if inner else layer
                if isinstance(linear, nn.Linear) and kind == "column" and not linear.out_features % ways:
                    linear.register_forward_hook(partial(divided.part, name))
                elif isinstance(linear, nn.Linear) and kind == "row":
                    linear.register_forward_pre_hook(divided.whole)
    skipped = Skipped(skips, tuple(layers))
    with torch.no_grad():
        for index, (layer, module) in enumerate(layers.items()):
            try:
                values = as_values(module(*skipped.inputs(index, values)))
                skipped.keep(index, values)
            except Exception as error:
                return (
                    [] if divided.column is None else [divided.told(f"which {layer} can't take ({first_line(error)})")]
                )
    return [] if divided.column is None else [divided.told("and the loss needs all")]
