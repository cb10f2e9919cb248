"""Faults that are injected on purpose: an actor kills, stops or delays itself, or corrupts its numbers, at a point."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.tensors import as_values
from raypar.schedules.action import Action

Claim = Callable[[InjectedFault], bool]
"""returns whether a fault is still to happen, and counts it; the count outlives the actor"""


class InjectedError(RuntimeError):
    """An exception that was injected on purpose."""


class FaultInjector:
    """Makes the faults of one actor happen.

    Args:
        faults: The faults of this actor.
        claim: Returns whether a fault is still to happen.

    Attributes:
        weights: The actor's weights by logical name, one of which a fault corrupts.
        layers: The first layer of each stage, whose outputs a fault corrupts.
    """

    def __init__(self, faults: Sequence[InjectedFault] = (), claim: Claim = lambda fault: True) -> None:
        self.weights: Mapping[str, Tensor] = {}
        self.layers: Mapping[int, nn.Module] = {}
        self._faults: dict[tuple[int, str], list[InjectedFault]] = {}
        for fault in faults:
            self._faults.setdefault((fault.step, fault.at), []).append(fault)
        self._claim = claim

    def reach(self, point: object, step: int) -> None:
        """Make the faults of a point happen.

        Args:
            point: An action, or one of ``specs.injected_fault.POINTS``.
            step: The step, counted from 0.

        Raises:
            InjectedError: That is the fault.
        """
        if self._faults:
            for fault in self._faults.get((step + 1, str(point)), ()):
                if self._claim(fault):
                    self._happen(fault, point)

    def _happen(self, fault: InjectedFault, point: object) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "drop_node":
            os.kill(os.getppid(), signal.SIGKILL)  # the raylet, whose workers end with it
            time.sleep(60)
        elif fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.of == "activation":
            assert isinstance(point, Action) and point.stage is not None, "injectable has demanded a forward"
            corrupt_next_outputs(self.layers[point.stage])
        elif fault.kind == "corrupt":
            flip_bit(self.weights.values())
        else:
            raise InjectedError(f"injected on purpose: {fault}")


def flip_bit(tensors: Iterable[Tensor]) -> None:
    """Flip the lowest bit of the largest element of the first tensor that has elements: the number stays finite.

    Autograd does not notice it.
    """
    for tensor in tensors:
        if tensor.numel():
            largest = torch.unravel_index(tensor.detach().abs().argmax(), tensor.shape)
            tensor.data[largest].reshape(1).view(torch.uint8)[0] ^= 1
            return


def corrupt_next_outputs(layer: nn.Module) -> None:
    """Flip a bit of the next outputs of a layer."""

    def corrupt(module: nn.Module, inputs: object, outputs: Any) -> None:
        handle.remove()
        flip_bit(value for value in as_values(outputs) if value.is_floating_point())

    handle = layer.register_forward_hook(corrupt)
