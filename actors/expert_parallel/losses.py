"""Losses that keep the load of experts even, and the logits of routers small.

Shapes: T tokens of this actor, E experts, K choices of a token, G groups.

If the tokens of one sequence are on several actors, ``sums`` adds up a tensor over these in the forward, and returns
the gradient unchanged in the backward, so that each actor gets the part of the gradient of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sums = Callable[[Tensor], Tensor]


def alone(own: Tensor) -> Tensor:
    """Return a tensor unchanged: all tokens are on this actor."""
    return own


def counted(values_Tn: Tensor, real_T: Tensor | None) -> Tensor:
    """Return values of tokens in which those of padding are zero."""
    return values_Tn if real_T is None else values_Tn.masked_fill(~real_T.unsqueeze(1), 0.0)


def num_counted(values_Tn: Tensor, real_T: Tensor | None) -> Tensor:
    """Return the number of tokens that are not padding, (1,) in the dtype of their values."""
    return values_Tn.new_full((1,), len(values_Tn)) if real_T is None else real_T.sum(0, keepdim=True).to(values_Tn)


def load_of(chosen_TK: Tensor, num_experts: int) -> Tensor:
    """Return the number of choices of each expert: (E,) int64. Dropped ones do not count."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen_TK.device)
    flat = (chosen_TK + 1).flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]


def switch_loss(probs_TE: Tensor, chosen_TK: Tensor, sums: Sums = alone, real_T: Tensor | None = None) -> Tensor:
    """Return E times the sum of f_i P_i, which is 1 if the load is even.

    f_i is the share of choices that fell on expert i, and P_i the mean of its probabilities.

    Args:
        probs_TE: Probabilities of the experts, fp32; those of a token add up to 1.
        chosen_TK: The experts that each token chose, before any is dropped; -1 for those of padding.
        sums: Sums over the actors that have tokens of the same sequences.
        real_T: Which tokens are not padding, bool; None if all are.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, where K is 1; alpha is the caller's.
    """
    num_experts, choices = probs_TE.shape[1], chosen_TK.shape[1]
    probs, size = counted(probs_TE, real_T).sum(0), num_counted(probs_TE, real_T)
    total = sums(torch.cat((load_of(chosen_TK, num_experts).to(probs_TE), probs, size)))
    load_E, probs_E, tokens_1 = total.split((num_experts, num_experts, 1))
    loss: Tensor = num_experts * (load_E * probs_E).sum() / (tokens_1[0] ** 2 * choices).clamp(min=1)
    return loss


def gshard_loss(
    probs_TE: Tensor, first_T: Tensor, groups: int = 1, sums: Sums = alone, real_T: Tensor | None = None
) -> Tensor:
    """Return the mean over experts of m_e c_e / S, and over groups of S tokens. Groups of padding alone do not count.

    c_e is the number of tokens whose first choice is expert e, and m_e the mean of its probabilities.

    Args:
        probs_TE: Probabilities of the experts, fp32; those of a token add up to 1.
        first_T: The first choice of each token; any for padding.
        groups: Number of groups of consecutive tokens, a divisor of T.
        sums: Sums over the actors that have tokens of the same groups.
        real_T: Which tokens are not padding, bool; None if all are.

    Source: Lepikhin et al. 2020, "GShard", algorithm 1.
    """
    num_experts = probs_TE.shape[1]
    first = torch.nn.functional.one_hot(first_T.clamp(min=0), num_experts).to(probs_TE)
    ones = probs_TE.new_ones(len(probs_TE), 1)
    of_tokens = counted(torch.cat((first, probs_TE, ones), 1), real_T).view(groups, -1, 2 * num_experts + 1)
    counts_GE, probs_GE, tokens_G1 = sums(of_tokens.sum(1)).split((num_experts, num_experts, 1), 1)
    parts = (tokens_G1 > 0).sum().clamp(min=1) * num_experts
    loss: Tensor = (counts_GE * probs_GE / tokens_G1.clamp(min=1) ** 2).sum() / parts
    return loss


def z_loss(logits_TE: Tensor, sums: Sums = alone, real_T: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of the squared logarithm of the sum of exponentials of the logits.

    Args:
        logits_TE: Logits of the router, fp32.
        sums: Sums over the actors that have tokens of the same sequences.
        real_T: Which tokens are not padding, bool; None if all are.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    squares_T1 = counted(logits_TE.logsumexp(1, keepdim=True).square(), real_T)
    total, tokens = sums(torch.stack((squares_T1.sum(), num_counted(logits_TE, real_T)[0])))
    loss: Tensor = total / tokens.clamp(min=1)
    return loss
