"""Notes on a step that is taken by hand: what its actions have made, and what has to be put back to take it again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from raypar.actors.copies import logical_name
from raypar.actors.models.model import Values
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
