"""Which layers go to which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.types import Split

MOST_BALANCED = 2_000_000  # layers x stages that are balanced; it takes about half a microsecond for each


def split_faults(split: Split, num_layers: int, num_stages: int) -> list[str]:
    """Everything that is wrong with putting so many layers on so many stages."""
    if num_stages > num_layers:
        return [
            f"{num_stages} stages for {num_layers} layers: use at most {num_layers} (ranks x chunks), or more layers"
        ]
    if split == "balanced" and num_layers * num_stages > MOST_BALANCED:
        return [f"split is 'balanced' for {num_layers} layers on {num_stages} stages: use 'even' for so many"]
    if isinstance(split, str):
        return (
            [] if split in ("even", "balanced") else [f"split is {split!r}: use 'even', 'balanced' or a list of counts"]
        )
    found = []
    if len(split) != num_stages:
        found.append(f"split names {len(split)} stages, the schedule has {num_stages}: give one count a stage")
    if sum(split) != num_layers:
        found.append(f"split adds up to {sum(split)} layers, the model has {num_layers}: every layer goes to one stage")
    if min(split, default=1) < 1:
        found.append("split leaves a stage without layers: every count must be at least 1")
    return found


def split_layers(split: Split, costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, contiguous and in order; ``costs`` has one entry a layer."""
    if split == "even":
        base, extra = divmod(len(costs), num_stages)
        counts: Sequence[int] = [base + (stage < extra) for stage in range(num_stages)]
    elif split == "balanced":
        counts = _balanced(costs, num_stages)
    else:
        assert not isinstance(split, str)
        counts = split
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def transformer_costs(model: Transformer) -> tuple[float, ...]:
    """Forward FLOPs a token of each block; the first counts the embedding too, the last the head.

    A block takes two for each weight of a matrix, and ``core_cost``: 24 h^2 + 4 s h for a GPT with an MLP of 4 h. The
    head takes 2 h V, looking up and adding embeddings about 2 h.
    """
    h = model.hidden
    projections = 4 * h**2 + 4 * h * (h // model.heads * model.num_kv_heads)
    block = projections + core_cost(model) + 2 * model.mlp_matrices * h * model.mlp_width
    costs = [float(block)] * model.layers
    costs[0] += 2 * h
    costs[-1] += 2 * h * model.vocab
    return tuple(costs)


def core_cost(model: Transformer) -> float:
    """Forward FLOPs a token of one block's attention core: the scores, and the sums of values, 2 s h each."""
    return float(4 * model.seq * model.hidden)


def _balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Counts whose dearest stage is as cheap as possible (the contiguous partition problem, by dynamic programming).

    The later a stage starts, the cheaper it is and the dearer those before it: the best start is where the two cross,
    and it moves only forward as the stage's end does.
    """
    total, n = [0.0, *accumulate(costs)], len(costs)
    best, cuts = total, list[list[int]]()
    for stage in range(2, num_stages + 1):
        found, cut, cross = [float("inf")] * (n + 1), [0] * (n + 1), stage - 1
        for end in range(stage, n + 1):
            while cross < end - 1 and total[end] - total[cross] > best[cross]:
                cross += 1
            starts = (max(cross - 1, stage - 1), cross)
            found[end], cut[end] = min((max(best[start], total[end] - total[start]), start) for start in starts)
        best = found
        cuts.append(cut)
    counts, end = [], n
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(counts)]
