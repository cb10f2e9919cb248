"""What the layers of a stage make in a step, and the gradients there: kept to be compared with another layout's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from raypar.actors.inspect.recording import Backward, Forward
from raypar.actors.layers.dropout import Portions
from raypar.actors.tensors import Values, as_values

LOSS = "loss"  # stands for a layer: what is behind the last one


class Spot(NamedTuple):
    """A logical tensor of a step.

    module      whose output it is, by its logical name, or "loss"
    microbatch  by its number in the whole step
    backward    the gradient there, and not the output itself
    number      of several outputs
    """

    module: str
    microbatch: int
    backward: bool = False
    number: int = 0

    def __str__(self) -> str:
        many = f" {self.number}" if self.number else ""
        what = "the loss" if self.module == LOSS else f"output{many} of {self.module}"
        if self.backward:
            return f"gradient at {what} in microbatch {self.microbatch}, backward"
        return f"{what} in microbatch {self.microbatch}, forward"


class Sight(NamedTuple):
    """What an actor has of a logical tensor: by dim which part; of other dims all."""

    tensor: Tensor
    portions: Portions


class Watch:
    """Keeps copies, on the host, of what modules make and of the gradients there. It listens to a stage as a Tape does;
    a plain process opens ``of`` itself.

    What is computed more than once is kept as it was first. A module that stands in several places is left out.

    layers      by logical name: their outputs are kept, and those of the modules in them that have a portion
    portions    what is here of a module's outputs, by its logical name; of those of other layers all is
    keeps_loss  the stage ends in the loss, of all tokens
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], portions: Mapping[str, Portions], *, keeps_loss: bool = False
    ) -> None:
        every = {
            f"{name}.{inner}".rstrip("."): module
            for name, layer in layers.items()
            for inner, module in layer.named_modules(remove_duplicate=False)
        }
        places = Counter(map(id, every.values()))
        self._modules = {
            name: module
            for name, module in every.items()
            if (name in layers or name in portions) and places[id(module)] == 1
        }
        self._portions, self._keeps_loss = portions, keeps_loss
        self.seen: dict[Spot, Sight] = {}  # in the order in which they came

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that are watched."""
        return tuple(self._modules)

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Watch a forward."""
        with self.of(microbatch):
            outputs = call(step, microbatch, inputs, target)
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch), outputs[0])
        return outputs

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Watch a backward."""
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch, backward=True), gradients[0])
        with self.of(microbatch):
            return call(step, microbatch, gradients)

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Watch what is computed of a microbatch in this time."""
        hooks = [
            module.register_forward_hook(partial(self._made, name, microbatch))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep(self, spot: Spot, tensor: Tensor) -> None:
        """Keep a tensor as it is now."""
        if spot not in self.seen:
            portions = {dim % tensor.dim(): p for dim, p in self._portions.get(spot.module, {}).items() if tensor.dim()}
            self.seen[spot] = Sight(tensor.detach().cpu().clone(), portions)

    def _made(self, name: str, microbatch: int, module: nn.Module, inputs: object, output: object) -> None:
        for number, value in enumerate(as_values(output)):
            self.keep(Spot(name, microbatch, number=number), value)
            if value.requires_grad:
                value.register_hook(partial(self.keep, Spot(name, microbatch, backward=True, number=number)))
