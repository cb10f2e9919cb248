"""Start a backward at the outputs of a graph, without keeping the outputs' data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.actors.tensors import Values


class Tail:
    """The end of an autograd graph, from which a backward starts.

    It keeps the graph alive but not the outputs: their memory can be freed as soon as they were sent.

    Args:
        outputs: The floating outputs of the graph.
    """

    def __init__(self, outputs: Values) -> None:
        self._gradients: list[Tensor] = []
        self._root: Tensor = _Root.apply(self._gradients, *outputs)  # type: ignore[no-untyped-call]

    def backward(self, gradients: Values) -> None:
        """Run the backward and accumulate into the ``grad`` of the leaves.

        Args:
            gradients: One gradient for each output.
        """
        self._gradients += gradients
        if self._root.requires_grad:
            self._root.backward()

    def gradients(self, gradients: Values, of: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run the backward and return the gradients of some tensors, without accumulating.

        Args:
            gradients: One gradient for each output.
            of: The tensors to differentiate with respect to.

        Returns:
            The gradient of each tensor in ``of``, or None if no output depends on it.
        """
        self._gradients += gradients
        if not self._root.requires_grad or not of:
            return (None,) * len(of)
        return torch.autograd.grad(self._root, of, allow_unused=True)


class _Root(torch.autograd.Function):
    """A scalar that depends on all outputs, and whose backward gives them the gradients put into a list.

    ``torch.autograd.backward`` accepts gradients too, but imports sympy to check their shapes: 2 s and 40 MiB.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients  # the list is filled just before the backward
        return outputs[0].new_empty(()) if outputs else torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
