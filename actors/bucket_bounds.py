"""How many bytes of gradients are in buckets at a time, where replicas cut tensors: for actors and the planner."""

from __future__ import annotations

UNDER_WAY = 2  # buckets that are being reduced, beside the one that is filled; more would need more memory


def most_in_buckets(largest: int, unit: int, full: int) -> int:
    """Return the most bytes of gradients that may be in buckets at a time, beside a round that is collected.

    A bucket waits until those that are under way have left memory for it. A few full buckets always have it.

    Args:
        largest: The bytes of the largest gradient of a stage.
        unit: Those of the gradients of a usual unit of it.
        full: The most bytes of a bucket that has several gradients.
    """
    return max(largest + unit, (UNDER_WAY + 1) * full)
