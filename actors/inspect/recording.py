"""A recording of one stage in one step: state, inputs and outputs, with which one process can replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from raypar.actors.tensors import Values

Forward = Callable[[int, int, Values, Values], Values]  # step, microbatch, inputs, target -> outputs
Backward = Callable[[int, int, Values], Values]  # step, microbatch, gradients of the outputs -> those of the inputs


class Listener(Protocol):
    """Observer that a stage calls instead of its forward and backward."""

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Call ``call`` with the remaining arguments, and return its result."""

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Call ``call`` with the remaining arguments, and return its result."""


class Tape:
    """Listener that copies a stage's state, inputs, outputs and gradients to the host, by name.

    Names are ``state/blocks.0.up.weight``, ``F3/inputs/0``, ``B3/outputs/0``, ``gradients/blocks.0.up.weight``. The
    number after ``F`` (forward) or ``B`` (backward) is the microbatch's number in the whole step.

    Args:
        state: The state of the stage's modules: pairs of a name and a tensor.
        parameters: The stage's parameters by logical name. Their gradients are copied after the last backward.
        microbatches: Number of backwards in the step.

    Attributes:
        tensors: The copies by name.
        actions: The calls in their order, such as ``F3`` and ``B3``.
    """

    def __init__(
        self, state: Iterable[tuple[str, Tensor]], parameters: Mapping[str, nn.Parameter], microbatches: int
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.actions: list[str] = []
        self._parameters, self._left = parameters, microbatches
        for name, tensor in state:
            self._keep("state", {name: tensor})

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Call a stage's forward and record its inputs, target and outputs."""
        name = f"F{microbatch}"
        self._keep_all(f"{name}/inputs", inputs)  # before the call, which may write into them
        self._keep_all(f"{name}/target", target)
        outputs = call(step, microbatch, inputs, target)
        self._keep_all(f"{name}/outputs", outputs)
        self.actions.append(name)
        return outputs

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Call a stage's backward and record the gradients of its outputs and of its inputs."""
        name = f"B{microbatch}"
        self._keep_all(f"{name}/inputs", gradients)
        outputs = call(step, microbatch, gradients)
        self._keep_all(f"{name}/outputs", outputs)
        self.actions.append(name)
        self._left -= 1
        if not self._left:  # copy now: later they are summed over replicas and clipped
            self._keep("gradients", {key: p.grad for key, p in self._parameters.items() if p.grad is not None})
        return outputs

    def _keep_all(self, folder: str, values: Sequence[Tensor]) -> None:
        self._keep(folder, {str(number): value for number, value in enumerate(values)})

    def _keep(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {f"{folder}/{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
