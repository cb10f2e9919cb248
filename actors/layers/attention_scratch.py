"""Where attention in blocks works: some heads of a sample at a time, in memory that stays in a cache.

Shapes as in causal.py: S sequence, R queries of a token for one head of keys, d width of a head; n heads of keys at
once, Q queries of a block, T tokens up to its last, t of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

_SIDE = 64  # tokens of a block of queries
_LINE = 16  # numbers: a product may add up otherwise where memory begins elsewhere in a line of a cache

Place = tuple[int, slice]  # of a sample, and some of its heads of keys
Span = tuple[int, int]  # of neighbouring tokens the first, and the one behind the last


class Size(NamedTuple):
    """Of the heads at work: n of keys, S tokens, R heads of queries for each of them, d numbers wide."""

    n: int
    S: int
    R: int
    d: int

    @property
    def spans(self) -> list[Span]:
        """The tokens of each block."""
        return [(start, min(start + _SIDE, self.S)) for start in range(0, self.S, _SIDE)]

    @property
    def scores(self) -> list[int]:
        """How many scores each block has."""
        return [self.n * (stop - start) * self.R * stop for start, stop in self.spans]


class Heads:
    """Some heads of a tensor (B, N, S, d), in pieces of neighbouring tokens.

    rows  (n, t R, d) of each piece: head by head, the queries of a token that share a head of keys behind one another
    """

    def __init__(self, like: Tensor, size: Size, shared: int, spans: Sequence[Span]) -> None:
        self._shared = shared
        self._pieces = [(slice(*span), like.new_empty(size.n, span[1] - span[0], shared, size.d)) for span in spans]
        self.rows = [piece_ntRd.flatten(1, 2) for _, piece_ntRd in self._pieces]

    def grouped(self, x_BNSd: Tensor) -> Tensor:
        """(B, K, S, R, d), where places are found: by heads of keys, each with those of queries that share it."""
        grouped_BKSRd: Tensor = x_BNSd.unflatten(1, (-1, self._shared)).transpose(2, 3)
        return grouped_BKSRd

    def fetch(self, all_BKSRd: Tensor, place: Place) -> None:
        """Read these."""
        for tokens, piece_ntRd in self._pieces:
            piece_ntRd.copy_(all_BKSRd[(*place, tokens)])

    def put_back(self, all_BKSRd: Tensor, place: Place) -> None:
        """Write what is here into the tensor."""
        for tokens, piece_ntRd in self._pieces:
            all_BKSRd[(*place, tokens)].copy_(piece_ntRd)


class Scores(NamedTuple):
    """Of a block: ``whole`` (n, Q, T), and of that ``corner`` (n, Q, t), with the keys of its own tokens."""

    whole: Tensor
    corner: Tensor


class Block(NamedTuple):
    """Neighbouring queries of some heads, and the keys and values that they see.

    q, gradient   (n, Q, d), and that of what they make of keys and values
    made          (n, Q, d): what they make, or their own gradient
    k, v, dk, dv  (n, T, d), and their gradients, to which every block adds its part
    scores        in memory that all blocks have in common
    slopes        (n, Q, T): room for the scores' gradient
    later         (Q, t): -inf where the key of a query's block is later than the query, else 0
    beta          0 for the block whose gradients of keys and values come first, the last one, else 1
    """

    q: Tensor
    gradient: Tensor
    made: Tensor
    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor
    scores: Scores
    slopes: Tensor
    later: Tensor
    beta: float
    scale: float

    def look(self, scores: Scores) -> None:
        """What the queries make of keys and values; of ``scores`` it makes the softmax."""
        torch.bmm(self.weights(scores), self.v, out=self.made)

    def weights(self, scores: Scores) -> Tensor:
        """The softmax of the scores, in their memory."""
        torch.baddbmm(scores.whole, self.q, self.k.transpose(1, 2), beta=0, alpha=self.scale, out=scores.whole)
        scores.corner.add_(self.later)
        return torch.softmax(scores.whole, -1, out=scores.whole)

    def back(self, weights_nQT: Tensor) -> None:
        """The gradients of queries, keys and values, from what ``weights`` returned."""
        slopes_nQT = self.slopes
        torch.bmm(self.gradient, self.v.transpose(1, 2), out=slopes_nQT)
        torch.baddbmm(self.dv, weights_nQT.transpose(1, 2), self.gradient, beta=self.beta, out=self.dv)
        torch._softmax_backward_data(slopes_nQT, weights_nQT, -1, torch.float32, grad_input=slopes_nQT)
        torch.baddbmm(self.made, slopes_nQT, self.k, beta=0, alpha=self.scale, out=self.made)
        torch.baddbmm(self.dk, slopes_nQT.transpose(1, 2), self.q, beta=self.beta, alpha=self.scale, out=self.dk)


class Scratch:
    """Memory for heads of one size, and the blocks of a sequence in it, from its first token on."""

    def __init__(self, like: Tensor, size: Size) -> None:
        self.size, shared, whole = size, size.R, [(0, size.S)]
        self.q, self.gradient = (Heads(like, size, shared, whole) for _ in range(2))
        self.k, self.v, self.dk, self.dv = (Heads(like, size, 1, whole) for _ in range(4))
        self.made = Heads(like, size, shared, size.spans)  # products write faster into memory without gaps
        common, slopes = like.new_empty(max(size.scores)), like.new_empty(max(size.scores))
        later = like.new_full((_SIDE, _SIDE), -math.inf).triu_(1).repeat_interleave(shared, 0)
        self.blocks: list[Block] = []
        for (start, stop), made in zip(size.spans, self.made.rows, strict=True):
            queries = slice(start * shared, stop * shared)
            scores = _scores(common, size, start, stop)
            q, gradient = (heads.rows[0][:, queries] for heads in (self.q, self.gradient))
            k, v, dk, dv = (heads.rows[0][:, :stop] for heads in (self.k, self.v, self.dk, self.dv))
            room = slopes[: scores.whole.numel()].view_as(scores.whole)
            hidden = later[: (stop - start) * shared, : stop - start]
            beta = 0.0 if stop == size.S else 1.0
            self.blocks.append(
                Block(q, gradient, made, k, v, dk, dv, scores, room, hidden, beta, 1.0 / math.sqrt(size.d))
            )


def all_scores(like: Tensor, size: Size) -> list[Scores]:
    """Memory for all blocks at once, each of which begins where a line of a cache does."""
    rooms = [-(-count // _LINE) * _LINE for count in size.scores]
    pieces = like.new_empty(sum(rooms)).split(rooms)
    return [_scores(piece, size, *span) for piece, span in zip(pieces, size.spans, strict=True)]


def _scores(memory: Tensor, size: Size, start: int, stop: int) -> Scores:
    whole_nQT = memory[: size.n * (stop - start) * size.R * stop].view(size.n, (stop - start) * size.R, stop)
    return Scores(whole_nQT, whole_nQT[:, :, start:])


ROOM = 12 << 20  # bytes


class Kept:
    """The softmax of some heads' scores, block by block."""

    def __init__(self, like: Tensor, size: Size) -> None:
        self.size, self.bytes = size, like.itemsize * sum(size.scores)
        self.scores: list[Scores] = all_scores(like, size)


