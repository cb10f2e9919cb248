"""Mixtures of experts: gates, capacity and auxiliary losses, token by token. Written from the papers, in float64.

Gates that draw random numbers are not here. Shapes: T tokens, D width of the model, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Expert = Callable[[Tensor], Tensor]


class Routed(NamedTuple):
    """What the router of one layer decided for one microbatch.

    Attributes:
        chosen: By sequence and token, the experts that it chose, the best first.
        gates: By sequence and token, their gates.
        probs: (B, S, E): probabilities of all experts.
        logits: (B, S, E).
        load: By expert, how many choices fell on it.
        lengths: By sequence, how many tokens are not padding, which chooses no expert.
        margin: The smallest difference of two scores by which a choice was made: where it is as small as the rounding
            of float32, another choice is as right.
    """

    chosen: list[list[list[int]]]
    gates: list[list[list[Tensor]]]
    probs: Tensor
    logits: Tensor
    load: list[int]
    lengths: list[int]
    margin: float


def route(
    x_BSD: Tensor,
    weight_ED: Tensor,
    moe: dict[str, Any],
    bias: Sequence[float] | None,
    lengths: Sequence[int] | None = None,
) -> Routed:
    """Choose the experts of every token that is not padding.

    Args:
        x_BSD: The tokens.
        weight_ED: The router's weight.
        moe: Fields gate, top_k, normalise and others.
        bias: Added to scores for the choice only (DeepSeek-AI 2024, equation 16); None for none.
        lengths: By sequence, how many tokens are not padding; None if all are.
    """
    logits = x_BSD @ weight_ED.T
    num_experts, gate, k = len(weight_ED), moe["gate"], moe["top_k"]
    normalise = moe["normalise"] if moe["normalise"] is not None else gate not in ("softmax", "switch")
    if gate == "sigmoid":  # DeepSeek-AI 2024, section 2.1.2
        scores = torch.sigmoid(logits)
        probs = scores / scores.sum(-1, keepdim=True)
    else:
        scores = probs = torch.softmax(logits, -1)
    chosen: list[list[list[int]]] = []
    gates: list[list[list[Tensor]]] = []
    load = [0] * num_experts
    real = [x_BSD.shape[1]] * len(x_BSD) if lengths is None else list(lengths)
    margins = [math.inf]
    for b, sequence in enumerate(scores.tolist()):
        chosen.append([])
        gates.append([])
        for s, values in enumerate(sequence[: real[b]]):
            ranked = [value + (0.0 if bias is None else bias[e]) for e, value in enumerate(values)]
            if moe["groups"] > moe["top_groups"]:
                ranked, margin = _in_best_groups(ranked, moe["groups"], moe["top_groups"], k)
                margins.append(margin)
            order = sorted(range(num_experts), key=lambda e: -ranked[e])
            best = order[:k]
            margins += [ranked[one] - ranked[other] for one, other in zip(best, order[1:], strict=False)]
            weights = [scores[b, s, e] for e in best]
            if normalise:
                total = sum(weights[1:], weights[0])
                weights = [one / total for one in weights]
            for e in best:
                load[e] += 1
            chosen[-1].append(best)
            gates[-1].append(weights)
    return Routed(chosen, gates, probs, logits, load, real, min(margins))


def _in_best_groups(scores: list[float], groups: int, kept: int, k: int) -> tuple[list[float], float]:
    """Return scores in which experts outside of the best groups are never chosen, and the margin of these groups."""
    size, counted = len(scores) // groups, math.ceil(k / kept)
    of_group = [sum(sorted(scores[g * size : (g + 1) * size], reverse=True)[:counted]) for g in range(groups)]
    order = sorted(range(groups), key=lambda g: -of_group[g])
    left = [score if e // size in order[:kept] else -math.inf for e, score in enumerate(scores)]
    return left, of_group[order[kept - 1]] - of_group[order[kept]]


def combined(x_BSD: Tensor, routed: Routed, experts: Sequence[Expert], capacity: float | None) -> Tensor:
    """Return the sum of what experts make of their tokens, (B, S, D); choices over the capacity count as zero.

    Of a sequence, an expert takes ceil(capacity x S k / E) choices: first those that are somebody's best, in the order
    of the tokens, then the second ones (Lepikhin et al. 2020, algorithm 1).
    """
    batch, k = len(x_BSD), max(len(token) for sequence in routed.chosen for token in sequence)
    outs = [expert(x_BSD) for expert in experts]  # of all tokens; those that did not choose it are not taken
    rows = []
    for b in range(batch):
        length = routed.lengths[b]
        most = math.inf if capacity is None else math.ceil(capacity * length * k / len(experts) - 1e-9)
        taken = [0] * len(experts)
        made = [torch.zeros_like(x_BSD[b, s]) for s in range(x_BSD.shape[1])]
        for rank in range(k):
            for s in range(length):
                e = routed.chosen[b][s][rank]
                if taken[e] < most:
                    taken[e] += 1
                    made[s] = made[s] + routed.gates[b][s][rank] * outs[e][b, s]
        rows.append(torch.stack(made))
    return torch.stack(rows)


def auxiliary(routed: Routed, moe: dict[str, Any]) -> Tensor:
    """Return the auxiliary losses of one layer for one microbatch, with their coefficients."""
    num_experts, tokens = routed.probs.shape[-1], sum(routed.lengths)
    real = [(b, s) for b, length in enumerate(routed.lengths) for s in range(length)]
    total = torch.zeros((), dtype=torch.float64)
    if moe["loss"] == "switch":  # Fedus et al. 2021, equations 4 to 6; f counts all k choices
        share = [count / (tokens * moe["top_k"]) for count in routed.load]
        mean = torch.stack([routed.probs[at] for at in real]).mean(0)
        total = total + moe["alpha"] * num_experts * sum(share[e] * mean[e] for e in range(num_experts))
    elif moe["loss"] == "gshard":  # Lepikhin et al. 2020, algorithm 1, with sequences as groups
        for b, length in enumerate(routed.lengths):
            probs_SE = routed.probs[b, :length]
            first = [sum(token[0] == e for token in routed.chosen[b]) / length for e in range(num_experts)]
            loss = sum(first[e] * probs_SE[:, e].mean() for e in range(num_experts)) / num_experts
            total = total + moe["alpha"] * loss / len(routed.probs)
    if moe["z_loss"]:  # Zoph et al. 2022, equation 5
        total = total + moe["z_loss"] * torch.stack([torch.logsumexp(routed.logits[at], -1) ** 2 for at in real]).mean()
    return total


def joint(layers: Sequence[Routed], moe: dict[str, Any]) -> Tensor:
    """Return the loss over the tokens of all layers, with its coefficient: transformers' load_balancing_loss_func."""
    num_experts = layers[0].probs.shape[-1]
    tokens = [(of, b, s) for of in layers for b, length in enumerate(of.lengths) for s in range(length)]
    chosen = [[of.chosen[b][s].count(e) for e in range(num_experts)] for of, b, s in tokens]
    share = [sum(one[e] for one in chosen) / len(tokens) for e in range(num_experts)]
    mean = torch.stack([of.probs[b, s] for of, b, s in tokens]).mean(0)
    return moe["alpha"] * num_experts * sum(share[e] * mean[e] for e in range(num_experts))


def moved_bias(bias: Sequence[float], load: Sequence[int], rate: float) -> list[float]:
    """Return the bias of each expert after a step: DeepSeek-AI 2024, section 2.1.2."""
    mean = sum(load) / len(load)
    return [
        one + rate * (1 if count < mean else -1 if count > mean else 0) for one, count in zip(bias, load, strict=True)
    ]
