"""Scratch memory and block arithmetic of attention in blocks: a few heads of a sample at a time, within a CPU cache.

Shapes: B microbatch, S sequence, N query heads, K heads of keys and values, R = N/K query heads for each head of keys,
d width of a head; n heads of keys processed at once. For a block of queries: t its tokens, Q = t R its queries, T all
tokens up to its last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import softmax_gradient_
from raypar.actors.specs.model import BLOCK_TOKENS, KEPT_SCORES_BYTES

_LINE = 16  # float32s in a cache line: a product may sum in another order if its memory starts elsewhere in a line

HeadGroup = tuple[int, slice]  # index of a sample, and a slice of its heads of keys
Span = tuple[int, int]  # a range of tokens: the first, and the one after the last


class Size(NamedTuple):
    """Size of a group of heads: n heads of keys, S tokens, R query heads for each head of keys, d width of a head."""

    n: int
    S: int
    R: int
    d: int

    @property
    def spans(self) -> list[Span]:
        """The range of tokens of each block of queries."""
        return [(start, min(start + BLOCK_TOKENS, self.S)) for start in range(0, self.S, BLOCK_TOKENS)]

    @property
    def scores(self) -> list[int]:
        """The number of scores of each block."""
        return [self.n * (stop - start) * self.R * stop for start, stop in self.spans]


class Heads:
    """Copy of a few heads of a tensor (B, N, S, d), cut into pieces along the tokens.

    Args:
        like: A tensor with the dtype and the device of the copy.
        size: Size of the group of heads.
        shared: Heads of the tensor for each head of keys: R for queries, 1 for keys and values.
        spans: The range of tokens of each piece.

    Attributes:
        rows: Each piece as (n, t shared, d). The query heads that share a head of keys are adjacent rows of a token.
    """

    def __init__(self, like: Tensor, size: Size, shared: int, spans: Sequence[Span]) -> None:
        self._shared = shared
        self._pieces = [(slice(*span), like.new_empty(size.n, span[1] - span[0], shared, size.d)) for span in spans]
        self.rows = [piece_ntRd.flatten(1, 2) for _, piece_ntRd in self._pieces]

    def grouped(self, x_BNSd: Tensor) -> Tensor:
        """Return a view (B, K, S, shared, d) of a tensor (B, N, S, d), which a HeadGroup can index."""
        grouped_BKSRd: Tensor = x_BNSd.unflatten(1, (-1, self._shared)).transpose(2, 3)
        return grouped_BKSRd

    def fetch(self, all_BKSRd: Tensor, group: HeadGroup) -> None:
        """Copy the heads of a group from a tensor that ``grouped`` returned."""
        for tokens, piece_ntRd in self._pieces:
            piece_ntRd.copy_(all_BKSRd[(*group, tokens)])

    def put_back(self, all_BKSRd: Tensor, group: HeadGroup) -> None:
        """Copy the heads of a group back into a tensor that ``grouped`` returned."""
        for tokens, piece_ntRd in self._pieces:
            all_BKSRd[(*group, tokens)].copy_(piece_ntRd)


class Scores(NamedTuple):
    """Scores of a block: ``whole`` (n, Q, T), and ``corner`` (n, Q, t), the view of it for the block's own tokens.

    Only the corner contains scores of later tokens, which have to be masked.
    """

    whole: Tensor
    corner: Tensor


class QueryRange(NamedTuple):
    """A range of queries of a few heads, with the keys and values that they see. All tensors are views of a Scratch.

    Attributes:
        q: Queries (n, Q, d).
        gradient: Gradient of the attention output (n, Q, d).
        made: (n, Q, d): in the forward the attention output, in the backward the gradient of the queries.
        k, v: Keys and values (n, T, d).
        dk, dv: Their gradients (n, T, d), to which every block adds its part.
        scores: Memory for the scores, which all blocks share.
        slopes: Memory for the gradient of the scores (n, Q, T), which all blocks share.
        later: Causal mask (Q, t) of the corner: -inf where the key is later than the query, else 0.
        beta: 0 for the last block, which is the first to run in the backward and so overwrites dk and dv; 1 for the
            others, which add to them.
        scale: 1 / sqrt(d).
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
        """Compute the attention output into ``made``. ``scores`` is memory that holds the softmax afterwards."""
        torch.bmm(self.weights(scores), self.v, out=self.made)

    def weights(self, scores: Scores) -> Tensor:
        """Compute the causal softmax of the scores (n, Q, T) in the memory of ``scores``, and return it."""
        torch.baddbmm(scores.whole, self.q, self.k.transpose(1, 2), beta=0, alpha=self.scale, out=scores.whole)
        scores.corner.add_(self.later)
        return torch.softmax(scores.whole, -1, out=scores.whole)

    def back(self, weights_nQT: Tensor) -> None:
        """Compute the gradient of the queries into ``made``, and add those of keys and values to ``dk`` and ``dv``.

        Args:
            weights_nQT: The softmax, as ``weights`` returned it.
        """
        slopes_nQT = self.slopes
        torch.bmm(self.gradient, self.v.transpose(1, 2), out=slopes_nQT)
        torch.baddbmm(self.dv, weights_nQT.transpose(1, 2), self.gradient, beta=self.beta, out=self.dv)
        softmax_gradient_(slopes_nQT, weights_nQT)
        torch.baddbmm(self.made, slopes_nQT, self.k, beta=0, alpha=self.scale, out=self.made)
        torch.baddbmm(self.dk, slopes_nQT.transpose(1, 2), self.q, beta=self.beta, alpha=self.scale, out=self.dk)


