"""Packing: which examples share a sequence. Pure arithmetic on lengths."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Pieces in sequences.

    Attributes:
        pieces: Indices of the pieces, those of a sequence one after the other.
        ends: How many pieces there are up to the end of each sequence.
    """

    pieces: Int64s
    ends: Int64s

    def of(self, sequence: int) -> Int64s:
        """Return the pieces of a sequence."""
        first = int(self.ends[sequence - 1]) if sequence else 0
        return self.pieces[first : int(self.ends[sequence])]


def pack_best_fit(lengths: Int64s, size: int) -> Packed:
    """Put pieces into as few sequences as best-fit decreasing finds: the longest first, where least room is left.

    Args:
        lengths: The length of each piece, 1 to ``size``.
        size: The length of a sequence.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; Dósa 2007: at most 11/9 of the fewest, and 2/3 of one.
    """
    rows: list[list[int]] = []
    open_by_room: list[list[int]] = [[] for _ in range(size + 1)]
    has_room = 0  # a bit for each room that some sequence has
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if fits := has_room >> length:
            room = (fits & -fits).bit_length() - 1 + length
            row = open_by_room[room].pop()
            if not open_by_room[room]:
                has_room &= ~(1 << room)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := room - length:
            open_by_room[left].append(row)
            has_room |= 1 << left
    pieces = np.array([piece for row in rows for piece in row], np.int64)
    return Packed(pieces, np.cumsum([len(row) for row in rows], dtype=np.int64))


def apart(count: int) -> Packed:
    """Give each of some pieces a sequence of its own."""
    return Packed(np.arange(count, dtype=np.int64), np.arange(1, count + 1, dtype=np.int64))
