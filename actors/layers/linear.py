"""Linear layers whose matrix products are torch's own (MKL on a CPU), or oneDNN's where those are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import (
    as_no_view,
    has_call_hooks,
    has_onednn_linear,
    is_intercepted,
    onednn_linear,
)
from raypar.actors.specs.model import LinearKind

_CPUINFO = Path("/proc/cpuinfo")


@cache
def of_intel() -> bool:
    """Return whether the CPU is Intel's, where MKL (torch's own products of float32) is at its best.

    False if ``/proc/cpuinfo`` can't be read, as on other systems than Linux.
    """
    try:
        return "GenuineIntel" in _CPUINFO.read_text()
    except OSError:
        return False


Pair = tuple[Tensor, Tensor | None]  # the weight (out, in) and the bias (out,) of a linear layer
GradientMemory = Callable[[Tensor], Tensor | None]  # a weight -> memory for its gradient; None: new

# Multiplications: for fewer, the calls of oneDNN and of a custom function cost more than the kernel saves.
_LEAST = 1 << 26
_ROWS = 16  # rows of an input: a product of fewer waits for memory


class Products(NamedTuple):
    """The matrix products of a linear layer's forward and backward, for use in a custom autograd function.

    Attributes:
        linear: Takes x (..., in), a weight (out, in) and a bias (out,) or None. Returns x weight^T + bias (..., out),
            which is no view: autograd refuses writes into a view that a custom function returns.
        inner: Takes the gradient of the output (rows, out) and a weight (out, in). Returns the gradient of the input
            (rows, in). With gradients on, the result can be differentiated again.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor]


class Use(NamedTuple):
    """A call of a linear layer in a forward, from which a backward computes the gradients of its weights.

    Attributes:
        x: The input (rows, in).
        rows: The gradient of the output (rows, out).
        product: Takes ``rows`` and ``x``, and returns the gradient of the weight (out, in) if it is not rows^T x, as
            on a member that has only a part of one of them; it may communicate.
    """

    x: Tensor
    rows: Tensor
    product: Callable[[Tensor, Tensor], Tensor] | None = None


class Postponer(Protocol):
    """Postpones the gradients of linear layers' weights until after those of their inputs.

    Attributes:
        anchor: A tensor with a gradient, which connects outputs that do not depend on the weights to the graph.
        halves: Whether it postpones gradients of the forward that runs now.
    """

    anchor: Tensor
    halves: bool

    def wants(self, x: Tensor, *layers: nn.Linear) -> bool:
        """Return whether to postpone the gradients of these layers' weights, and whether this input allows it."""

    def product(self, products: Products, x: Tensor, pairs: Sequence[Pair]) -> tuple[Tensor, ...]:
        """Return x (..., in) by each weight (out, in), plus its bias: (..., out) each."""

    def postpone(self, weight: Tensor, bias: Tensor | None, use: Use) -> None:
        """Postpone the gradients of a weight and a bias, in a backward."""

    def take_memory(self, weight: Tensor) -> Tensor | None:
        """Return memory for a weight's gradient, which a backward computes now; None: new."""


class Postponable(nn.Module):
    """A custom module of linear layers that can postpone the gradients of its weights.

    Attributes:
        postponer: Computes the gradients of the weights later; None if the backward computes them.
    """

    postponer: Postponer | None = None


class Linear(nn.Linear):
    """``nn.Linear`` with oneDNN's products: (..., in) -> (..., out).

    oneDNN computes the forward and the gradient of the input, for float32 on a CPU and from 67 million multiplications
    on. torch computes everything else, also the gradient of the weight. Shapes and layouts alone decide which of the
    two computes a product, so a layer that is called in the same way gives the same bits everywhere.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (undisturbed(input) and suits_onednn(input, self.weight)):
            return super().forward(input)
        return linear_product(ONEDNN, input, self.weight, self.bias)


def linear_of(kind: LinearKind) -> type[nn.Linear]:
    """Return the class of a model's linear layers. "auto" is oneDNN's, unless the CPU is Intel's."""
    return Linear if kind == "onednn" or (kind == "auto" and not of_intel()) else nn.Linear


class ProductsLinear(nn.Linear):
    """A linear layer that says which products it uses.

    Attributes:
        products: Its matrix products.
    """

    products: Products


def products_of(layer: nn.Linear) -> Products:
    """Return the products that a layer uses."""
    return ONEDNN if isinstance(layer, Linear) else products_of_part(layer)


