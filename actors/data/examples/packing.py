"""Packing: which examples share a sequence. It is computed from lengths alone."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Pieces in sequences.

    Attributes:
        pieces: Indices of the pieces, sorted by sequence.
        ends: Number of pieces up to the end of each sequence.
    """

    pieces: Int64s
    ends: Int64s

    def of(self, sequence: int) -> Int64s:
        """Return the pieces of a sequence."""
        first = int(self.ends[sequence - 1]) if sequence else 0
        return self.pieces[first : int(self.ends[sequence])]


def pack_best_fit(lengths: Int64s, size: int) -> Packed:
    """Pack pieces into sequences by best-fit decreasing: the longest first, each where it leaves the least free space.

    Args:
        lengths: The length of each piece, 1 to ``size``.
        size: The length of a sequence.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; Dósa 2007: at most 11/9 of the fewest, and 2/3 of one.
    """
    rows: list[list[int]] = []
    open_by_space: list[list[int]] = [[] for _ in range(size + 1)]
    has_space = 0  # bit n is set if a sequence has n free tokens
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if fits := has_space >> length:
            space = (fits & -fits).bit_length() - 1 + length
            row = open_by_space[space].pop()
            if not open_by_space[space]:
                has_space &= ~(1 << space)
        else:
            space, row = size, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := space - length:
            open_by_space[left].append(row)
            has_space |= 1 << left
    pieces = np.array([piece for row in rows for piece in row], np.int64)
    return Packed(pieces, np.cumsum([len(row) for row in rows], dtype=np.int64))


def one_per_sequence(count: int) -> Packed:
    """Put each piece into a separate sequence."""
    return Packed(np.arange(count, dtype=np.int64), np.arange(1, count + 1, dtype=np.int64))
