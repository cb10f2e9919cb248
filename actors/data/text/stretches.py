"""Stretches of a text's tokens: those for validation, drawn from the whole text, and those for training between them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.data.text.text_conversion import Tokens

Int64s: TypeAlias = npt.NDArray[np.int64]

_MOST_BLOCKS = 100  # for validation
_WINDOWS = 4  # of a block, at least, if there are several blocks


@dataclass(frozen=True, eq=False)  # == on arrays gives no bool
class Stretches:
    """Stretches of tokens. Windows are cut from one stretch each: no window has tokens of two.

    Attributes:
        tokens: The tokens of the whole text, 1-d. None are read until windows are taken.
        firsts: Position of each stretch's first token, (n,), in order.
        lengths: Number of tokens of each stretch, (n,).
    """

    tokens: Tokens
    firsts: Int64s
    lengths: Int64s

    @classmethod
    def whole(cls, tokens: Tokens) -> Stretches:
        """Return all tokens as one stretch."""
        return cls(tokens, np.zeros(1, np.int64), np.array([len(tokens)], np.int64))

    def __len__(self) -> int:
        """Return the number of tokens in all stretches."""
        return int(self.lengths.sum())


class TokenWindows:
    """The windows of stretches: ``seq + 1`` tokens each, of which the last one is the first of the next window.

    Args:
        stretches: The stretches.
        seq: Tokens of a sequence.
        across: Whether windows are taken from the stretches in turn: the first of each, then the second of each, and so
            on. Else all windows of the first stretch come first.
    """

    def __init__(self, stretches: Stretches, seq: int, *, across: bool = False) -> None:
        self._firsts, self._seq, self._across = stretches.firsts, seq, across
        self._counts = np.maximum(0, (stretches.lengths - 1) // seq)
        self._before = np.cumsum(self._counts) - self._counts  # windows of the stretches before each

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._counts.sum())

    def starts(self, numbers: Int64s) -> Int64s:
        """Return the position of each window's first token in the whole text.

        Args:
            numbers: Their numbers, 0 to ``len(self) - 1``.
        """
        if self._across:
            number, at = self._in_turn[:, numbers]
        else:
            at = np.searchsorted(self._before + self._counts, numbers, side="right").astype(np.int64)
            number = numbers - self._before[at]
        starts: Int64s = self._firsts[at] + number * self._seq
        return starts

    @cached_property
    def _in_turn(self) -> Int64s:
        """The windows taken from the stretches in turn, (2, windows): number in the stretch, index of the stretch."""
        stretch = np.repeat(np.arange(len(self._counts)), self._counts)
        number = np.arange(len(self)) - self._before[stretch]
        order = np.lexsort((stretch, number))
        return np.stack((number[order], stretch[order]))


def drawn_blocks(
    tokens: Tokens, share: float, seq: int, draw: Callable[[Int64s], Int64s]
) -> tuple[Stretches, Stretches]:
    """Divide tokens into those for training and blocks for validation, which are drawn from the whole text.

    The text is cut into equal parts, at most 100, and one block is drawn at a random position of each part.

    Args:
        tokens: All tokens.
        share: Share of the tokens for validation.
        seq: Tokens of a sequence. Blocks have some windows each if there are enough tokens.
        draw: Returns a pseudorandom number below 2**63 for each block number, the same at each call.

    Returns:
        The stretches for training, and those for validation.
    """
    held, window = int(len(tokens) * share), seq + 1
    blocks = max(1, min(_MOST_BLOCKS, held // (_WINDOWS * window), (len(tokens) - held) // (_WINDOWS * window)))
    numbers = np.arange(blocks, dtype=np.int64)
    length, ends = held // blocks, np.append(numbers, blocks) * len(tokens) // blocks
    firsts = ends[:-1] + draw(numbers) % (np.diff(ends) - length + 1)
    rest = len(tokens) - length - firsts[0]
    if blocks == 1 and max(firsts[0], rest) < window:  # no window would be left for training
        firsts = np.array([len(tokens) - length], np.int64)
    lengths = np.full_like(firsts, length)
    begins, stops = np.append(0, firsts + lengths), np.append(firsts, len(tokens))
    filled = stops > begins
    return Stretches(tokens, begins[filled], (stops - begins)[filled]), Stretches(tokens, firsts, lengths)
