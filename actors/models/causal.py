"""Causal attention on a CPU out of torch's batched products: some queries at a time, with all keys that they see.

Shapes: B microbatch, S sequence, N heads of queries, K of keys and values, R = N / K queries of a token for one of
these, d width of a head; n heads of keys at once, Q queries of a block, T tokens up to its last, t of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.actors.products import undisturbed

_SIDE = 64  # tokens of a block of queries
_ROOM = 1 << 17  # scores of a block, of some heads: 512 KiB, half of a cache of which a backward needs two halves
_LEAST = 256  # tokens of a sequence, and
_ROWS = 2048  # queries of all heads: for fewer torch's kernel is the faster one


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
        ctx.save_for_backward(q_BNSd, k_BKSd, v_BKSd)
        seen_BNSd = _by_token(q_BNSd)  # before scratch is taken: what stays is not to lie behind that
        shared, scale = q_BNSd.shape[1] // k_BKSd.shape[1], 1.0 / math.sqrt(k_BKSd.shape[3])
        q, out = _by_head(q_BNSd, shared), _of_keys(seen_BNSd, shared)
        blocks = _blocks(k_BKSd, shared)
        for heads in _some_heads(k_BKSd, shared):
            k_ndS, v_nSd = k_BKSd[heads].transpose(1, 2), v_BKSd[heads]
            pieces = q[heads].split(_SIDE * shared, 1), out[heads].split(_SIDE, 1)
            for block, q_nQd, out_ntRd in zip(blocks, *pieces, strict=True):
                weights_nQT = block.weights(q_nQd, k_ndS, scale)
                torch.bmm(weights_nQT, v_nSd[:, : block.stop], out=block.made)
                out_ntRd.copy_(block.made.view(out_ntRd.shape))
        return seen_BNSd

    @staticmethod
    def backward(ctx: Any, gradient_BNSd: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled():  # what follows would be a constant to who differentiates again
            raise RuntimeError("attention in blocks has no gradients of gradients: use attention='materialised'")
        q_BNSd, k_BKSd, v_BKSd = saved = ctx.saved_tensors
        dq_BNSd, dk_BKSd, dv_BKSd = map(_by_token, saved)
        shared, scale = q_BNSd.shape[1] // k_BKSd.shape[1], 1.0 / math.sqrt(k_BKSd.shape[3])
        q, gradient, dq = _by_head(q_BNSd, shared), _by_head(gradient_BNSd, shared), _of_keys(dq_BNSd, shared)
        blocks = _blocks(k_BKSd, shared)
        backs = _backs(blocks, k_BKSd)
        dk_nSd, dv_nSd = k_BKSd.new_empty(2, *backs[-1].added.shape)
        for heads in _some_heads(k_BKSd, shared):
            k_nSd, v_nSd = k_BKSd[heads], v_BKSd[heads]
            k_ndS, v_ndS = k_nSd.transpose(1, 2), v_nSd.transpose(1, 2)
            pieces = (x[heads].split(_SIDE * shared, 1) for x in (q, gradient))
            every = [*zip(blocks, backs, *pieces, dq[heads].split(_SIDE, 1), strict=True)]
            for block, back, q_nQd, gradient_nQd, dq_ntRd in reversed(every):
                weights_nQT, slopes_nQT, made_nQd = block.weights(q_nQd, k_ndS, scale), back.slopes, block.made
                torch.bmm(gradient_nQd, v_ndS[:, :, : block.stop], out=slopes_nQT)
                back.add(dv_nSd, weights_nQT, gradient_nQd, 1.0)
                torch._softmax_backward_data(slopes_nQT, weights_nQT, -1, torch.float32, grad_input=slopes_nQT)
                torch.baddbmm(made_nQd, slopes_nQT, k_nSd[:, : block.stop], beta=0, alpha=scale, out=made_nQd)
                dq_ntRd.copy_(made_nQd.view(dq_ntRd.shape))
                back.add(dk_nSd, slopes_nQT, q_nQd, scale)
            dk_BKSd[heads].copy_(dk_nSd)
            dv_BKSd[heads].copy_(dv_nSd)
        return dq_BNSd, dk_BKSd, dv_BKSd


class _Block(NamedTuple):
    """Neighbouring queries, and scratch for what some heads make of them.

    stop    the first token that none of them sees
    scores  (n, Q, T)
    corner  (n, Q, t): those with keys of tokens among them; ``later`` (Q, t) is -inf where such a key is later, else 0
    made    (n, Q, d): what they see, or their gradient
    """

    stop: int
    scores: Tensor
    corner: Tensor
    later: Tensor
    made: Tensor

    def weights(self, q_nQd: Tensor, k_ndS: Tensor, scale: float) -> Tensor:
        """The softmax of the scores, (n, Q, T), where the scores were."""
        scores = self.scores
        torch.baddbmm(scores, q_nQd, k_ndS[:, :, : self.stop], beta=0, alpha=scale, out=scores)
        self.corner.add_(self.later)
        return torch.softmax(scores, -1, out=scores)


def _blocks(k_BKSd: Tensor, shared: int) -> list[_Block]:
    """The blocks of a sequence, in the same memory."""
    n, S, d = _at_once(k_BKSd, shared), *k_BKSd.shape[2:]
    scores, made = (k_BKSd.new_empty(n * _SIDE * shared * size) for size in (S, d))
    later = k_BKSd.new_full((_SIDE, _SIDE), -math.inf).triu_(1).repeat_interleave(shared, 0)
    found = []
    for start in range(0, S, _SIDE):
        stop = min(start + _SIDE, S)
        Q = (stop - start) * shared
        scores_nQT = scores[: n * Q * stop].view(n, Q, stop)
        of_block = scores_nQT[:, :, start:], later[:Q, : stop - start], made[: n * Q * d].view(n, Q, d)
        found.append(_Block(stop, scores_nQT, *of_block))
    return found


class _Back(NamedTuple):
    """What a backward needs for a block besides: room for the gradient of its scores (n, Q, T), and for what it adds
    to that of the keys or values that it sees (n, T, d). The block of the last token, which comes first, sees all."""

    slopes: Tensor
    added: Tensor
    is_last: bool

    def add(self, total_nSd: Tensor, scores_nQT: Tensor, x_nQd: Tensor, scale: float) -> None:
        """Add this product to the total of all blocks."""
        made = total_nSd if self.is_last else self.added
        torch.baddbmm(made, scores_nQT.transpose(1, 2), x_nQd, beta=0, alpha=scale, out=made)
        if not self.is_last:
            total_nSd[:, : made.shape[1]].add_(made)


def _backs(blocks: list[_Block], k_BKSd: Tensor) -> list[_Back]:
    """For blocks, in the same memory."""
    n, S, d = blocks[-1].scores.shape[0], *k_BKSd.shape[2:]
    slopes = k_BKSd.new_empty(max(block.scores.numel() for block in blocks))
    added = k_BKSd.new_empty(n * S * d)
    return [
        _Back(slopes[: scores.numel()].view(scores.shape), added[: n * stop * d].view(n, stop, d), stop == S)
        for stop, scores, *_ in blocks
    ]


def _at_once(k_BKSd: Tensor, shared: int) -> int:
    """How many heads of keys: a divisor of theirs."""
    K, S = k_BKSd.shape[1:3]
    most = max(1.0, 1.5 * _ROOM / (_SIDE * shared * S))
    return max(n for n in range(1, K + 1) if K % n == 0 and n <= most)


def _some_heads(k_BKSd: Tensor, shared: int) -> Iterator[tuple[int, slice]]:
    n = _at_once(k_BKSd, shared)
    return ((b, slice(first, first + n)) for b in range(k_BKSd.shape[0]) for first in range(0, k_BKSd.shape[1], n))


def _by_head(x_BNSd: Tensor, shared: int) -> Tensor:
    """(B, K, S R, d): of each head of keys, the queries of a token that share it behind one another."""
    return x_BNSd if shared == 1 else _of_keys(x_BNSd, shared).flatten(2, 3)


def _of_keys(x_BNSd: Tensor, shared: int) -> Tensor:
    """A view (B, K, S, R, d)."""
    of_keys: Tensor = x_BNSd.unflatten(1, (-1, shared)).transpose(2, 3)
    return of_keys


def _by_token(like_BNSd: Tensor) -> Tensor:
    """Room for (B, N, S, d), which lies token by token."""
    B, N, S, d = like_BNSd.shape
    return like_BNSd.new_empty_strided((B, N, S, d), (S * N * d, d, N * d, 1))