class Scratch:
    """Working memory for a group of heads, and the blocks of the sequence as views of it, first tokens first."""

    def __init__(self, like: Tensor, size: Size) -> None:
        self.size, shared, whole = size, size.R, [(0, size.S)]
        self.q, self.gradient = (Heads(like, size, shared, whole) for _ in range(2))
        self.k, self.v, self.dk, self.dv = (Heads(like, size, 1, whole) for _ in range(4))
        self.made = Heads(like, size, shared, size.spans)  # products write faster to dense memory
        common, slopes = like.new_empty(max(size.scores)), like.new_empty(max(size.scores))
        later = like.new_full((BLOCK_TOKENS, BLOCK_TOKENS), -math.inf).triu_(1).repeat_interleave(shared, 0)
        self.blocks: list[QueryRange] = []
        for (start, stop), made in zip(size.spans, self.made.rows, strict=True):
            queries = slice(start * shared, stop * shared)
            scores = _scores(common, size, start, stop)
            q, gradient = (heads.rows[0][:, queries] for heads in (self.q, self.gradient))
            k, v, dk, dv = (heads.rows[0][:, :stop] for heads in (self.k, self.v, self.dk, self.dv))
            score_gradient = slopes[: scores.whole.numel()].view_as(scores.whole)
            hidden = later[: (stop - start) * shared, : stop - start]
            beta = 0.0 if stop == size.S else 1.0
            views = q, gradient, made, k, v, dk, dv, scores, score_gradient, hidden
            self.blocks.append(QueryRange(*views, beta, 1.0 / math.sqrt(size.d)))


def _scores(memory: Tensor, size: Size, start: int, stop: int) -> Scores:
    whole_nQT = memory[: size.n * (stop - start) * size.R * stop].view(size.n, (stop - start) * size.R, stop)
    return Scores(whole_nQT, whole_nQT[:, :, start:])


class SoftmaxMemory:
    """Memory that keeps the softmax of a group of heads from the forward to the backward.

    Each block's part starts on a cache line.
    """

    def __init__(self, like: Tensor, size: Size) -> None:
        self.size, self.bytes = size, like.itemsize * sum(size.scores)
        padded = [-(-count // _LINE) * _LINE for count in size.scores]
        parts = like.new_empty(sum(padded)).split(padded)
        self.scores = [_scores(part, size, *span) for part, span in zip(parts, size.spans, strict=True)]


class ScratchAllocator:
    """Allocator of the memory for attention in blocks: reused scratch memory, and a budget for kept softmaxes.

    A softmax beyond the budget is recomputed by its backward, with the same bits. A copy (deepcopy, pickle) of an
    allocator starts with no memory.

    Args:
        budget: Bytes of kept softmaxes, at most.
    """

    def __init__(self, budget: int = KEPT_SCORES_BYTES) -> None:
        self._budget = budget
        self._scratch: list[Scratch] = []
        self._free: list[SoftmaxMemory] = []
        self._in_use: WeakSet[SoftmaxMemory] = WeakSet()  # weak: a graph may be dropped without a backward

    def __reduce__(self) -> tuple[Any, ...]:
        return ScratchAllocator, (self._budget,)

    @contextmanager
    def working(self, like: Tensor, size: Size) -> Iterator[Scratch]:
        """Yield scratch memory for the time of the context. A second thread gets other memory meanwhile."""
        found = self._scratch.pop() if self._scratch else None
        if found is None or found.size != size:
            found = Scratch(like, size)
        yield found
        self._scratch[:] = [found]

    def softmax(self, like: Tensor, size: Size) -> SoftmaxMemory | None:
        """Return memory that keeps the softmax of a group of heads, or None if the budget is used up."""
        self._free = [kept for kept in self._free if kept.size == size]
        if not self._free:
            if self._budget < like.itemsize * sum(size.scores) + sum(used.bytes for used in self._in_use):
                return None
            self._free.append(SoftmaxMemory(like, size))
        kept = self._free.pop()
        self._in_use.add(kept)
        return kept

    def free(self, kept: SoftmaxMemory) -> None:
        """Free memory that ``softmax`` returned, for the next call."""
        self._in_use.discard(kept)
        self._free.append(kept)
