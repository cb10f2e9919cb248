"""What can be seen of a step that is taken by hand: the figures of tensors, and what an actor holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import logical_name
from raypar.actors.tensors import Values
from raypar.schedules.action import Action


class Notes:
    """One actor's notes, from ``open`` to the next step.

    made     the values of the actions that were performed, as they went on
    updated  whether the weights are among what was remembered: they are about to change
    """

    def __init__(self) -> None:
        self.made: dict[Action, Values] = {}
        self.updated = False
        self._state: dict[str, Tensor] = {}

    def remember(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy state under its logical names."""
        self._state |= {name: tensor.detach().clone() for name, tensor in tensors}

    def read(self, weight: str, kept: str = "") -> Tensor | None:
        """What was remembered; None for what was not there."""
        return self._state.get(logical_name(weight, kept))


@dataclass(frozen=True)
class Look:
    """The figures of one tensor.

    dtype     as torch spells it, without ``torch.``
    norm      2-norm, in fp64
    low, high least and largest element; NaN if there is none, or if one is NaN
    finite    whether every element is
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    low: float
    high: float
    finite: bool

    @classmethod
    def at(cls, tensor: Tensor) -> Look:
        """Look at a tensor."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if not tensor.numel():
            return cls(shape, dtype, 0.0, math.nan, math.nan, finite=True)
        exact = tensor.detach().double()
        low, high = (float(bound) for bound in torch.aminmax(exact))
        # one pass more would do, but an infinite or NaN element always shows in a bound
        return cls(shape, dtype, float(exact.norm()), low, high, math.isfinite(low) and math.isfinite(high))

    def __str__(self) -> str:
        odd = "" if self.finite else "  NOT FINITE"
        return f"{self.dtype}{list(self.shape)}  norm {self.norm:.6g}  from {self.low:.6g} to {self.high:.6g}{odd}"


@dataclass(frozen=True, repr=False)
class Seen:
    """What an action has made: an output, the loss, or the gradient that goes back.

    actor      who did it
    looks      one for each tensor
    in_flight  microbatches that the actor has forwarded and not gone back through
    memory     bytes: the most that the actor has held in this step
    tensors    the values themselves, on the host, if they were asked for
    """

    actor: str
    action: Action
    looks: tuple[Look, ...]
    in_flight: int
    memory: int
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, actor: str, action: Action, values: Values, in_flight: int, memory: int, *, tensors: bool) -> Seen:
        """Look at values."""
        kept = tuple(value.detach().cpu() for value in values) if tensors else ()
        return cls(actor, action, tuple(map(Look.at, values)), in_flight, memory, kept)

    @property
    def finite(self) -> bool:
        """Whether every element of every tensor is."""
        return all(look.finite for look in self.looks)

    @property
    def norm(self) -> float:
        """2-norm of all tensors together."""
        return math.hypot(*(look.norm for look in self.looks))

    @property
    def tensor(self) -> Tensor:
        """The tensor, where there is one only. Raises ValueError if there are none or several: see ``tensors``."""
        if len(self.tensors) != 1:
            raise ValueError(f"{self.action} has {len(self.tensors)} tensors here: see tensors")
        return self.tensors[0]

    def __repr__(self) -> str:
        return "\n".join([f"{self.action} of {self.actor}", *(f"  {look}" for look in self.looks)])


@dataclass(frozen=True)
class Held:
    """What an actor holds, in bytes where nothing else is said.

    values     by action: what it has made or received and another action still needs
    in_flight  by stage: the microbatches between forward and backward
    memory     the most that the actor has held in this step
    """

    actor: str
    weights: int
    gradients: int
    optimizer: int
    values: dict[Action, int]
    in_flight: dict[int, tuple[int, ...]]
    memory: int
