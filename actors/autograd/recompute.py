"""Activation recomputation: the forward saves only its inputs, and the backward runs the forward again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Selective recomputation is that of
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.autograd.backward import GraphEnd
from raypar.actors.autograd.forward_state import ForwardState, FrozenWrites, Then
from raypar.actors.autograd.torch_private import num_writes
from raypar.actors.tensors import Values, as_values

Function = Callable[..., Values]  # takes tensors


class SelectiveRecompute:
    """Mixin for modules that can save less for the backward, and recompute the rest in it.

    Attributes:
        recomputes: Whether to save less. A stage sets it for the layers that are recomputed selectively.
    """

    recomputes: bool = False


class Anchored:
    """Mixin for modules whose backward communicates, so that it must run even if this actor needs no gradient of it.

    Attributes:
        anchor: A tensor without elements whose gradient is always needed.
    """

    anchor: Tensor

    def anchored(self, x: Tensor) -> Tensor:
        """Return a tensor with the same values, whose backward always runs."""
        return apply_function(_Anchor, x, self.anchor)


class InPlaceGuard:
    """Call a function twice on the same inputs, in the forward and in the recomputation.

    A function that writes into its inputs is called with copies of them. The first call always has copies, and shows
    whether the function writes into them. (Calling without copies and repeating a failed call would be wrong, because
    the call may have changed buffers.)
    """

    def __init__(self) -> None:
        self._in_place: bool | None = None

    def __call__(self, function: Function, inputs: Values) -> Values:
        """Call the function, with copies of its inputs unless it is known not to write into them.

        Args:
            function: The function.
            inputs: Tensors of any shapes and dtypes; where a graph is recorded, leaves of it.

        Returns:
            The outputs of the function.

        Raises:
            RuntimeError: The function writes into a leaf, but did not write into its inputs at the first call.
        """
        if self._in_place is False:
            try:
                return function(*inputs)
            except RuntimeError as error:
                if "leaf Variable" in str(error):
                    error.add_note(
                        "(a layer that writes into its input must do so in its first forward too, or clone it)"
                    )
                raise
        copies = tuple([value.clone() for value in inputs])
        before = [num_writes(copy) for copy in copies]
        outputs = function(*copies)
        if self._in_place is None:
            self._in_place = any(num_writes(copy) > count for copy, count in zip(copies, before, strict=True))
        return outputs


class LayerAgain:
    """A layer whose forward saves only its inputs, and whose backward runs the layer again.

    Args:
        module: The layer. It takes one or more tensors and returns one or more.
        writes: Records the first writes into its frozen parameters.
    """

    def __init__(self, module: nn.Module, writes: FrozenWrites) -> None:
        self._module, self._twice, self._state = module, InPlaceGuard(), ForwardState(module, writes=writes)

    def __call__(self, inputs: Values, reseed: Callable[[], None]) -> Values:
        """Compute the layer's outputs.

        Args:
            inputs: The layer's inputs.
            reseed: Sets the random generator to its present state. It is called before the recomputation, so that
                dropout draws the same mask.

        Returns:
            The layer's outputs.
        """

        def layer(*values: Tensor) -> Values:
            return as_values(self._module(*values))

        then: Then = {}

        def again(*leaves: Tensor) -> Values:
            reseed()
            with self._state.as_then(then):
                return self._twice(layer, leaves)

        def first(*values: Tensor) -> Values:
            outputs, before = self._state.keep(partial(self._twice, layer, values))
            then.update(before)
            return outputs

        wanted = [p for p in self._module.parameters() if p.requires_grad]
        anchors = [module.anchor for module in self._module.modules() if isinstance(module, Anchored)]
        return rerun(first, again, inputs, [*wanted, *anchors])


def rerun(first: Function, again: Function, inputs: Values, parameters: Sequence[Tensor] = ()) -> Values:
    """Run a function and save only its inputs. The backward runs it again.

    The gradients of the parameters are returned to autograd, not accumulated here. So they are summed with those from
    other uses of a parameter in the same order, and to the same bits, as without recomputation.

    Args:
        first: The function as the forward calls it, with gradients off.
        again: The function as the backward calls it, with gradients on. It must compute the same values.
        inputs: The inputs of both, of any shapes and dtypes.
        parameters: All other tensors whose gradients are needed.

    Returns:
        The outputs of ``first``.
    """
    outputs: Values = _Rerun.apply(first, again, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs


def drawn_again(device: torch.device) -> Callable[[], None]:
    """Return a function that resets a device's random generator to its present state."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
    state = generator.get_state()

    def redraw() -> None:
        generator.set_state(state)

    return redraw


class _Anchor(torch.autograd.Function):
    """The autograd function of ``Anchored``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.like = anchor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.like)


class _Rerun(torch.autograd.Function):
    """The autograd function of ``rerun``.

    ``torch.utils.checkpoint`` would import torch's compiler (the cost: autograd/torch_private.py).
    """

    @staticmethod
    def forward(ctx: Any, first: Function, again: Function, count: int, *tensors: Tensor) -> Values:
        """Call ``first`` on the first ``count`` tensors, which are the inputs. The rest are the parameters."""
        ctx.again, ctx.count, ctx.parameters = again, count, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        outputs = first(*tensors[:count])
        ctx.mark_non_differentiable(*(value for value in outputs if not value.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run ``again``, and return the gradients of the inputs and parameters; None for those that need none."""
        wanted = ctx.needs_input_grad[3:]
        inputs = zip(ctx.saved_tensors, wanted, strict=False)
        leaves = tuple([value.detach().requires_grad_(wants) for value, wants in inputs])
        with torch.enable_grad():
            outputs = ctx.again(*leaves)
            pairs = [(value, g) for value, g in zip(outputs, gradients, strict=True) if g is not None]
            tail = GraphEnd(tuple([value for value, _ in pairs]))
        every = (*leaves, *ctx.parameters)
        targets = [value for value, wants in zip(every, wanted, strict=True) if wants]
        found = iter(tail.gradients(tuple([g for _, g in pairs]), targets))
        return None, None, None, *(next(found) if wants else None for wants in wanted)
