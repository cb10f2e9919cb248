"""Sizes of attention in blocks on a CPU, for the layers and for the plan of their memory."""

from __future__ import annotations

SIDE = 64  # tokens in a block of queries
KEPT_BYTES = 12 << 20  # bytes of scores that an actor keeps for backwards at most, by default
# Below these sizes torch's own kernel is faster.
LEAST = 256  # tokens in the sequence
ROWS = 2048  # queries of a sample, over all heads
