"""What can be seen of a step that is taken by hand: the figures of tensors, and what an actor holds."""

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
    """What one actor remembers of a step by hand, so that the step can be inspected and undone.

    Attributes:
        made: The values that the performed actions made.
        updated: Whether the weights were remembered, because they are about to change.
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
        """Return what was remembered of a weight or its optimizer state, or None."""
        return self._state.get(logical_name(weight, kept))


@dataclass(frozen=True)
class Look:
    """The figures of one tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype as torch spells it, without ``torch.``.
        norm: Its 2-norm, computed in fp64.
        low: Its least element; NaN if it has none, or if one is NaN.
        high: Its largest element, likewise.
        finite: Whether all its elements are finite.
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
        # one pass more would do, but an infinite or NaN element always shows in a bound
        return cls(shape, dtype, float(exact.norm()), low, high, math.isfinite(low) and math.isfinite(high))

    def __str__(self) -> str:
        odd = "" if self.finite else "  NOT FINITE"
        return f"{self.dtype}{list(self.shape)}  norm {self.norm:.6g}  from {self.low:.6g} to {self.high:.6g}{odd}"


@dataclass(frozen=True, repr=False)
class ComputedValue:
    """What an action computed: an output, the loss, or the gradient that goes back.

    Attributes:
        actor: The actor's coordinates.
        action: The action.
        looks: The figures of each tensor.
        in_flight: Number of microbatches whose forward the actor has done, and whose backward it has not.
        memory: The most memory that the actor has held in this step, in bytes.
        tensors: The tensors themselves, on the host, if they were asked for.
    """

    actor: str
    action: Action
    looks: tuple[Look, ...]
    in_flight: int
    memory: int
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, actor: str, action: Action, values: Values, in_flight: int, memory: int, *, tensors: bool
    ) -> ComputedValue:
        """Compute the figures of an action's tensors.

        Args:
            actor: The actor's coordinates.
            action: The action.
            values: The tensors.
            in_flight: See the attribute.
            memory: See the attribute.
            tensors: Whether to keep copies of the tensors.
        """
        kept = tuple(value.detach().cpu() for value in values) if tensors else ()
        return cls(actor, action, tuple(map(Look.at, values)), in_flight, memory, kept)

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
    """What an actor holds in the middle of a step, or after it.

    Attributes:
        actor: The actor's coordinates.
        now: Bytes by kind: weights, gradients and the state of the optimizer; where these come and go also weights that
            are gathered, and gradients in buckets on their way; and what is offloaded.
        most: The same at the most in this step so far.
        values: Bytes of what its actions computed or received and other actions still need, by action.
        in_flight: By stage, the microbatches between their forward and their backward.
        memory: The most memory that it has held in this step, in bytes.
        has_trained: Whether it has begun or taken a training step. If so, ``most`` and ``memory`` are those of the
            latest one, whatever evaluations came after it.
        process: Bytes that its process had before its first run, on a CPU; 0 if that is not known.
        sequences: Of each group of a generation under way, their number and the positions of their caches.
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
