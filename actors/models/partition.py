"""Split the layers of a model into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.types import Split

MOST_BALANCED = 2_000_000  # largest layers x stages for "balanced", which takes about 0.5 us for each

_FEW_STAGES = 16  # of which a message writes the counts


def split_faults(split: Split, num_layers: int, num_stages: int, num_ranks: int | None = None) -> list[str]:
    """Return a message for each fault of a split; an empty list if it is valid.

    Args:
        split: "even", "balanced", or the number of layers of each stage.
        num_layers: Number of layers to split.
        num_stages: Number of stages.
        num_ranks: Number of pipeline ranks; None if it is not known.
    """
    if num_stages > num_layers:
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        ways = "mesh.pp" if num_stages == num_ranks else "mesh.pp x chunks"
        fix = f"use {num_stages} layers or more, or set {ways} to {num_layers} at most"
        return [f"{num_stages} stages for {layers}: {fix}"]
    if split == "balanced" and num_layers * num_stages > MOST_BALANCED:
        return [f"split is 'balanced' for {num_layers} layers on {num_stages} stages: use 'even' for so many"]
    if isinstance(split, str):
        fix = "use 'even', 'balanced' or a list of counts"
        return [] if split in ("even", "balanced") else [f"split is {split!r}: {fix}"]
    found = []
    if len(split) != num_stages:
        found.append(f"split names {len(split)} stages, the schedule has {num_stages}")
    if sum(split) != num_layers:
        found.append(f"split adds up to {sum(split)} layers, the model has {num_layers}")
    if min(split, default=1) < 1:
        found.append("split leaves a stage without layers")
    if num_stages > _FEW_STAGES:
        return [f"{fault}: leave split out, or give a count for each stage" for fault in found]
    counts = tuple(len(layers) for layers in split_layers("even", [1.0] * num_layers, num_stages))
    return [f"{fault}: set split to {counts}, say, a count for each stage" for fault in found]


def split_layers(split: Split, costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Split layers into contiguous stages.

    Args:
        split: "even" (equal counts, the first stages larger by one), "balanced" (the most expensive stage is as cheap
            as possible), or the number of layers of each stage. It must have no ``split_faults``.
        costs: Relative cost of each layer.
        num_stages: Number of stages.

    Returns:
        The layer indices of each stage, in order.
    """
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
    """Return the forward FLOPs per token of each block. The first includes the embedding, the last the head.

    With hidden size h, sequence length s and vocabulary V: a block takes 2 FLOPs for each weight of its matrices, plus
    ``core_cost``. For a GPT whose MLP has width 4 h this is 24 h^2 + 4 s h. Of experts, those count that a token
    chooses, and the router. The head takes 2 h V; looking up and adding embeddings takes about 2 h.
    """
    h = model.hidden
    projections = 4 * h * model.head_size * (model.heads + model.num_kv_heads)
    attention = projections + core_cost(model)
    costs = [attention + _mlp_cost(model, model.num_experts(block)) for block in range(model.layers)]
    costs[0] += 2 * h
    costs[-1] += 2 * h * model.vocab
    return tuple(costs)


def _mlp_cost(model: Transformer, num_experts: int) -> float:
    """Return the forward FLOPs per token of a block's MLP, or of its experts if it has some."""
    h, width, routed = model.hidden, model.mlp_width, 0
    if (moe := model.moe) is not None and num_experts:
        width = model.expert_width * (moe.top_k + moe.shared) + (model.mlp_width if moe.residual else 0)
        routed = 2 * h * (num_experts * (2 if moe.gate == "shazeer" else 1) + (2 if moe.residual else 0))
    return float(2 * model.mlp_matrices * h * width + routed)


def core_cost(model: Transformer) -> float:
    """Return the forward FLOPs per token of a block's attention core: 2 s h for the scores, 2 s h for the values.

    h is the width of all heads. A window saves none: what it hides is computed and left out.
    """
    return float(4 * model.seq * model.heads * model.head_size)


def _balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Find the layer counts for which the most expensive stage is as cheap as possible.

    This is the contiguous partition problem, solved by dynamic programming over stages in O(layers x stages). If a
    stage starts later, it costs less and the stages before it cost more. The best start is where the two costs cross,
    and the crossing only moves forward as the end of the stage does.

    Returns:
        The number of layers of each stage.
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
