"""Which keys a query sees, as functions of positions for ``chunked_attention``.

A mask takes the positions of some queries (S, 1) and of some keys (1, T), int64, and returns (S, T) bool: whether the
query sees the key. A function of your own may do the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mask = Callable[[Tensor, Tensor], Tensor]


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """Let a query see its own and earlier tokens."""
    return queries >= keys


def every(queries: Tensor, keys: Tensor) -> Tensor:
    """Let a query see all tokens."""
    return torch.ones_like(queries + keys, dtype=torch.bool)


def sliding_window(size: int) -> Mask:
    """Return the mask with which a query sees its own token and the ``size - 1`` before it.

    Source: Beltagy et al. 2020, "Longformer", section 3.1.
    """
    return lambda queries, keys: (queries >= keys) & (queries - keys < size)


def butterfly(block: int) -> Mask:
    """Return the causal mask of a flat block butterfly.

    Block i of the queries sees block j of the keys if i = j, or if i and j, written in binary, differ in one digit. Of
    n blocks a query thus sees about log2(n) instead of n.

    Args:
        block: Number of tokens in a block.

    Source: Chen et al. 2021, "Pixelated Butterfly", section 3.2.
    """

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        differ = (queries // block) ^ (keys // block)
        return ((differ & (differ - 1)) == 0) & (queries >= keys)

    return mask
