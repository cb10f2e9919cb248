"""Stretches of a text's tokens: those for validation, drawn over all of the text, and those for training between them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.data.text_conversion import Tokens

Int64s: TypeAlias = npt.NDArray[np.int64]

_MOST_BLOCKS = 100  # for validation
_WINDOWS = 4  # of a block at the least, if there are several


@dataclass(frozen=True, eq=False)  # == on arrays gives no bool
class Stretches:
    """Stretches of tokens, each of which is cut into windows by itself: no window has tokens of two.

    Attributes:
        tokens: Those of the whole text, 1-d. Nothing is read until windows are taken.
        firsts: Where each stretch begins, (n,), in order.
        lengths: How many tokens each has, (n,).
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
        across: Whether to take a window of each stretch in turn, the first ones, then the second ones, and so on; else
            all windows of the first stretch come first.
    """

    def __init__(self, stretches: Stretches, seq: int, *, across: bool = False) -> None:
        self._firsts, self._seq, self._across = stretches.firsts, seq, across
        self._counts = np.maximum(0, (stretches.lengths - 1) // seq)
        self._before = np.cumsum(self._counts) - self._counts  # windows of the stretches before each

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._counts.sum())

    def starts(self, numbers: Int64s) -> Int64s:
        """Return where windows begin among the tokens of the whole text.

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
        """Of every window, taken in turn: its number in its stretch, and the stretch, (2, windows)."""
        stretch = np.repeat(np.arange(len(self._counts)), self._counts)
        number = np.arange(len(self)) - self._before[stretch]
        order = np.lexsort((stretch, number))
        return np.stack((number[order], stretch[order]))


def drawn_blocks(
    tokens: Tokens, share: float, seq: int, draw: Callable[[Int64s], Int64s]
) -> tuple[Stretches, Stretches]:
    """Divide tokens into those for training and blocks for validation, which are drawn over all of the text.

    The text is cut into as many equal parts as there are blocks, at most 100, and a block lies anywhere in each part.

    Args:
        tokens: All tokens.
        share: Share of the tokens for validation.
        seq: Tokens of a sequence. Blocks have some windows each if there are enough tokens.
        draw: Returns a random number below 2**63 for each number of a block, always the same.

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
    kept = stops > begins
    return Stretches(tokens, begins[kept], (stops - begins)[kept]), Stretches(tokens, firsts, lengths)
