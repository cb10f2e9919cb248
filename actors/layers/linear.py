"""What multiplies by a linear layer's weight: torch's own products, or oneDNN's where those are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from raypar.actors.specs.model import LinearKind

_CPUINFO = Path("/proc/cpuinfo")


@cache
def of_intel() -> bool:
    """Whether MKL, which torch's own products of float32 go through, is at its best here; False where Linux does not
    tell."""
    try:
        return "GenuineIntel" in _CPUINFO.read_text()
    except OSError:
        return False


Pair = tuple[Tensor, Tensor | None]  # the weight (out, in) and the bias (out,) of a linear layer
Use = tuple[Tensor, Tensor]  # a linear layer's input (rows, in), and the gradient of its output (rows, out)
Place = Callable[[Tensor], Tensor | None]  # where the gradient of a weight is to be made, if its maker is not free

_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_LEAST = 1 << 26  # multiplications: below, oneDNN and a function of our own take longer to call than the kernels save
_ROWS = 16  # of an input: fewer are bound by memory


class Products(NamedTuple):
    """The two products that a linear layer's input and the gradient of its output go through, for a custom function.

    linear  x (..., in), weight (out, in) and bias (out,) or None -> x weight^T + bias (..., out), which is no view:
            into a view that a custom function returns autograd lets nobody write
    inner   gradient of the output (rows, out) and weight (out, in) -> gradient of the input (rows, in), differentiable
            where gradients are on: somebody wants gradients of gradients
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """``nn.Linear`` by oneDNN's products: (..., in) -> (..., out).

    Of float32 on a CPU, and from 67 million multiplications on; all else is ``nn.Linear``'s, and so is the gradient of
    the weight. Which of both makes a product depends on shapes and layouts alone, so bits are the same wherever a layer
    is called in the same way.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (undisturbed(input) and serves(input, self.weight)):
            return super().forward(input)
        out: Tensor
        (out,) = Product.apply(ONEDNN, anywhere, input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def linear_of(kind: LinearKind) -> type[nn.Linear]:
    """The class of a model's linear layers."""
    return Linear if kind == "onednn" or (kind == "auto" and not of_intel()) else nn.Linear


def products_of(layer: nn.Linear) -> Products:
    """Those that a layer goes by."""
    return ONEDNN if isinstance(layer, Linear) else TORCH


