"""How many snapshots of an actor's state are in memory at a time."""

from __future__ import annotations

from raypar.actors.specs.run import Run

_IN_TURN = 2  # of its state: the last one is whole while the next one is written
_PINNED = 1  # one more of its state if copies are sent: the one of the same step as the copies of others


def snapshot_counts(run: Run) -> tuple[int, int]:
    """Return the snapshots that an actor keeps in memory on one node, and those that come to them on several nodes.

    On several nodes it keeps copies of another actor's, as large as its own or so: one whole, and one that arrives; of
    every step's, one more.

    Args:
        run: The run.
    """
    if not run.max_failures or not run.snapshot_every:
        return 0, 0
    return _IN_TURN, _PINNED + kept_copies(run) if run.buddy_every else 0


def kept_copies(run: Run) -> int:
    """Return how many copies an actor's buddy keeps: the next one must not replace the last one that all have."""
    return 3 if max(run.buddy_every, run.snapshot_every) == 1 else 2
