"""The extents of documents and padding in the sequences of a microbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.machine.device import ComputeDevice


class Extents(NamedTuple):
    """The documents and the padding of a microbatch's sequences.

    Attributes:
        starts: For each of an actor's tokens, the position of its document's first token in the whole sequence, (B, S)
            int64; None if a sequence is one document.
        lengths: Number of tokens of each whole sequence before its padding, (B,) int64; None if there is no padding.
    """

    starts: Tensor | None = None
    lengths: Tensor | None = None

    def on(self, device: ComputeDevice) -> Extents:
        """Return the extents on a device."""
        return Extents(*(None if each is None else device.to((each,))[0] for each in self))