class Product(torch.autograd.Function):
    """What layers make of one input; their weights and biases come in turns. ``place`` says where the gradient of a
    weight is to be made, None: anywhere."""

    @staticmethod
    def forward(ctx: Any, products: Products, place: Place, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.products, ctx.place = products, place
        ctx.save_for_backward(x, *parameters[::2])
        return outputs(products, x, [*zip(parameters[::2], parameters[1::2], strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Those of the input and of the parameters."""
        x, *weights = ctx.saved_tensors
        rows, wanted = [gradient.flatten(0, -2) for gradient in gradients], iter(ctx.needs_input_grad[3:])
        inner = of_input(ctx.products, rows, weights).view(x.shape) if ctx.needs_input_grad[2] else None
        made: list[Tensor | None] = []
        for weight, of_output in zip(weights, rows, strict=True):
            place = None if torch.is_grad_enabled() else ctx.place(weight)  # not for gradients of gradients
            made += of_weights([(x.flatten(0, -2), of_output)], (next(wanted), next(wanted)), place)
        return None, None, inner, *made


def outputs(products: Products, x: Tensor, layers: Sequence[Pair]) -> tuple[Tensor, ...]:
    """What layers make of x (..., in): (..., out) of each. Several, without biases, are one product, and what they make
    is columns of one tensor."""
    if len(layers) == 1:
        return (products.linear(x, *layers[0]),)
    weights = [weight for weight, _ in layers]
    made: tuple[Tensor, ...] = products.linear(x, torch.cat(weights), None).split([len(w) for w in weights], -1)
    return made


def of_input(products: Products, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the input of layers (rows, in), by those of their outputs (rows, out): one product, where these
    are columns of one tensor."""
    whole = columns(rows) if len(rows) > 1 and not torch.is_grad_enabled() else None
    if whole is not None:
        return products.inner(whole, torch.cat([*weights]))
    first, *others = (products.inner(of_output, weight) for of_output, weight in zip(rows, weights, strict=True))
    return sum(others, start=first)


def columns(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor (..., all) whose columns these are, (..., some), one behind the other; None if there is none that is
    contiguous."""
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
    uses: Sequence[Use], wanted: tuple[bool, bool], place: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a weight, in ``place`` if there is one, and of a bias; of several uses autograd adds up in the
    order in which it comes to them."""
    of_weight = of_bias = None
    for x, rows in uses:
        if wanted[0]:
            # a window of its own: autograd takes over what nobody else refers to, and copies the rest
            room = None if place is None or of_weight is not None else place.detach()
            made = torch.mm(rows.t(), x) if room is None else torch.mm(rows.t(), x, out=room)
            of_weight = made if of_weight is None else of_weight.add_(made)
        if wanted[1]:
            made = rows.sum(0)
            of_bias = made if of_bias is None else of_bias.add_(made)
    return of_weight, of_bias


def undisturbed(x: Tensor) -> bool:
    """Whether torch does nothing else to a call than to compute it, and to keep what a backward needs."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()  # of modes, as that which counts FLOPs
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def serves(x: Tensor, *weights: Tensor) -> bool:
    """Whether oneDNN's product of ``x`` (..., k) and weights of these sizes, together, is there, and the faster one."""
    rows = math.prod(x.shape[:-1])
    return (
        _ONEDNN is not None
        and rows >= _ROWS
        and rows * sum(weight.numel() for weight in weights) >= _LEAST
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and all(weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous() for weight in weights)
        and torch._C._get_mkldnn_enabled()
    )


def anywhere(weight: Tensor) -> None:
    """No place is wanted for the gradient."""


def _torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _no_view(F.linear(x, weight, bias))


def _torchs_inner(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight


def _onednns_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _ONEDNN is None or not serves(x, weight):
        return _torchs_linear(x, weight, bias)
    return _no_view(_ONEDNN(x, weight, bias, "none", [], ""))


def _onednns_inner(rows: Tensor, weight: Tensor) -> Tensor:
    if _ONEDNN is None or torch.is_grad_enabled() or not serves(rows, weight):
        return _torchs_inner(rows, weight)
    return _ONEDNN(rows, weight.t(), None, "none", [], "")


def _no_view(out: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view.default(out, out.shape) if out._is_view() else out


TORCH = Products(_torchs_linear, _torchs_inner)
ONEDNN = Products(_onednns_linear, _onednns_inner)

_MOST = 1 << 20  # numbers in all weights: of larger ones a copy side by side takes as long as it saves


class Fan(nn.Module):
    """Calls linear layers on one input: (..., in) -> (..., out) of each.

    It has no weights. Where the layers are divided over actors, what replaces it communicates once for all of them.

    together  small ``Linear`` layers without biases are one product: a longer and so a faster one, and the gradient of
              its input is no sum. It pays where who takes the outputs, columns of one tensor then, makes its gradients
              such columns, too
    """

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.together = together

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        if not self.are_one(x, linears):
            return tuple([linear(x) for linear in linears])
        return self.as_one(x, linears)

    def as_one(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """What these layers make, by one product."""
        parameters = chain.from_iterable((linear.weight, linear.bias) for linear in linears)
        outs: tuple[Tensor, ...] = Product.apply(ONEDNN, anywhere, x, *parameters)  # type: ignore[no-untyped-call]
        return outs

    def are_one(self, x: Tensor, linears: Sequence[nn.Linear]) -> bool:
        """Whether these layers of ``x`` are one product: all may be, nobody listens to one, and it pays."""
        return (
            self.together
            and all(isinstance(linear, Linear) and linear.bias is None and not _watched(linear) for linear in linears)
            and sum(linear.weight.numel() for linear in linears) <= _MOST
            and undisturbed(x)
            and serves(x, *(linear.weight for linear in linears))
        )


def _watched(module: nn.Module) -> bool:
    """Return whether somebody is told of a module's calls, or has wrapped its forward."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or "forward" in vars(module) or _has_any_global_hook()
