"""The KV cache: keys and values that attention keeps while it generates text, so each token costs one token's work.

Shapes: B sequences, S tokens, T positions of the cache, N query heads, K heads of keys and values, d width of a head.
A sequence's token at position p is in slot p, so sequences of a batch may have unequal lengths: shorter ones are
padded on the right, and a padded slot is overwritten before a query sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raypar.actors.tensors import bent, in_fp32, nbytes


class KVCache:
    """The sequences that one actor generates as a batch: their caches, and the positions of their next tokens.

    Args:
        slots: Number of positions T that the caches have.

    Attributes:
        at: Position (B,) int64 of each sequence's next token; None while the prompts are read, from position 0 on.
        reach: One more than the largest of these positions.
        distance: Distance from each slot to the sequence's next token, (B, reach) int64; negative for later slots.
    """

    def __init__(self, slots: int) -> None:
        self.at: Tensor | None = None
        self.reach = 0
        self._slots = slots
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def go_to(self, at: Tensor, device: torch.device) -> None:
        """Set the positions of the next tokens.

        Args:
            at: The positions (B,) int64, on the host.
            device: Where the layers compute.
        """
        self.reach = int(at.max()) + 1
        self.at, self._rows = at.to(device), torch.arange(len(at), device=device)
        self.distance = self.at[:, None] - torch.arange(self.reach, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(nbytes(kept) for pair in self._kept.values() for kept in pair)

    def fill(self, layer: nn.Module, k_BKSd: Tensor, v_BKSd: Tensor) -> None:
        """Keep the keys and values of the first S positions of a layer."""
        (B, K, S, d), made = k_BKSd.shape, list[Tensor]()
        for part_BKSd in (k_BKSd, v_BKSd):
            # Zeros, because a weight of 0 times uninitialised memory could be NaN.
            cache_BKTd = part_BKSd.new_zeros(B, K, max(self._slots, S), d)
            cache_BKTd[:, :, :S] = part_BKSd
            made.append(cache_BKTd)
        self._kept[layer] = made[0], made[1]

    def extended(self, layer: nn.Module, k_BKSd: Tensor, v_BKSd: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the key and the value of each sequence's next token; return those of all positions up to ``reach``.

        Args:
            layer: The layer.
            k_BKSd: The keys. Sequence parallelism repeats the token, so only the first of S is kept.
            v_BKSd: The values.
        """
        assert self.at is not None
        for cache_BKTd, part_BKSd in zip(self._kept[layer], (k_BKSd, v_BKSd), strict=True):
            cache_BKTd[self._rows, :, self.at] = part_BKSd[:, :, 0]
        k_BKTd, v_BKTd = self._kept[layer]
        return k_BKTd[:, :, : self.reach], v_BKTd[:, :, : self.reach]


class Incremental:
    """Base of modules that depend on positions or other tokens: with ``sequences`` they compute the next tokens.

    Attributes:
        sequences: The sequences that the next forward continues; None for whole sequences, as in training.
    """

    sequences: KVCache | None = None


def incremental(layers: Iterable[nn.Module]) -> list[Incremental]:
    """Return the modules of layers that depend on positions or other tokens."""
    return [part for layer in layers for part in layer.modules() if isinstance(part, Incremental)]


@contextmanager
def going_on(modules: Iterable[Incremental], sequences: KVCache) -> Iterator[None]:
    """Let modules continue sequences within this context.

    Args:
        modules: The modules, as ``incremental`` returns them.
        sequences: The sequences.
    """
    for one in modules:
        one.sequences = sequences
    try:
        yield
    finally:
        for one in modules:
            one.sequences = None


def attend_to_cache(
    q_BNSd: Tensor,
    k_BKTd: Tensor,
    v_BKTd: Tensor,
    distance_BT: Tensor,
    slopes: list[float] | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v for queries at given positions, each of which sees slots 0 to its own.

    Args:
        q_BNSd: Queries. All S of a sequence are at the same position.
        k_BKTd: Keys by position.
        v_BKTd: Values by position.
        distance_BT: Distance from each slot to the position of the sequence's queries.
        slopes: ALiBi's slope of each query head; None for no ALiBi.
        window: Number of tokens that a query sees, its own and those right before it; None for all.
        cap: Soft cap of the scores; None for no cap.

    Returns:
        The attention (B, N, S, d).
    """
    (B, N, S, d), (K, T) = q_BNSd.shape, k_BKTd.shape[1:3]
    q_BKRd = (q_BNSd / math.sqrt(d)).reshape(B, K, N // K * S, d)
    scores_BNST = bent(in_fp32(q_BKRd @ k_BKTd.transpose(-2, -1)).view(B, N, S, T), cap)
    if slopes is not None:
        slopes_N1 = torch.tensor(slopes, dtype=scores_BNST.dtype, device=q_BNSd.device)[:, None]
        scores_BNST = scores_BNST - (slopes_N1 * distance_BT[:, None])[:, :, None]
    unseen_BT = distance_BT < 0 if window is None else (distance_BT < 0) | (distance_BT >= window)
    scores_BNST = scores_BNST.masked_fill(unseen_BT[:, None, None], -math.inf)
    weights_BKRT = scores_BNST.softmax(dim=-1).to(v_BKTd.dtype).view(B, K, N // K * S, T)
    return (weights_BKRT @ v_BKTd).view(B, N, S, d)
