"""Inspection of a step in the REPL: the figures of tensors, and the memory of an actor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import logical_name
from raypar.actors.specs.results import Kind
from raypar.actors.tensors import Values
from raypar.schedules.action import Action


class Notes:
    """The values and the saved state of one actor in a step of the REPL, to inspect and undo the step.

    Attributes:
        made: The values that actions computed, by action.
        updated: Whether the weights are saved, because they will change.
    """

    def __init__(self) -> None:
        self.made: dict[Action, Values] = {}
        self.updated = False
        self._state: dict[str, Tensor] = {}

    def remember(self, tensors: Iterable[tuple[str, Tensor]], copied: Callable[[Tensor], Tensor] = torch.clone) -> None:
        """Copy state.

        Args:
            tensors: Pairs of a logical name and a tensor.
            copied: Returns a copy of a tensor.
        """
        self._state |= {name: copied(tensor.detach()) for name, tensor in tensors}

    def read(self, weight: str, kept: str = "") -> Tensor | None:
        """Return the saved tensor of a weight or its optimizer state, or None."""
        return self._state.get(logical_name(weight, kept))


@dataclass(frozen=True)
class Look:
    """The figures of one tensor.

    Attributes:
        shape: The shape.
        dtype: The dtype in torch's spelling, without ``torch.``.
        norm: The 2-norm, computed in fp64.
        low: The least element; NaN if there is none, or if one is NaN.
        high: The largest element; NaN if there is none, or if one is NaN.
        finite: Whether all elements are finite.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    low: float
    high: float
    finite: bool

    @classmethod
    def at(cls, tensor: Tensor) -> Look:
        """Compute the figures of a tensor."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if not tensor.numel():
            return cls(shape, dtype, 0.0, math.nan, math.nan, finite=True)
        exact = tensor.detach().double()
        low, high = (float(bound) for bound in torch.aminmax(exact))
        # an infinite or NaN element always appears in a bound, so no further pass is needed
        return cls(shape, dtype, float(exact.norm()), low, high, math.isfinite(low) and math.isfinite(high))

    def __str__(self) -> str:
        odd = "" if self.finite else "  NOT FINITE"
        return f"{self.dtype}{list(self.shape)}  norm {self.norm:.6g}  from {self.low:.6g} to {self.high:.6g}{odd}"


@dataclass(frozen=True, repr=False)
class ComputedValue:
    """The result of an action: an output, the loss, or the gradient of the inputs.

    Attributes:
        actor: The actor's coordinates.
        action: The action.
        looks: The figures of each tensor.
        in_flight: Number of microbatches between their forward and their backward on the actor.
        memory: Peak memory of the actor in this step, in bytes.
        tensors: The tensors, on the host, if they were requested.
    """

    actor: str
    action: Action
    looks: tuple[Look, ...]
    in_flight: int
    memory: int
    tensors: tuple[Tensor, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether all elements of all tensors are finite."""
        return all(look.finite for look in self.looks)

    @property
    def norm(self) -> float:
        """2-norm of all tensors together."""
        return math.hypot(*(look.norm for look in self.looks))

    @property
    def tensor(self) -> Tensor:
        """The only tensor. Raises ValueError if there is none, or if there are several: see ``tensors``."""
        if len(self.tensors) != 1:
            raise ValueError(f"{self.action} has {len(self.tensors)} tensors here: see tensors")
        return self.tensors[0]

    def __repr__(self) -> str:
        return "\n".join([f"{self.action} of {self.actor}", *(f"  {look}" for look in self.looks)])


@dataclass(frozen=True)
class ActorContents:
    """The memory of an actor during a step, or after it.

    Attributes:
        actor: The actor's coordinates.
        now: Bytes by kind: weights, gradients and the state of the optimizer; if these are temporary, also gathered
            weights and gradients in buckets; and offloaded tensors.
        most: Peak bytes by kind in this step so far.
        values: Bytes of the values that later actions still need, by the action that computed or received them.
        in_flight: By stage, the microbatches between their forward and their backward.
        memory: Peak memory in this step, in bytes.
        has_trained: Whether it has begun a training step. If so, ``most`` and ``memory`` are those of the latest one,
            not those of evaluations after it.
        process: Bytes of its process before its first run, on a CPU; 0 if unknown.
        sequences: For each group of a running generation, the number of sequences and the positions of their caches.
    """

    actor: str
    now: Mapping[Kind, int]
    most: Mapping[Kind, int]
    values: dict[Action, int]
    in_flight: dict[int, tuple[int, ...]]
    memory: int
    has_trained: bool
    process: int = 0
    sequences: tuple[tuple[int, int], ...] = ()
