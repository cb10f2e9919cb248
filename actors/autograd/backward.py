"""Start a backward at the outputs of a graph, without keeping the outputs' data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.later_half import LaterHalf
from raypar.actors.tensors import Values


class GraphEnd:
    """The end of an autograd graph, from which a backward starts.

    It keeps the graph alive but not the outputs: their memory can be freed as soon as they are sent. A backward can be
    run once, by one of the methods.

    Args:
        outputs: The outputs of the graph, of any shapes and floating dtypes.
    """

    def __init__(self, outputs: Values) -> None:
        self._gradients: list[Tensor] = []
        self._root: Tensor = _Root.apply(self._gradients, *outputs)  # type: ignore[no-untyped-call]

    def backward(self, gradients: Values) -> None:
        """Run the backward and accumulate into the ``grad`` of the leaves.

        Args:
            gradients: One gradient for each output, of its shape and dtype.
        """
        self._gradients += gradients
        if self._root.requires_grad:
            self._root.backward()

    def backward_input(self, gradients: Values, later: Collection[Tensor]) -> LaterHalf | None:
        """Run the backward, and defer the gradients of some parameters, as far as possible.

        Args:
            gradients: One gradient for each output, of its shape and dtype.
            later: The parameters.

        Returns:
            The deferred gradients; None if there is no graph.
        """
        self._gradients += gradients
        return LaterHalf(self._root, later) if self._root.requires_grad else None

    def gradients(self, gradients: Values, of: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run the backward and return the gradients of some tensors, without accumulating.

        Args:
            gradients: One gradient for each output, of its shape and dtype.
            of: The tensors to differentiate with respect to.

        Returns:
            The gradient of each tensor in ``of``, or None if no output depends on it.
        """
        self._gradients += gradients
        if not self._root.requires_grad or not of:
            return (None,) * len(of)
        return torch.autograd.grad(self._root, of, allow_unused=True)


class _Root(torch.autograd.Function):
    """A scalar that depends on all outputs. Its backward returns the gradients in a list.

    ``torch.autograd.backward`` accepts gradients too, but imports sympy (the cost: autograd/torch_private.py).
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        """Return the scalar, whose value is arbitrary. ``gradients`` is a list that is still empty."""
        ctx.gradients = gradients  # the list is filled just before the backward
        return outputs[0].new_empty(()) if outputs else torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the list; the scalar's own gradient is ignored."""
        return None, *ctx.gradients
