"""Split backwards of linear layers: gradients of weights are computed later, or in given memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.autograd.later_half import LaterHalf
from raypar.actors.autograd.torch_private import has_gradient_hooks, has_saved_tensor_hooks, num_writes
from raypar.actors.layers.fp8 import Fp8Linear
from raypar.actors.layers.linear import (
    Linear,
    LinearProduct,
    Pair,
    Postponable,
    Products,
    SharedInputLinears,
    Use,
    of_input,
    of_weights,
    outputs,
    products_of,
    undisturbed,
)
from raypar.actors.models.module_tree import replace_modules
from raypar.actors.tensors import nbytes, sum_dtype

GradientMemory = dict[Tensor, Callable[[], Tensor]]  # by weight, a function that returns memory for its gradient
_Versions = tuple[int, int]  # number of writes to each tensor of a use

_LEAST_BYTES = 2 << 20  # of a weight whose gradient takes longer to copy than a replaced layer takes to call


class DeferredGradients:
    """The deferred gradients of linear layers' weights, in the order in which the backward reached the layers.

    It keeps the inputs of these layers and the gradients of their outputs.

    Attributes:
        others: The deferred gradients of other parameters, computed from the saved graph; None if there are none.
    """

    others: LaterHalf | None = None

    def __init__(self) -> None:
        self._uses: dict[Pair, list[Use]] = {}
        self._versions: list[tuple[Use, _Versions]] = []

    def add(self, weight: Tensor, bias: Tensor | None, use: Use) -> None:
        """Defer the gradients of a weight and its bias."""
        self._uses.setdefault((weight, bias), []).append(use)
        self._versions.append((use, _versions(use)))

    @property
    def parameters(self) -> frozenset[Tensor]:
        """The parameters whose gradients are not complete yet."""
        linear = frozenset(p for pair in self._uses for p in pair if p is not None and p.requires_grad)
        return linear if self.others is None else linear | self.others.parameters

    def compute(self, memory: GradientMemory) -> None:
        """Compute the deferred gradients, and add them as autograd does: hooks are called once a parameter.

        Args:
            memory: Functions that return memory for the first gradients of the step, by weight.

        Raises:
            RuntimeError: A tensor that it keeps was written to since, by a hook or by the next microbatch.
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
                apply_function(_Weights, memory, uses, *pair).backward()
            else:
                _add(memory, uses, *pair)
        if self.others is not None:
            self.others.compute()


