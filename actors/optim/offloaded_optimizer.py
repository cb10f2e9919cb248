"""Any optimizer of weights that are stored off the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from raypar.actors.machine.offload_storage import PORTION, OffloadStorage
from raypar.actors.optim.muon.muon_with_adamw import Optimizer
from raypar.actors.portions import portions
from raypar.actors.tensors import nbytes


class OffloadedOptimizer:
    """Updates weights in portions, so that only one portion's weights, gradients and states are mapped at a time.

    Optimizers update each weight independently, so the results have the same bits. The states that the optimizer
    creates in a weight's first update are moved to the storage.

    Args:
        optimizer: The optimizer of all weights.
        storage: Storage of weights, gradients and states.

    Attributes:
        param_groups: All parameter groups.
        state: The state of each parameter.

    Source: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training".
    """

    def __init__(self, optimizer: Optimizer, storage: OffloadStorage) -> None:
        self._optimizer, self._storage = optimizer, storage
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.state: defaultdict[Tensor, Any] = optimizer.state

    def step(self) -> None:
        """Update every weight that has a gradient."""
        members = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = []
            for group, params in zip(self.param_groups, members, strict=True):
                for portion in portions((one for one in params if one.grad is not None), nbytes, PORTION):
                    group["params"] = portion
                    self._update(portion)
                group["params"] = []
        finally:
            for group, params in zip(self.param_groups, members, strict=True):
                group["params"] = params

    def _update(self, weights: Sequence[nn.Parameter]) -> None:
        states = [value for weight in weights for value in self.state.get(weight, {}).values() if _is_large(value)]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        with self._storage.accessible([*weights, *states], writes=True), self._storage.accessible(gradients):
            self._optimizer.step()
        for weight in weights:
            state = self.state.get(weight, {})
            for key, value in state.items():
                if _is_large(value):
                    state[key] = self._storage.moved(value)


def _is_large(value: object) -> bool:
    """Return whether a value of a weight's state is a tensor with dims, and not a number."""
    return isinstance(value, Tensor) and value.dim() > 0
