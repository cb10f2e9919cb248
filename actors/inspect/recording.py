"""A tape of one stage in one step: its state, and all that goes in and comes out, so that it can be played alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from raypar.actors.tensors import Values

Forward = Callable[[int, int, Values, Values], Values]
Backward = Callable[[int, int, Values], Values]


class Listener(Protocol):
    """Stands between a stage and those who call it."""

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Make the call, and return what it returns."""

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Make the call, and return what it returns."""


class Tape:
    """Copies of everything, by name: ``state/blocks.0.up.weight``, ``F3/inputs/0``, ``B3/outputs/0``,
    ``gradients/blocks.0.up.weight``. ``F`` and ``B`` go by the microbatch's number in the whole step.

    state         of the stage's modules
    parameters    whose gradients, summed over the step, are the stage's own
    microbatches  how many backwards there will be
    """

    def __init__(
        self, state: Iterable[tuple[str, Tensor]], parameters: Mapping[str, nn.Parameter], microbatches: int
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.actions: list[str] = []  # F3, B3: in the order in which they were done
        self._parameters, self._left = parameters, microbatches
        for name, tensor in state:
            self._keep("state", {name: tensor})

    def forward(self, call: Forward, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Record a forward."""
        name = f"F{microbatch}"
        self._keep_all(f"{name}/inputs", inputs)  # first: it may write into them
        self._keep_all(f"{name}/target", target)
        outputs = call(step, microbatch, inputs, target)
        self._keep_all(f"{name}/outputs", outputs)
        self.actions.append(name)
        return outputs

    def backward(self, call: Backward, step: int, microbatch: int, gradients: Values) -> Values:
        """Record a backward."""
        name = f"B{microbatch}"
        self._keep_all(f"{name}/inputs", gradients)
        outputs = call(step, microbatch, gradients)
        self._keep_all(f"{name}/outputs", outputs)
        self.actions.append(name)
        self._left -= 1
        if not self._left:  # from here on they are summed over replicas, and clipped
            self._keep("gradients", {key: p.grad for key, p in self._parameters.items() if p.grad is not None})
        return outputs

    def _keep_all(self, folder: str, values: Sequence[Tensor]) -> None:
        self._keep(folder, {str(number): value for number, value in enumerate(values)})

    def _keep(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {f"{folder}/{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