class Linears:
    """The linear layers in some modules, and replacements of them.

    The replacements defer the gradients of their weights (``halve``), or compute the first gradient of a step in given
    memory (``make_in``). Only plain ``nn.Linear``, ``Linear`` and ``Fp8Linear`` layers are replaced, none with
    ``shared`` parameters, and none in modules that stay ``whole``. A replacement computes as the original layer if
    tensors are not saved as usual (torch's checkpointing), are cast (autocast), complex or not contiguous, if its bias
    is computed, and in forward-mode differentiation. The gradients have the bits of a backward that is not split: the
    same products, added up in the same order.

    Args:
        modules: The modules to search.
        whole: Modules to leave unchanged.
        shared: Parameters that several modules share.

    Attributes:
        deferred: The deferred gradients of the running backward.
        anchor: Makes the outputs of halved layers parts of a graph.
        halves: Whether replaced layers defer the gradients of their weights.
        memory: Functions that return memory for first gradients, by weight; each is removed when it is used.
        hook: The saved-tensor hook under which layers may still save tensors, because it returns them unchanged.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, whole: Container[nn.Module] = (), shared: Container[Tensor] = ()
    ) -> None:
        self._root = nn.ModuleList(modules)
        parts = [part for module in self._root if module not in whole for part in module.modules()]
        own = [part for part in parts if not any(p in shared for p in part.parameters(recurse=False))]
        self._layers = [part for part in own if isinstance(part, nn.Linear) and type(part) in _REPLACEMENTS]
        self._fans = [part for part in parts if type(part) is SharedInputLinears]
        self._postponable = [part for part in own if isinstance(part, Postponable)]
        self.halves = False
        self.anchor = torch.empty(0, requires_grad=True)
        self.deferred: DeferredGradients | None = None
        self._wanted: Mapping[Tensor, Callable[[], Tensor]] = {}
        self.memory: GradientMemory = {}
        self.hook: object = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules as they are now; a module that is a linear layer itself may have been replaced."""
        return tuple(self._root)

    def take_over(self, least: int = 0) -> None:
        """Replace the layers whose weights have at least ``least`` bytes, and the modules that call several of them."""
        replacements: dict[nn.Module, nn.Module] = {
            layer: _REPLACEMENTS[type(layer)](layer, self)
            for layer in self._layers
            if not isinstance(layer, DeferredLinear) and nbytes(layer.weight) >= least
        }
        replacements |= {fan: DeferredFan(fan, self) for fan in self._fans}
        replace_modules(self._root, replacements)
        self._layers = [replacements.get(layer, layer) for layer in self._layers]  # type: ignore[misc]
        self._fans = []
        for part in self._postponable:
            part.postponer = self

    def others(self, shared: Container[Tensor]) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters of all other modules than the layers that defer their gradients.

        Args:
            shared: Parameters to leave out, because several modules share them.
        """
        linear = {id(p) for layer in (*self._layers, *self._postponable) for p in layer.parameters(recurse=False)}
        return tuple(p for p in self._root.parameters() if p.requires_grad and p not in shared and id(p) not in linear)

    def halve(self, halves: bool) -> None:
        """Set whether the replaced layers defer the gradients of their weights, from now on.

        Their outputs then do not depend on the weights for autograd: inside a forward, ``torch.autograd.grad`` returns
        gradients of inputs only.

        Args:
            halves: Whether they defer them.
        """
        self.halves = halves

    def make_in(self, wanted: Mapping[Tensor, Callable[[], Tensor]], least: int = _LEAST_BYTES) -> None:
        """Compute the first gradients after every ``begin`` in given memory.

        Args:
            wanted: By parameter, a function that returns a tensor of its shape and dtype.
            least: Smallest weight in bytes for which this is done; smaller gradients are copied in less time.
        """
        weights = {layer.weight for layer in self._layers if nbytes(layer.weight) >= least}
        self._wanted = {p: empty for p, empty in wanted.items() if p in weights}
        self.take_over(least)

    def begin(self) -> None:
        """Begin a step, or a round of reductions in it."""
        self.memory = dict(self._wanted)

    @contextmanager
    def postponed(self) -> Iterator[DeferredGradients]:
        """Return a context for a backward, in which halved layers add to the yielded deferred gradients.

        Layers that are called within the context, because a user's function repeats its forward, are not part of this
        backward, and defer nothing.
        """
        self.deferred = deferred = DeferredGradients()
        try:
            yield deferred
        finally:
            self.deferred = None

    def wants(self, x: Tensor, *layers: nn.Linear) -> bool:
        """Return whether to call these layers on one input through ``call``: it is of use, and possible."""
        if torch.compiler.is_compiling() or self.deferred is not None:
            return False
        wanted = self.halves or any(layer.weight in self._wanted for layer in layers)
        return wanted and all(_usual(layer.weight, layer.bias, x, self._hook_of(layer)) for layer in layers)

    def _hook_of(self, layer: nn.Linear) -> object:
        """Return the hook under which a layer may save tensors: only replaced layers, which hold their weights."""
        return self.hook if isinstance(layer, Postponable) else None

    def call(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Return the outputs of layers of one kind for one input. This class computes their weights' gradients."""
        return self.product(products_of(layers[0]), x, [(layer.weight, layer.bias) for layer in layers])

    def product(self, products: Products, x: Tensor, pairs: Sequence[Pair]) -> tuple[Tensor, ...]:
        """Return the outputs for weights and biases of layers of one kind; see ``Postponer``."""
        outs: tuple[Tensor, ...]
        if self.halves:
            outs = _Halved.apply(self, products, pairs, x, self.anchor)  # type: ignore[no-untyped-call]
        else:
            outs = LinearProduct.apply(products, self.take_memory, x, *chain.from_iterable(pairs))  # type: ignore[no-untyped-call]
        return outs

    def postpone(self, weight: Tensor, bias: Tensor | None, use: Use) -> None:
        """Defer the gradients of a weight and its bias, in a ``postponed`` backward."""
        if self.deferred is not None:
            self.deferred.add(weight, bias, use)

    def take_memory(self, weight: Tensor) -> Tensor | None:
        """Return memory for the first gradient of a weight since ``begin``; None for new memory. See ``Postponer``."""
        return _take_memory(self.memory, weight)


class DeferredLinear(nn.Linear, Postponable):
    """A replacement of a linear layer, with its parameters: (..., in) -> (..., out).

    Args:
        layer: The layer that it replaces.
        linears: Decides at every call when and where the gradients of the weights are computed.
    """

    def __init__(self, layer: nn.Linear, linears: Linears) -> None:
        vars(self).update(vars(layer))
        self.linears = self.postponer = linears

    def forward(self, input: Tensor) -> Tensor:
        if not self.linears.wants(input, self):
            return super().forward(input)
        (out,) = self.linears.call(input, self)
        return out