def products_of_part(layer: nn.Linear) -> Products:
    """Return the products that a part of a layer uses, of which other actors have the rest: never oneDNN's."""
    return layer.products if isinstance(layer, ProductsLinear) else TORCH


def linear_product(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., in) by a weight (out, in) and add a bias (out,), with gradients: (..., out)."""
    if products is TORCH:
        return F.linear(x, weight, bias)
    out: Tensor
    (out,) = LinearProduct.apply(products, anywhere, x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class LinearProduct(torch.autograd.Function):
    """The outputs of one or more linear layers for one input, as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, memory: GradientMemory, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of the layers.

        Args:
            ctx: autograd's context.
            products: The matrix products to use.
            memory: Returns for each weight the tensor in which the backward computes its gradient.
            x: The input (..., in).
            *parameters: Weight (out, in) and bias (out,) or None of each layer in turn.

        Returns:
            The output (..., out) of each layer.
        """
        ctx.products, ctx.memory, ctx.weights = products, memory, parameters[::2]
        ctx.save_for_backward(x, *parameters[::2])
        return outputs(products, x, [*zip(parameters[::2], parameters[1::2], strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and of the parameters, from those of the outputs (..., out)."""
        x, *weights = ctx.saved_tensors
        rows, wanted = [gradient.flatten(0, -2) for gradient in gradients], iter(ctx.needs_input_grad[3:])
        inner = of_input(ctx.products, rows, weights).view(x.shape) if ctx.needs_input_grad[2] else None
        made: list[Tensor | None] = []
        for weight, of_output in zip(ctx.weights, rows, strict=True):  # hooks of saved tensors return others
            memory = None if torch.is_grad_enabled() else ctx.memory(weight)  # not for gradients of gradients
            made += of_weights([Use(x.flatten(0, -2), of_output)], (next(wanted), next(wanted)), memory)
        return None, None, inner, *made


def outputs(products: Products, x: Tensor, layers: Sequence[Pair]) -> tuple[Tensor, ...]:
    """Compute the outputs of linear layers for one input.

    Args:
        products: The matrix products to use.
        x: The input (..., in).
        layers: Weight and bias of each layer. If there are several layers, none may have a bias: they are computed as
            one product.

    Returns:
        The output (..., out) of each layer. Those of several layers are columns of one tensor.
    """
    if len(layers) == 1:
        return (products.linear(x, *layers[0]),)
    weights = [weight for weight, _ in layers]
    made: tuple[Tensor, ...] = products.linear(x, torch.cat(weights), None).split([len(w) for w in weights], -1)
    return made


