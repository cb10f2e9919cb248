"""A wrong tensor: the part of each actor, and the part that it should have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """The part of a logical tensor that one actor has, and the part that it should have.

    Attributes:
        actor: The actor's name in messages.
        at: The actor's coordinate on each axis of the mesh.
        ours: The actor's tensor, or None if it has none.
        wanted: The tensor that the actor should have.
    """

    actor: str
    at: Mapping[str, int]
    ours: Tensor | None
    wanted: Tensor

    def elsewhere(self, axis: str) -> dict[str, int]:
        """Return the actor's coordinates on the other axes."""
        return {name: index for name, index in self.at.items() if name != axis}


@dataclass(frozen=True)
class Case:
    """A wrong tensor.

    Attributes:
        pieces: One for each actor that has, or should have, a part of the tensor.
        sizes: Sizes that may be missing or too much as a factor, by name: that of each mesh axis, and "microbatches".
        backward: Whether the tensor is a gradient.
        vectors: One-dimensional weights, by logical name, that may have been added to the tensor.
        auxiliary: By piece, the contribution of the auxiliary losses to the right gradient; empty if there is none.
        experts: For the gradient of an expert's weight, the right gradients of the same weight of the layer's other
            experts, by name, as the pieces of the same actors.
    """

    pieces: Sequence[Piece]
    sizes: Mapping[str, int]
    backward: bool
    vectors: Mapping[str, Tensor]
    auxiliary: Sequence[Tensor] = ()
    experts: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def ours(self) -> list[Tensor]:
        """The actors' pieces, without missing ones."""
        return [piece.ours for piece in self.pieces if piece.ours is not None]

    @property
    def wanted(self) -> list[Tensor]:
        """The pieces of the plain process."""
        return [piece.wanted for piece in self.pieces]

    @property
    def axes(self) -> list[str]:
        """Return the axes on which the pieces have different coordinates."""
        return [axis for axis in self.pieces[0].at if len({piece.at[axis] for piece in self.pieces}) > 1]

    def groups(self, axis: str) -> list[list[Piece]]:
        """Group the pieces of actors that differ on one axis only and should have the same tensor."""
        found: list[list[Piece]] = []
        for piece in self.pieces:
            candidates = (group for group in found if group[0].elsewhere(axis) == piece.elsewhere(axis))
            alike = next((group for group in candidates if torch.equal(group[0].wanted, piece.wanted)), None)
            if alike is None:
                found.append([piece])
            else:
                alike.append(piece)
        return found
