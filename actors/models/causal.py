"""Causal attention on a CPU out of torch's batched products: some queries at a time, with all keys that they see.

Shapes: B microbatch, S sequence, N heads of queries, K of keys and values, R = N / K queries of a token for one of
these, d width of a head; n heads of keys at once, Q queries of a block, T tokens up to its last, t of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.actors.products import columns, undisturbed

_SIDE = 64  # tokens of a block of queries
_ROOM = 1 << 17  # scores of a block, of some heads: 512 KiB, half of a cache of which a backward needs two halves
_LEAST = 256  # tokens of a sequence, and
_ROWS = 2048  # queries of all heads: for fewer torch's kernel is the faster one

_Place = tuple[int, slice]  # of a sample, and some of its heads


def serves(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
    """Whether ``attend`` is for these, and the faster one: float32 on one thread of a CPU, and not too small."""
    return (
        q_BNSd.shape[2] == k_BKSd.shape[2] >= _LEAST
        and q_BNSd.shape[1] * q_BNSd.shape[2] >= _ROWS
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (q_BNSd, k_BKSd, v_BKSd))
        and undisturbed(q_BNSd)
        and torch.get_num_threads() == 1
        and torch.backends.mkl.is_available()
    )


def attend(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v over what is not later: (B, N, S, d) and twice (B, K, S, d) -> (B, N, S, d).

    As torch's kernel it keeps no scores: a backward makes them again, block by block (Dao et al. 2022,
    "FlashAttention", section 3.1). What it returns lies token by token, as a projection of all heads wants it.
    """
    out: Tensor = _Causal.apply(q_BNSd, k_BKSd, v_BKSd)  # type: ignore[no-untyped-call]
    return out


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        """What the queries make of the values, block by block."""
        ctx.save_for_backward(q_BNSd, k_BKSd, v_BKSd)
        seen_BNSd = _by_token(q_BNSd)  # before scratch is taken: what stays is not to lie behind that
        places, n, shared = _some_heads(q_BNSd, k_BKSd)
        q, seen = _Near(q_BNSd, n, shared), _Near(seen_BNSd, n, shared)
        k, v = _Near(k_BKSd, n), _Near(v_BKSd, n)
        blocks = _blocks(q, k, v, seen)
        for place in places:
            for near in (q, k, v):
                near.fetch(place)
            for block in blocks:
                torch.bmm(block.weights(), block.v, out=block.made)
            seen.put_back(place)
        return seen_BNSd

    @staticmethod
    def backward(ctx: Any, gradient_BNSd: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all three; RuntimeError where gradients of gradients are wanted."""
        if torch.is_grad_enabled():  # what follows would be a constant to who differentiates again
            raise RuntimeError("attention in blocks has no gradients of gradients: use attention='materialised'")
        q_BNSd, k_BKSd, v_BKSd = saved = ctx.saved_tensors
        dq_BNSd, dk_BKSd, dv_BKSd = _rooms(saved)
        places, n, shared = _some_heads(q_BNSd, k_BKSd)
        q, gradient, dq = (_Near(x, n, shared) for x in (q_BNSd, gradient_BNSd, dq_BNSd))
        k, v, dk, dv = (_Near(x, n) for x in (k_BKSd, v_BKSd, dk_BKSd, dv_BKSd))
        backs = _backs(_blocks(q, k, v, dq), gradient, dk, dv)
        for place in places:
            for near in (q, k, v, gradient):
                near.fetch(place)
            for block, gradient_nQd, slopes_nQT, dk_nTd, dv_nTd, beta in backs:
                weights_nQT, scale = block.weights(), block.scale
                torch.bmm(gradient_nQd, block.v.transpose(1, 2), out=slopes_nQT)
                torch.baddbmm(dv_nTd, weights_nQT.transpose(1, 2), gradient_nQd, beta=beta, out=dv_nTd)
                torch._softmax_backward_data(slopes_nQT, weights_nQT, -1, torch.float32, grad_input=slopes_nQT)
                torch.baddbmm(block.made, slopes_nQT, block.k, beta=0, alpha=scale, out=block.made)
                torch.baddbmm(dk_nTd, slopes_nQT.transpose(1, 2), block.q, beta=beta, alpha=scale, out=dk_nTd)
            for near in (dq, dk, dv):
                near.put_back(place)
        return dq_BNSd, dk_BKSd, dv_BKSd


class _Near:
    """Some heads at a time of a tensor (B, N, S, d), in scratch that stays in a cache.

    rows_nSd  (n, S R, d): head by head, the queries of a token that share a head of keys behind one another
    """

    def __init__(self, x_BNSd: Tensor, n: int, shared: int = 1) -> None:
        self._all_BKSRd = x_BNSd.unflatten(1, (-1, shared)).transpose(2, 3)
        self._some_nSRd = x_BNSd.new_empty(n, *self._all_BKSRd.shape[2:])
        self.rows_nSd = self._some_nSRd.flatten(1, 2)

    def fetch(self, place: _Place) -> None:
        self._some_nSRd.copy_(self._all_BKSRd[place])

    def put_back(self, place: _Place) -> None:
        self._all_BKSRd[place].copy_(self._some_nSRd)


class _Block(NamedTuple):
    """Neighbouring queries of some heads, and the keys and values that they see.

    q       (n, Q, d)
    k, v    (n, T, d)
    made    (n, Q, d): what the queries make of that, or their own gradient
    scores  (n, Q, T), in memory that all blocks have in common
    corner  (n, Q, t): those with keys of tokens among them; ``later`` (Q, t) is -inf where such a key is later, else 0
    """

    q: Tensor
    k: Tensor
    v: Tensor
    made: Tensor
    scores: Tensor
    corner: Tensor
    later: Tensor
    scale: float

    def weights(self) -> Tensor:
        """The softmax of the scores, where they were."""
        torch.baddbmm(self.scores, self.q, self.k.transpose(1, 2), beta=0, alpha=self.scale, out=self.scores)
        self.corner.add_(self.later)
        return torch.softmax(self.scores, -1, out=self.scores)


def _blocks(q: _Near, k: _Near, v: _Near, made: _Near) -> list[_Block]:
    """The blocks of a sequence, from its first token on."""
    n, S, d = k.rows_nSd.shape
    shared = q.rows_nSd.shape[1] // S
    scores = k.rows_nSd.new_empty(n * _SIDE * shared * S)
    later = k.rows_nSd.new_full((_SIDE, _SIDE), -math.inf).triu_(1).repeat_interleave(shared, 0)
    found = []
    for start in range(0, S, _SIDE):
        stop = min(start + _SIDE, S)
        queries, Q = slice(start * shared, stop * shared), (stop - start) * shared
        scores_nQT = scores[: n * Q * stop].view(n, Q, stop)
        found.append(
            _Block(
                q.rows_nSd[:, queries],
                k.rows_nSd[:, :stop],
                v.rows_nSd[:, :stop],
                made.rows_nSd[:, queries],
                scores_nQT,
                scores_nQT[:, :, start:],
                later[:Q, : stop - start],
                1.0 / math.sqrt(d),
            )
        )
    return found


class _Back(NamedTuple):
    """What a backward needs of a block besides.

    gradient  (n, Q, d): that of what the queries made
    slopes    (n, Q, T): room for that of their scores
    dk, dv    (n, T, d): those of the keys and values that they see, to which every block adds its part
    beta      0 for the block that comes first: what is there is not of these heads
    """

    block: _Block
    gradient: Tensor
    slopes: Tensor
    dk: Tensor
    dv: Tensor
    beta: float


def _backs(blocks: list[_Block], gradient: _Near, dk: _Near, dv: _Near) -> list[_Back]:
    """For these, from the last one on: it sees all keys."""
    room = blocks[-1].scores.new_empty(max(block.scores.numel() for block in blocks))
    pieces = gradient.rows_nSd.split(blocks[0].q.shape[1], 1)
    found = []
    for block, of_block in zip(blocks, pieces, strict=True):
        slopes, T = room[: block.scores.numel()].view_as(block.scores), block.k.shape[1]
        seen = dk.rows_nSd[:, :T], dv.rows_nSd[:, :T]
        found.append(_Back(block, of_block, slopes, *seen, 0.0 if block is blocks[-1] else 1.0))
    return found[::-1]


def _some_heads(q_BNSd: Tensor, k_BKSd: Tensor) -> tuple[list[_Place], int, int]:
    """In which steps all heads are taken, how many heads of keys at once (a divisor of theirs), and R."""
    (B, N, S, _), K = q_BNSd.shape, k_BKSd.shape[1]
    shared = N // K
    most = max(1.0, 1.5 * _ROOM / (_SIDE * shared * S))
    n = max(n for n in range(1, K + 1) if K % n == 0 and n <= most)
    return [(b, slice(first, first + n)) for b in range(B) for first in range(0, K, n)], n, shared


def _rooms(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Room for gradients of these, token by token; if they are columns of one tensor, so is that."""
    d = values[0].shape[-1]
    rows = [x.transpose(1, 2).flatten(2) for x in values if x.stride(1) == d]
    whole = columns(rows) if len(rows) == len(values) else None
    if whole is None:
        return tuple(map(_by_token, values))
    made = torch.empty_like(whole).split([x.shape[-1] for x in rows], -1)
    return tuple(x.unflatten(-1, (-1, d)).transpose(1, 2) for x in made)


def _by_token(like_BNSd: Tensor) -> Tensor:
    """Room for (B, N, S, d), which lies token by token."""
    B, N, S, d = like_BNSd.shape
    return like_BNSd.new_empty_strided((B, N, S, d), (S * N * d, d, N * d, 1))