def of_input(products: Products, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Compute the gradient of the input of linear layers.

    It is one product if the gradients of the outputs are columns of one tensor, else the sum of one for each layer.

    Args:
        products: The matrix products to use.
        rows: The gradient of each layer's output, (rows, out).
        weights: The weight of each layer, (out, in).

    Returns:
        The gradient of the input, (rows, in).
    """
    whole = contiguous_columns(rows) if len(rows) > 1 and not torch.is_grad_enabled() else None
    if whole is not None:
        return products.inner(whole, torch.cat([*weights]))
    first, *others = (products.inner(of_output, weight) for of_output, weight in zip(rows, weights, strict=True))
    return sum(others, start=first)


def contiguous_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the contiguous tensor whose columns some tensors are, without copying.

    Args:
        parts: Tensors (..., n) that may be consecutive columns of one tensor, n may differ.

    Returns:
        The whole tensor (..., sum of n), or None if they are not columns of one, or it is not contiguous.
    """
    first, width = parts[0], sum(part.shape[-1] for part in parts)
    whole = torch.empty((*first.shape[:-1], width), device="meta")
    at = first.storage_offset()
    for part in parts:
        ours = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.storage_offset() == at
        if not ours or part.shape[:-1] != first.shape[:-1] or part.stride() != whole.stride():
            return None
        at += part.shape[-1]
    return first.as_strided(whole.shape, whole.stride())


def of_weights(
    uses: Sequence[Use], wanted: tuple[bool, bool], memory: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a weight and a bias, added up over their uses in the order in which they are given.

    Args:
        uses: The uses of the layer.
        wanted: Whether the gradient of the weight is wanted, and whether that of the bias is.
        memory: A tensor (out, in) to compute the gradient of the weight in; None for new memory.

    Returns:
        The gradient of the weight (out, in) and of the bias (out,), each None if it is not wanted or there is no use.
    """
    of_weight = of_bias = None
    for x, rows, product in uses:
        if wanted[0]:
            # detach makes a new Python object: autograd copies a gradient that anything else refers to
            out = None if memory is None or of_weight is not None else memory.detach()
            if product is not None:
                made = product(rows, x)
            else:
                made = torch.mm(rows.t(), x) if out is None else torch.mm(rows.t(), x, out=out)
            of_weight = made if of_weight is None else of_weight.add_(made)
        if wanted[1]:
            made = rows.sum(0)
            of_bias = made if of_bias is None else of_bias.add_(made)
    return of_weight, of_bias


def undisturbed(x: Tensor) -> bool:
    """Return whether a call on this tensor only computes, and saves for its backward, in eager mode.

    False for subclasses of Tensor, in a compiled call, under autocast, and if a mode intercepts the call
    (``is_intercepted``).
    """
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and not is_intercepted()
    )


def suits_onednn(x: Tensor, *weights: Tensor) -> bool:
    """Return whether oneDNN can multiply a tensor by some weights as one product, and is faster than torch.

    Args:
        x: The tensor (..., k).
        *weights: The weights. Only their sizes matter, not which of their dims is multiplied.
    """
    rows = math.prod(x.shape[:-1])
    return (
        has_onednn_linear()
        and rows >= _ROWS
        and rows * sum(weight.numel() for weight in weights) >= _LEAST
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and all(weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous() for weight in weights)
        and bool(torch.backends.mkldnn.enabled)
    )


def anywhere(weight: Tensor) -> None:
    """Return None: the gradient of the weight may be computed in new memory."""


def _torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return as_no_view(F.linear(x, weight, bias))


def _torchs_inner(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight


def _onednns_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not suits_onednn(x, weight):
        return _torchs_linear(x, weight, bias)
    return as_no_view(onednn_linear(x, weight, bias))


def _onednns_inner(rows: Tensor, weight: Tensor) -> Tensor:
    if torch.is_grad_enabled() or not suits_onednn(rows, weight):
        return _torchs_inner(rows, weight)
    return onednn_linear(rows, weight.t(), None)


TORCH = Products(_torchs_linear, _torchs_inner)
ONEDNN = Products(_onednns_linear, _onednns_inner)

_MOST = 1 << 20  # elements of all weights: copying more of them side by side takes as long as it saves


class SharedInputLinears(nn.Module):
    """Call linear layers on one input: (..., in) -> (..., out) of each.

    It has no weights. If the layers are sharded over actors, its replacement communicates once for all of them.

    Args:
        together: Compute small ``Linear`` layers without biases as one product. That product is longer, and so faster,
            and the gradient of its input is no sum. It pays if the gradients of the outputs, which are columns of one
            tensor, come back as columns of one tensor too.
    """

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.together = together

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        if not self.are_one(x, linears):
            return tuple([linear(x) for linear in linears])
        return self.as_one(x, linears)

    def as_one(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Return the output (..., out) of each layer for x (..., in), computed as one product."""
        parameters = chain.from_iterable((linear.weight, linear.bias) for linear in linears)
        outs: tuple[Tensor, ...] = LinearProduct.apply(ONEDNN, anywhere, x, *parameters)  # type: ignore[no-untyped-call]
        return outs

    def are_one(self, x: Tensor, linears: Sequence[nn.Linear]) -> bool:
        """Return whether to compute these layers of x (..., in) as one product.

        That is so if all are ``Linear`` layers without biases, none has hooks, and it pays.
        """
        return (
            self.together
            and all(isinstance(linear, Linear) and linear.bias is None and not is_watched(linear) for linear in linears)
            and sum(linear.weight.numel() for linear in linears) <= _MOST
            and undisturbed(x)
            and suits_onednn(x, *(linear.weight for linear in linears))
        )


def is_plain_linear(layer: nn.Linear) -> bool:
    """Return whether a layer multiplies by its whole weight, as torch does on GPUs, and nothing watches it or waits."""
    if is_watched(layer) or isinstance(layer, ProductsLinear):
        return False
    if isinstance(layer, Postponable):
        return layer.postponer is None or not layer.postponer.halves
    return type(layer) in (nn.Linear, Linear)


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks on its calls, or a wrapped forward."""
    return has_call_hooks(module) or "forward" in vars(module)
