"""Where a backward starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.actors.tensors import Values


class Tail:
    """The end of a graph. It keeps the graph, not the outputs: once sent, nobody needs their data."""

    def __init__(self, outputs: Values) -> None:
        self._gradients: list[Tensor] = []
        self._root: Tensor = _Root.apply(self._gradients, *outputs)  # type: ignore[no-untyped-call]

    def backward(self, gradients: Values) -> None:
        """Go back from the outputs, with one gradient for each, and add to the gradients of the leaves."""
        self._gradients += gradients
        if self._root.requires_grad:
            self._root.backward()

    def gradients(self, gradients: Values, of: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Go back from the outputs to these tensors; None for those that the outputs do not depend on."""
        self._gradients += gradients
        if not self._root.requires_grad or not of:
            return (None,) * len(of)
        return torch.autograd.grad(self._root, of, allow_unused=True)


class _Root(torch.autograd.Function):
    """A scalar behind all outputs, with the gradients that they are given.

    ``torch.autograd.backward`` takes gradients too, but imports sympy to look at their shapes: 2 s and 40 MiB.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients  # empty until the backward
        return outputs[0].new_empty(()) if outputs else torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