class DeferredOneDnnLinear(DeferredLinear, Linear):
    """A replacement of a ``Linear``, which uses oneDNN's products."""


class DeferredFp8Linear(DeferredLinear, Fp8Linear):
    """A replacement of an ``Fp8Linear``, whose products are in fp8."""


class DeferredFan(SharedInputLinears):
    """A replacement of ``SharedInputLinears``, whose layers may have been replaced.

    Args:
        fan: The module that it replaces.
        linears: Decides at every call when and where the gradients of the weights are computed.
    """

    def __init__(self, fan: SharedInputLinears, linears: Linears) -> None:
        super().__init__(together=fan.together)
        self.linears = linears

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Call the layers: together if that is faster and they are of one kind, else one by one."""
        deferred = [isinstance(linear, DeferredLinear) for linear in linears]
        if len(set(deferred)) > 1 or not self.are_one(x, linears):
            return tuple([linear(x) for linear in linears])
        return (
            self.linears.call(x, *linears)
            if all(deferred) and self.linears.wants(x, *linears)
            else self.as_one(x, linears)
        )


_REPLACEMENTS: Mapping[type[nn.Module], type[DeferredLinear]] = {
    nn.Linear: DeferredLinear,
    Linear: DeferredOneDnnLinear,
    Fp8Linear: DeferredFp8Linear,
}


class _Halved(torch.autograd.Function):
    """Layers of one input, whose weights' gradients are computed later.

    The weights are passed as pairs, so that autograd does not see them as inputs: it would call the hooks of an input
    without a gradient with None.
    """

    @staticmethod
    def forward(
        ctx: Any, linears: Linears, products: Products, pairs: Sequence[Pair], x: Tensor, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.linears, ctx.products, ctx.pairs = linears, products, pairs  # hooks of saved tensors return other objects
        ctx.save_for_backward(x, *(weight for weight, _ in pairs))
        return outputs(products, x, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        for (weight, bias), of_output in zip(ctx.pairs, rows, strict=True):
            ctx.linears.postpone(weight, bias, Use(x.detach().flatten(0, -2), of_output))
        inner = of_input(ctx.products, rows, weights).view(x.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, inner, None


class _Weights(torch.autograd.Function):
    """A scalar function of the weights of a linear layer, whose backward adds the deferred gradients."""

    @staticmethod
    def forward(ctx: Any, memory: GradientMemory, uses: list[Use], weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.uses, ctx.memory = uses, _take_memory(memory, weight)
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        uses, ctx.uses = ctx.uses, None
        return None, None, *of_weights(uses, ctx.needs_input_grad[2:], ctx.memory)


def _add(memory: GradientMemory, uses: list[Use], weight: Tensor, bias: Tensor | None) -> None:
    """Add the gradients as the backward of ``_Weights``, in a quarter of the time, if parameters have no hooks."""
    wanted = weight.requires_grad, bias is not None and bias.requires_grad
    with torch.no_grad():
        for parameter, gradient in zip(
            (weight, bias), of_weights(uses, wanted, _take_memory(memory, weight)), strict=True
        ):
            if parameter is None or gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(sum_dtype(parameter))
            else:
                parameter.grad.add_(gradient)


def _hooked(parameter: Tensor | None) -> bool:
    """Return whether a parameter has hooks that are called with its gradient."""
    return parameter is not None and has_gradient_hooks(parameter)


def _versions(use: Use) -> _Versions:
    return num_writes(use.x), num_writes(use.rows)


def _usual(weight: Tensor, bias: Tensor | None, x: Tensor, hook: object) -> bool:
    """Return whether a layer's weights train, and its tensors are saved and laid out in the usual way."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf  # not computed by a parametrization
        and (bias is None or bias.is_leaf)
        and weight.is_floating_point()  # not complex
        and x.dim() in (2, 3)
        and x.numel() > 1  # for a single number autograd has another order
        and undisturbed(x)
        and x.is_contiguous()
        and weight.is_contiguous()
        and not has_saved_tensor_hooks(hook)
    )


def _take_memory(memory: GradientMemory, weight: Tensor) -> Tensor | None:
    """Return the memory for a weight's first gradient of the step; None if it has a gradient, or no memory."""
    empty = memory.pop(weight, None) if weight.grad is None else None
    return None if empty is None else empty()
