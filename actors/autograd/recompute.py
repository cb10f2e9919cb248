"""Running again in the backward what a forward did not keep (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.backward import Tail
from raypar.actors.tensors import Values, as_values

Function = Callable[..., Values]  # of tensors
_Place = tuple[nn.Module, str]  # of a buffer: its module, and its name there
Then = dict[_Place, Tensor]


class Twice:
    """Calls a function on inputs that are needed once more: one that writes into them is given copies.

    Whether it does is found out when it is called first, with copies. It can't be tried without and called again: what
    it has changed by then, as buffers, is changed.
    """

    def __init__(self) -> None:
        self._in_place: bool | None = None

    def without_history(self, function: Function, inputs: Values) -> Values:
        """The outputs; nothing is kept for a backward."""
        with torch.no_grad():
            return self._called(function, inputs)

    def with_history(self, function: Function, leaves: Values) -> Values:
        """The outputs, at the end of a graph that begins at ``leaves``."""
        try:
            return self._called(function, leaves)
        except RuntimeError as error:
            if "leaf Variable" in str(error):
                error.add_note("(a layer that writes into its input must do so in its first forward too, or clone it)")
            raise

    def _called(self, function: Function, inputs: Values) -> Values:
        if self._in_place is False:
            return function(*inputs)
        copies = tuple([value.clone() for value in inputs])
        versions = [copy._version for copy in copies]
        outputs = function(*copies)
        if self._in_place is None:
            self._in_place = any(copy._version > version for copy, version in zip(copies, versions, strict=True))
        return outputs


class Buffers:
    """What the buffers of modules were before a forward that changes them, for when it is run again.

    Which ones it changes is found out when it is called first: only those are kept.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules, self._changing = modules, set[_Place]()
        self._known = False

    def keep(self, forward: Callable[[], Values]) -> tuple[Values, Then]:
        """The outputs of a forward, and the buffers as they were before it."""
        now = self._now()
        asked = [place for place in now if place in self._changing or not self._known]
        clones = {place: now[place].clone() for place in asked}
        versions = {place: buffer._version for place, buffer in now.items()}
        outputs = forward()
        after = self._now()
        self._changing |= {
            place
            for place, buffer in now.items()
            if after.get(place) is not buffer
            or buffer._version > versions[place]
            or (place in clones and not torch.equal(buffer, clones[place]))  # batch_norm's kernel counts no versions
        }
        self._known = True
        return outputs, {place: clone for place, clone in clones.items() if place in self._changing}

    @contextmanager
    def as_then(self, then: Then) -> Iterator[None]:
        """Buffers as they were; what happens to them here is forgotten: statistics have counted the batch once."""
        now, stand_ins = self._now(), dict[int, Tensor]()  # a buffer that stands in two places stays one
        for place, buffer in now.items():
            if id(buffer) not in stand_ins:
                stand_ins[id(buffer)] = then[place] if place in then else buffer.clone()
            module, name = place
            module._buffers[name] = stand_ins[id(buffer)]
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _now(self) -> Then:
        return {
            (part, name): buffer
            for module in self._modules
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        }


class LayerAgain:
    """A layer of which a forward keeps only the inputs."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._twice, self._buffers = module, Twice(), Buffers(module)

    def __call__(self, inputs: Values, reseed: Callable[[], None]) -> Values:
        """The layer's outputs; ``reseed`` sets what it draws from as it is now."""

        def layer(*values: Tensor) -> Values:
            return as_values(self._module(*values))

        then: Then = {}

        def again(*leaves: Tensor) -> Values:
            reseed()
            with self._buffers.as_then(then):
                return self._twice.with_history(layer, leaves)

        def first(*values: Tensor) -> Values:
            outputs, before = self._buffers.keep(partial(self._twice.without_history, layer, values))
            then.update(before)
            return outputs

        return rerun(first, again, inputs, [p for p in self._module.parameters() if p.requires_grad])


def rerun(first: Function, again: Function, inputs: Values, parameters: Sequence[Tensor] = ()) -> Values:
    """The outputs of ``first``, which is called without history, so that only its inputs are kept.

    The backward calls ``again`` on them, which has to compute the same, and goes back through that to the inputs and
    to ``parameters``: all other tensors whose gradients are wanted. They are handed on from here, so what adds up to
    them elsewhere does so in the same order, and to the same bits, as without this.
    """
    outputs: Values = _Rerun.apply(first, again, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs


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
