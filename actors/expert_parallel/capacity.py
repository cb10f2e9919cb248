"""Capacity of experts: which choices of tokens are dropped because their expert has enough.

Shapes: T tokens, K choices of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def capacity_of(factor: float, tokens: int, choices: int, num_experts: int) -> int:
    """Return the tokens that an expert takes of a group: its even share times the capacity factor, rounded up.

    Args:
        factor: The capacity factor.
        tokens: Tokens of a group.
        choices: Choices of a token.
        num_experts: Number of experts.
    """
    return math.ceil(factor * tokens * choices / num_experts - 1e-9)  # 1.1 x 10 is not 11 in floating point


def over_capacity(chosen_TK: Tensor, num_experts: int, capacities: Sequence[int]) -> Tensor:
    """Return which choices are over the capacity of their expert.

    In a group, first choices of all tokens come before second ones; those of one rank come in the order of the tokens.

    Args:
        chosen_TK: The experts that each token chose, int64; -1 for those of padding, which take no room.
        num_experts: Number of experts.
        capacities: Tokens that an expert takes of each group of consecutive tokens. Their number is a divisor of T.

    Returns:
        Booleans (T, K).

    Source: Lepikhin et al. 2020, "GShard", algorithm 1: counters c_e go on from first choices to second ones.
    """
    (tokens, choices), groups = chosen_TK.shape, len(capacities)
    if not chosen_TK.numel():
        return torch.zeros_like(chosen_TK, dtype=torch.bool)
    bins = num_experts + 1  # of a group: padding, and the experts
    group = torch.arange(groups, device=chosen_TK.device).view(groups, 1, 1) * bins
    by_rank = (chosen_TK.view(groups, -1, choices).transpose(1, 2) + 1 + group).flatten()  # (groups, K, tokens)
    order = by_rank.argsort(stable=True)
    counts = torch.bincount(by_rank, minlength=groups * bins)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(by_rank), device=chosen_TK.device) - starts[by_rank[order]]
    room = torch.tensor([(tokens, *[each] * num_experts) for each in capacities], device=chosen_TK.device).flatten()
    over = torch.empty_like(by_rank, dtype=torch.bool)
    over[order] = places >= room[by_rank[order]]
    return over.view(groups, choices, -1).transpose(1, 2).reshape(tokens, choices)
