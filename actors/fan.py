"""Linear layers of one input, side by side: queries, keys and values, or an MLP's gate and what it gates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from raypar.actors.products import ONEDNN, Linear, Product, anywhere, serves, undisturbed

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
        if any("forward" in vars(linear) for linear in linears) or not self.are_one(x, linears):
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
            and all(type(linear) is Linear and linear.bias is None and not _listened_to(linear) for linear in linears)
            and sum(linear.weight.numel() for linear in linears) <= _MOST
            and undisturbed(x)
            and serves(x, *(linear.weight for linear in linears))
        )


def _listened_to(module: nn.Module) -> bool:
    """Whether somebody is told of its calls."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or _has_any_global_hook()
