"""Copies of the activations of a stage's layers and their gradients, to compare them with another layout's."""

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
    """An actor's part of a logical tensor, with its sharding."""

    tensor: Tensor
    sharding: Sharding


class OutputWatch:
    """Keep copies, on the host, of the outputs of modules and of their gradients.

    It is a Listener of a stage, like a Tape. A plain process without stages uses the context ``of`` instead. If a
    tensor is recomputed, the first one is kept. A module that has several names is left out.

    Args:
        layers: The layers by logical name. Their outputs are copied, and those of the modules inside them that are in
            ``outputs``.
        outputs: Sharding of a module's outputs, by logical name. Other modules' outputs are whole.
        keeps_loss: Whether the stage ends in the loss, which is copied too.

    Attributes:
        seen: The copies, in the order in which the tensors were computed.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], outputs: Mapping[str, Sharding], *, keeps_loss: bool = False
    ) -> None:
        every = {
            f"{name}.{inner}".rstrip("."): module
            for name, layer in layers.items()
            for inner, module in layer.named_modules(remove_duplicate=False)
        }
        uses = Counter(map(id, every.values()))
        self._modules = {
            name: module
            for name, module in every.items()
            if (name in layers or name in outputs) and uses[id(module)] == 1
        }
        self._outputs, self._keeps_loss = outputs, keeps_loss
        self.seen: dict[Spot, Sight] = {}
        self._microbatch = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of the modules that are watched."""
        return tuple(self._modules)

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Call a stage's forward, copy the tensors that it computes, and return its outputs."""
        with self.of(microbatch):
            outputs = call(step, microbatch, inputs, target)
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch), outputs[0])
        return outputs

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Call a stage's backward, copy the gradients that it computes, and return its result."""
        if self._keeps_loss:
            self.keep(Spot(LOSS, microbatch, backward=True), gradients[0])
        with self.of(microbatch):
            return call(step, microbatch, gradients)

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Return a context that copies the modules' outputs and gradients, as tensors of this microbatch."""
        self.turn_to(microbatch)
        hooks = [
            module.register_forward_hook(partial(self._keep_outputs, name)) for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def turn_to(self, microbatch: int) -> None:
        """Copy what is computed from now on as tensors of this microbatch."""
        self._microbatch = microbatch

    def keep(self, spot: Spot, tensor: Tensor) -> None:
        """Keep a copy of a tensor, unless there is one of this name."""
        if spot not in self.seen:
            sharding = self._outputs.get(spot.module, Sharding()).for_dims(tensor.dim())
            self.seen[spot] = Sight(tensor.detach().cpu().clone(), sharding)

    def _keep_outputs(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        microbatch = self._microbatch
        for number, value in enumerate(as_values(output)):
            self.keep(Spot(name, microbatch, number=number), value)
            if value.requires_grad:
                value.register_hook(partial(self.keep, Spot(name, microbatch, backward=True, number=number)))
