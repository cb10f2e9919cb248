"""Where documents and padding are in the sequences of a microbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.device import ComputeDevice


class Extents(NamedTuple):
    """What the data know of a microbatch's sequences, beside their tokens.

    Attributes:
        starts: Of each of an actor's tokens, the place of the first one of its document in the whole sequence, (B, S)
            int64; None if a sequence is one document.
        lengths: How many tokens each whole sequence has before its padding, (B,) int64; None if nothing is padding.
    """

    starts: Tensor | None = None
    lengths: Tensor | None = None

    def on(self, place: ComputeDevice) -> Extents:
        """Return the same on the device of a place."""
        return Extents(*(None if each is None else place.to((each,))[0] for each in self))
