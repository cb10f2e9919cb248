"""Routes from one placement of a tensor to another with the fewest bytes. Imports no torch.

On an axis of actors a tensor is "R" (replicated: each has it), "P" (partial: it is the sum of the actors' tensors) or
"S0", "S1", ... (split: each has its part along that dim). Over several axes it has one of these on each; of axes that
split the same dim, each later one splits the parts of the earlier ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Placement = str
State = tuple[Placement, ...]


class CollectiveStep(NamedTuple):
    """A collective on one axis.

    Attributes:
        axis: Number of the axis.
        before: The placement before.
        after: The placement after.
        sent: Elements that each member sends.
    """

    axis: int
    before: Placement
    after: Placement
    sent: float


def split_dim(placement: Placement) -> int | None:
    """Return the dim along which a tensor is split; None if it is not."""
    return int(placement[1:]) if placement.startswith("S") else None


def route(before: State, after: State, shape: Sequence[int], sizes: Sequence[int]) -> list[CollectiveStep]:
    """Find the collectives that lead from one placement to another and send the fewest elements; of these, the fewest.

    They are: a slice, which sends nothing; an all-gather; an all-to-all; a reduce-scatter; and an all-reduce.

    Args:
        before: By axis, the placement of the tensor.
        after: By axis, the placement of the result.
        shape: Shape of the whole tensor.
        sizes: By axis, the number of its members.

    Raises:
        ValueError: There is no way: parts would not be equal, or a partial sum is wanted.

    Source: Xu et al. 2021, "GSPMD", section 4.5, for the cases; Dijkstra 1959 for the search.
    """
    queue: list[tuple[float, int, State, tuple[CollectiveStep, ...]]] = [(0.0, 0, tuple(before), ())]
    done = set[State]()
    while queue:
        sent, count, state, steps = heapq.heappop(queue)
        if state == tuple(after):
            return list(steps)
        if state in done:
            continue
        done.add(state)
        for step in steps_from(state, shape, sizes):
            then = (*state[: step.axis], step.after, *state[step.axis + 1 :])
            heapq.heappush(queue, (sent + step.sent, count + 1, then, (*steps, step)))
    raise ValueError(
        f"a tensor {list(shape)} can't go from {', '.join(before)} to {', '.join(after)} over {list(sizes)} actors: "
        "parts must be equal, and nothing becomes a partial sum"
    )


def steps_from(state: State, shape: Sequence[int], sizes: Sequence[int]) -> Iterator[CollectiveStep]:
    """Yield the collectives on one axis that a placement allows. The arguments are those of ``route``."""
    parts = math.prod(size for placement, size in zip(state, sizes, strict=True) if placement.startswith("S"))
    here = math.prod(shape) / parts
    for axis, (placement, size) in enumerate(zip(state, sizes, strict=True)):
        dim = split_dim(placement)
        if dim is not None and _has_inner(state, axis, dim):
            continue  # its parts would not follow each other
        if dim is not None:
            yield CollectiveStep(axis, placement, "R", (size - 1) * here)
        if placement == "P":
            yield CollectiveStep(axis, placement, "R", 2 * (size - 1) / size * here)
        for other in range(len(shape)):
            if other == dim or _has_inner(state, axis, other) or shape[other] % (size * _ways(state, sizes, other)):
                continue
            yield CollectiveStep(axis, placement, f"S{other}", 0.0 if placement == "R" else (size - 1) / size * here)


def _has_inner(state: State, axis: int, dim: int) -> bool:
    """Return whether a later axis splits a dim."""
    return f"S{dim}" in state[axis + 1 :]


def _ways(state: State, sizes: Sequence[int], dim: int) -> int:
    """Return into how many parts a dim is split."""
    return math.prod(size for placement, size in zip(state, sizes, strict=True) if placement == f"S{dim}")