class Desk:
    """Scratch for heads of one size at a time, and at most ``room`` bytes of scores: what has no room is made again by
    its backward, of the same bits. A copy has memory of its own."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._scratch: list[Scratch] = []
        self._free: list[Kept] = []
        self._lent: WeakSet[Kept] = WeakSet()  # what is dropped with its graph, no backward gives back

    def __reduce__(self) -> tuple[Any, ...]:
        return Desk, (self._room,)

    @contextmanager
    def scratch(self, like: Tensor, size: Size) -> Iterator[Scratch]:
        """Scratch that nobody else has meanwhile: another thread gets its own."""
        found = self._scratch.pop() if self._scratch else None
        if found is None or found.size != size:
            found = Scratch(like, size)
        yield found
        self._scratch[:] = [found]

    def lend(self, like: Tensor, size: Size) -> Kept | None:
        """Memory for the scores of such heads, or None where there is no room."""
        self._free = [kept for kept in self._free if kept.size == size]
        if not self._free:
            if self._room < like.itemsize * sum(size.scores) + sum(lent.bytes for lent in self._lent):
                return None
            self._free.append(Kept(like, size))
        kept = self._free.pop()
        self._lent.add(kept)
        return kept

    def take_back(self, kept: Kept) -> None:
        """Somebody may have it again."""
        self._lent.discard(kept)
        self._free.append(kept)
