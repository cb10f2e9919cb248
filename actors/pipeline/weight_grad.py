"""Linear layers whose weights' gradients are made later than those of their inputs, or right where they are wanted."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.layers.linear import (
    Fan,
    Linear,
    Pair,
    Product,
    Products,
    Use,
    of_input,
    of_weights,
    outputs,
    products_of,
    undisturbed,
)
from raypar.actors.tensors import nbytes

_Versions = tuple[int, int]  # of a use's tensors: how often they were written

_WORTH = 2 << 20  # bytes of a weight: to copy its gradient takes longer than to call a layer of here


class Owed:
    """What is left of a backward: the products for weights of linear layers, in the order in which it came to them.

    It keeps the inputs of these layers and the gradients of their outputs.
    """

    def __init__(self) -> None:
        self._uses: dict[Pair, list[Use]] = {}
        self._versions: list[tuple[Use, _Versions]] = []

    def add(self, weight: Tensor, bias: Tensor | None, use: Use) -> None:
        """Leave a weight, and the bias that goes with it, for later."""
        self._uses.setdefault((weight, bias), []).append(use)
        self._versions.append((use, _versions(use)))

    @property
    def parameters(self) -> frozenset[Tensor]:
        """Those whose gradients are not complete yet."""
        return frozenset(p for pair in self._uses for p in pair if p is not None and p.requires_grad)

    def pay(self, places: dict[Tensor, Tensor]) -> None:
        """Add what is owed to the gradients of the weights, as autograd adds: hooks are called, once a parameter.

        Raises RuntimeError if what it keeps was written meanwhile, by a hook or by the next microbatch.
        """
        if any(_versions(use) != versions for use, versions in self._versions):
            raise RuntimeError(
                "the input of a linear layer, or the gradient of its output, was changed in place before the gradient "
                "of its weights was made from it: write into a copy, or set Layers(halves=False)"
            )
        self._versions.clear()
        while self._uses:
            pair = next(iter(self._uses))
            uses = self._uses.pop(pair)
            if any(map(_hooked, pair)):
                root: Tensor = _Weights.apply(places, uses, *pair)  # type: ignore[no-untyped-call]
                root.backward()
            else:
                _add(places, uses, *pair)


class Linears:
    """The linear layers in some modules, of which it takes over those that something is to be gained from.

    They leave their weights for later (``halve``), or make the first gradient of a step in a tensor that they are given
    (``make_in``). Only plain ``nn.Linear`` and ``Linear`` are taken over, without ``shared`` parameters, and nothing in
    modules that are to stay ``whole``. A layer is what it was where tensors are not kept as usual (torch's
    checkpointing), are cast (autocast), complex, or laid out in another way, where its bias is computed, and in
    forward-mode differentiation. Bits of gradients are those of an undivided backward: the same products, added up in
    the same order.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, whole: Container[nn.Module] = (), shared: Container[Tensor] = ()
    ) -> None:
        parts = [part for module in modules if module not in whole for part in module.modules()]
        self._layers = [
            part
            for part in parts
            if isinstance(part, nn.Linear)
            and type(part) in (nn.Linear, Linear)
            and not any(p in shared for p in part.parameters(recurse=False))
        ]
        self._fans = [part for part in parts if type(part) is Fan]
        self._taken = set[nn.Module]()
        self._halves = False
        self._anchor = torch.empty(0, requires_grad=True)  # makes the outputs of halved layers parts of a graph
        self.owed: Owed | None = None  # of the backward under way
        self._wanted: Mapping[Tensor, Tensor] = {}
        self.places: dict[Tensor, Tensor] = {}  # by weight; of this step, as long as nothing was made there

    def take_over(self, least: int = 0) -> None:
        """Take over the layers whose weights are of that many bytes or more."""
        for layer in self._layers:
            if nbytes(layer.weight) >= least and "forward" not in vars(layer):
                layer.forward = partial(self._linear, layer)  # type: ignore[method-assign]
                self._taken.add(layer)
        for fan in self._fans:
            if "forward" not in vars(fan):
                fan.forward = partial(self._fan, fan)  # type: ignore[method-assign]

    def halve(self, halves: bool) -> None:
        """From here on, let the layers that were taken over leave their weights for later, or not. If they do, their
        outputs are no functions of their weights: who asks for gradients inside a forward gets those of inputs only."""
        self._halves = halves

    def make_in(self, wanted: Mapping[Tensor, Tensor], least: int = _WORTH) -> None:
        """Make the first gradients of every step in these tensors, of the same shapes, by parameter; those of that many
        bytes or more: small ones are copied there sooner by who wants them."""
        weights = {layer.weight for layer in self._layers if nbytes(layer.weight) >= least}
        self._wanted = {parameter: place for parameter, place in wanted.items() if parameter in weights}
        self.take_over(least)

    def begin(self) -> None:
        """A step begins."""
        self.places = dict(self._wanted)

    @contextmanager
    def postponed(self) -> Iterator[Owed]:
        """For the time of a backward: halved layers leave their weights to what this gives.

        What is called in that time, because a user's function runs it again, is not of this backward, and leaves
        nothing.
        """
        self.owed = owed = Owed()
        try:
            yield owed
        finally:
            self.owed = None

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not self._asked(x, layer):
            return type(layer).forward(layer, x)
        (out,) = self._made(x, layer)
        return out

    def _fan(self, fan: Fan, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        if not (self._taken.issuperset(layers) and fan.are_one(x, layers)):
            return type(fan).forward(fan, x, *layers)
        return self._made(x, *layers) if self._asked(x, *layers) else fan.as_one(x, layers)

    def _asked(self, x: Tensor, *layers: nn.Linear) -> bool:
        """Whether something is wanted of these layers, and can be had."""
        if torch.compiler.is_compiling() or self.owed is not None:
            return False
        wanted = self._halves or any(layer.weight in self._wanted for layer in layers)
        return wanted and all(_usual(layer.weight, layer.bias, x) for layer in layers)

    def _made(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """What they make of one input; several are of one kind."""
        products, pairs = products_of(layers[0]), [(layer.weight, layer.bias) for layer in layers]
        outs: tuple[Tensor, ...]
        if self._halves:
            outs = _Halved.apply(self, products, pairs, x, self._anchor)  # type: ignore[no-untyped-call]
        else:
            outs = Product.apply(products, self._place, x, *chain.from_iterable(pairs))  # type: ignore[no-untyped-call]
        return outs

    def _place(self, weight: Tensor) -> Tensor | None:
        return _place(self.places, weight)


class _Halved(torch.autograd.Function):
    """What layers make of one input; their weights come later.

    They come in as pairs, which autograd takes for no input: of an input without a gradient it calls the hooks all the
    same, with None.
    """

    @staticmethod
    def forward(
        ctx: Any, linears: Linears, products: Products, pairs: list[Pair], x: Tensor, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.linears, ctx.products, ctx.biases = linears, products, [bias for _, bias in pairs]
        ctx.save_for_backward(x, *(weight for weight, _ in pairs))
        return outputs(products, x, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        if ctx.linears.owed is not None:
            for weight, bias, of_output in zip(weights, ctx.biases, rows, strict=True):
                ctx.linears.owed.add(weight, bias, (x.detach().flatten(0, -2), of_output))
        inner = of_input(ctx.products, rows, weights).view(x.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, inner, None


class _Weights(torch.autograd.Function):
    """A scalar behind the weights of a linear layer; going back from it adds what they are owed."""

    @staticmethod
    def forward(ctx: Any, places: dict[Tensor, Tensor], uses: list[Use], weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.uses, ctx.place = uses, _place(places, weight)
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        uses, ctx.uses = ctx.uses, None
        return None, None, *of_weights(uses, ctx.needs_input_grad[2:], ctx.place)


def _add(places: dict[Tensor, Tensor], uses: list[Use], weight: Tensor, bias: Tensor | None) -> None:
    """What going back from ``_Weights`` does where nobody listens, in a quarter of the time."""
    wanted = weight.requires_grad, bias is not None and bias.requires_grad
    with torch.no_grad():
        for parameter, made in zip((weight, bias), of_weights(uses, wanted, _place(places, weight)), strict=True):
            if parameter is None or made is None:
                continue
            if parameter.grad is None:
                parameter.grad = made
            else:
                parameter.grad.add_(made)


def _hooked(parameter: Tensor | None) -> bool:
    """Whether somebody is to be called with the gradient of a weight."""
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _versions(use: Use) -> _Versions:
    x, rows = use
    return x._version, rows._version


def _usual(weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    """Whether a layer's weights train, and its tensors are kept and laid out as nearly everywhere."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf  # not made of others by a parametrization
        and (bias is None or bias.is_leaf)
        and weight.is_floating_point()  # not complex
        and x.dim() in (2, 3)
        and x.numel() > 1  # of a single number autograd takes another order
        and undisturbed(x)
        and x.is_contiguous()
        and weight.is_contiguous()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _place(places: dict[Tensor, Tensor], weight: Tensor) -> Tensor | None:
    """Where the weight's gradient is to be made: once a step, while it has none."""
    return places.pop(weight, None) if weight.grad is None else None
