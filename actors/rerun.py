"""Running again in the backward what a forward did not keep (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.models.model import Values, as_values
from raypar.actors.tail import Tail

Function = Callable[..., Values]  # of tensors


class Twice:
    """Calls a function on inputs that are needed once more: one that writes into them is given copies.

    Whether it does is found out when it is called first.
    """

    def __init__(self) -> None:
        self._in_place: bool | None = None

    def without_history(self, function: Function, inputs: Values) -> Values:
        """The outputs; nothing is kept for a backward."""
        with torch.no_grad():
            if self._in_place is False:
                return function(*inputs)
            copies = tuple(value.clone() for value in inputs)
            versions = [copy._version for copy in copies]
            outputs = function(*copies)
        self._in_place = any(copy._version > version for copy, version in zip(copies, versions, strict=True))
        return outputs

    def with_history(self, function: Function, leaves: Values) -> Values:
        """The outputs, at the end of a graph that begins at ``leaves``."""
        if not self._in_place:
            try:
                return function(*leaves)
            except RuntimeError as error:
                if "leaf Variable" not in str(error):
                    raise
                self._in_place = True
        return function(*(value.clone() for value in leaves))


class LayerAgain:
    """A layer of which a forward keeps only the inputs."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._twice = module, Twice()

    def __call__(self, inputs: Values, reseed: Callable[[], None]) -> Values:
        """The layer's outputs; ``reseed`` sets what it draws from as it is now."""

        def layer(*values: Tensor) -> Values:
            return as_values(self._module(*values))

        def again(*leaves: Tensor) -> Values:
            reseed()
            with unchanged(self._module):
                return self._twice.with_history(layer, leaves)

        def first(*values: Tensor) -> Values:
            return self._twice.without_history(layer, values)

        return rerun(first, again, inputs, [p for p in self._module.parameters() if p.requires_grad])


def rerun(first: Function, again: Function, inputs: Values, parameters: Sequence[Tensor] = ()) -> Values:
    """The outputs of ``first``, which is called without history, so that only its inputs are kept.

    The backward calls ``again`` on them, which has to compute the same, and goes back through that to the inputs and
    to ``parameters``: all other tensors whose gradients are wanted. They are handed on from here, so what adds up to
    them elsewhere does so in the same order, and to the same bits, as without this.
    """
    outputs: Values = _Rerun.apply(first, again, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Leave buffers as they are: the statistics of a BatchNorm have counted a batch when it was there first."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    yield
    for buffer, before in buffers:
        buffer.data.copy_(before)  # data: a graph that has read it does not look at it again


def drawn_again(device: torch.device) -> Callable[[], None]:
    """A function that sets the random numbers of a device back to where they are now."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
    state = generator.get_state()

    def redraw() -> None:
        generator.set_state(state)

    return redraw


class _Rerun(torch.autograd.Function):
    """torch.utils.checkpoint does this and more, but imports torch's compiler: 3 s and 90 MiB."""

    @staticmethod
    def forward(ctx: Any, first: Function, again: Function, count: int, *tensors: Tensor) -> Values:
        ctx.again, ctx.count, ctx.parameters = again, count, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        outputs = first(*tensors[:count])
        ctx.mark_non_differentiable(*(value for value in outputs if not value.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        inputs = zip(ctx.saved_tensors, wanted, strict=False)
        leaves = tuple([value.detach().requires_grad_(wants) for value, wants in inputs])
        with torch.enable_grad():
            outputs = ctx.again(*leaves)
            pairs = [(value, g) for value, g in zip(outputs, gradients, strict=True) if g is not None]
            tail = Tail(tuple([value for value, _ in pairs]))
        every = (*leaves, *ctx.parameters)
        targets = [value for value, wants in zip(every, wanted, strict=True) if wants]
        found = iter(tail.gradients(tuple([g for _, g in pairs]), targets))
        return None, None, None, *(next(found) if wants else None for wants in wanted)
