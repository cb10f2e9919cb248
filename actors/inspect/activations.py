"""Keep the activations of a stage's layers and their gradients in a step, to compare them with another layout's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from raypar.actors.inspect.recording import Backward, Forward
from raypar.actors.sharding import Sharding
from raypar.actors.tensors import Values, as_values

LOSS = "loss"  # used as the module name of the loss


class Spot(NamedTuple):
    """Name of a logical tensor of a step: a module's output, or the gradient with respect to it.

    Attributes:
        module: Logical name of the module, or "loss".
        microbatch: Number of the microbatch in the whole step, over all replicas.
        backward: Whether it is the gradient rather than the output.
        number: Index of the output, if the module has several.
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
    """An actor's part of a logical tensor, and which part it is."""

    tensor: Tensor
    sharding: Sharding


class OutputWatch:
    """Keep copies, on the host, of the outputs of modules and of their gradients.

    A Watch is a Listener of a stage, as a Tape is. A plain process without stages uses the context ``of`` instead. If
    recomputation computes a tensor again, the first one is kept. A module that is used in several places is left out.

    Args:
        layers: The layers by logical name. Kept are their outputs, and the outputs of the modules inside them that are
            in ``outputs``.
        outputs: Sharding of a module's outputs, by logical name. Other modules' outputs are whole.
        keeps_loss: Whether the stage ends in the loss, which is to be kept too.

    Attributes:
        seen: What was kept, in the order in which it was computed.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], outputs: Mapping[str, Sharding], *, keeps_loss: bool = False
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
            if (name in layers or name in outputs) and places[id(module)] == 1
        }
        self._outputs, self._keeps_loss = outputs, keeps_loss
        self.seen: dict[Spot, Sight] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of the modules that are watched."""
        return tuple(self._modules)

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Call a stage's forward, keep what it computes, and return its outputs."""
        with self.of(microbatch):
            outputs = call(step, microbatch, inputs, target)
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch), outputs[0])
        return outputs

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Call a stage's backward, keep the gradients that it computes, and return what it returns."""
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch, backward=True), gradients[0])
        with self.of(microbatch):
            return call(step, microbatch, gradients)

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Keep what the modules compute within the context, as tensors of this microbatch."""
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
        """Keep a copy of a tensor, unless one of this name was kept already."""
        if spot not in self.seen:
            sharding = self._outputs.get(spot.module, Sharding()).for_dims(tensor.dim())
            self.seen[spot] = Sight(tensor.detach().cpu().clone(), sharding)

    def _made(self, name: str, microbatch: int, module: nn.Module, inputs: object, output: object) -> None:
        for number, value in enumerate(as_values(output)):
            self.keep(Spot(name, microbatch, number=number), value)
            if value.requires_grad:
                value.register_hook(partial(self.keep, Spot(name, microbatch, backward=True, number=number)))
