"""The KV cache: keys and values that attention keeps while it generates text, so each token costs one token's work.

Shapes: B sequences, S tokens, T positions of the cache, N query heads, K heads of keys and values, d width of a head.
A sequence's token at position p is in slot p, so sequences of a batch may have unequal lengths: shorter ones are
padded on the right, and a padded slot is overwritten before a query sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.tensors import nbytes


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
        # Zeros after them, because a weight of 0 times uninitialised memory could be NaN.
        further = 0, 0, 0, max(0, self._slots - k_BKSd.shape[2])
        self._kept[layer] = F.pad(k_BKSd, further), F.pad(v_BKSd, further)

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

    def bias(self, dtype: torch.dtype, slopes: Sequence[float], window: int | None) -> Tensor:
        """Return the bias of the scores of the next tokens, (B, N or 1, 1, reach), with -inf for slots they do not see.

        Args:
            dtype: The dtype of the scores.
            slopes: ALiBi's slope of each query head; empty without ALiBi.
            window: Number of tokens that a query sees, its own and those right before it; None for all.
        """
        unseen_BT = (self.distance < 0) | (self.distance >= (self.reach if window is None else window))
        slopes_N1 = torch.tensor(slopes or [0.0], dtype=dtype, device=self.distance.device)[:, None]
        return (-slopes_N1 * self.distance[:, None]).masked_fill(unseen_BT[:, None], -math.inf)[:, :, None]


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
