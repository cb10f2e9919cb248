"""Gates: the experts that a token chooses, their weights, and the choices that are dropped at an expert's capacity.

One function for each paper. Gates take fp32 and are differentiable through the weights.

Shapes: T tokens, E experts, K choices of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertChoice(NamedTuple):
    """The result of a gate.

    Attributes:
        chosen: The experts of each token, (T, K) int64, the best first.
        gates: Their weights, (T, K).
        probs: Probabilities of all experts, (T, E), from which losses are computed; those of a token add up to 1.
        skipped: (T, K), which choices are left out at random; None if none are.
    """

    chosen: Tensor
    gates: Tensor
    probs: Tensor
    skipped: Tensor | None = None


def softmax_top_k(logits_TE: Tensor, choices: int, *, normalise: bool, bias_E: Tensor | None = None) -> ExpertChoice:
    """Choose the experts of the largest probabilities, the softmax over all experts: TopK(softmax(x W)).

    With one choice and raw gates it is Switch's gate (Fedus et al. 2021, section 2.1); with noise in the logits it is
    the noisy gate of the project's notes; with normalised gates Mixtral's (Jiang et al. 2024, section 2.1).

    Args:
        logits_TE: The router's logits.
        choices: Number of experts of a token.
        normalise: Whether the gates of a token are divided by their sum.
        bias_E: Added to the probabilities for the choice only (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing").
    """
    probs_TE = logits_TE.softmax(-1)
    chosen_TK = _best(probs_TE, choices, bias_E)
    gates_TK = probs_TE.gather(1, chosen_TK)
    return ExpertChoice(chosen_TK, _normalised(gates_TK) if normalise else gates_TK, probs_TE)


def top_k_softmax(logits_TE: Tensor, choices: int) -> ExpertChoice:
    """Choose the experts of the largest logits; the gates are the softmax over these: softmax(KeepTopK(H(x), k)).

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", equations 3 and 5. The noise in H(x) is
    ``learned_noise``.

    Args:
        logits_TE: H(x), the router's logits with their noise.
        choices: Number of experts of a token.
    """
    kept_TK, chosen_TK = logits_TE.topk(choices, -1)
    return ExpertChoice(chosen_TK, kept_TK.softmax(-1), logits_TE.softmax(-1))


def learned_noise(normal_TE: Tensor, widths_TE: Tensor) -> Tensor:
    """Return the noise of Shazeer's gate (T, E): normal numbers, each times softplus(x W_noise).

    Args:
        normal_TE: Numbers of the standard normal distribution.
        widths_TE: x W_noise.

    Source: Shazeer et al. 2017, equation 4.
    """
    return normal_TE * F.softplus(widths_TE)


def gshard_top_2(logits_TE: Tensor, uniform_T: Tensor | None, *, normalise: bool = True) -> ExpertChoice:
    """Choose the two best experts; the second one at random, in proportion to its gate.

    Args:
        logits_TE: The router's logits.
        uniform_T: Random numbers between 0 and 1, one a token; None always uses both, as in an evaluation.
        normalise: Whether the gates of a token are divided by their sum, as in the paper.

    Source: Lepikhin et al. 2020, "GShard", algorithm 1: the second expert is used if 2 g2 > rnd, with normalised g2.
    """
    choice = softmax_top_k(logits_TE, 2, normalise=normalise)
    if uniform_T is None:
        return choice
    skipped_TK = torch.zeros_like(choice.chosen, dtype=torch.bool)
    skipped_TK[:, 1] = 2 * _normalised(choice.gates.detach())[:, 1] <= uniform_T
    return choice._replace(skipped=skipped_TK)


def sigmoid_top_k(
    logits_TE: Tensor, choices: int, *, normalise: bool, bias_E: Tensor | None = None, groups: int = 1, kept: int = 1
) -> ExpertChoice:
    """Choose the experts of the largest sigmoids, within the best groups of experts.

    Args:
        logits_TE: The router's logits.
        choices: Number of experts of a token.
        normalise: Whether the gates of a token are divided by their sum, as in the paper.
        bias_E: Added to the sigmoids for the choice only, not to the gates.
        groups: Number of groups of consecutive experts.
        kept: Number of groups in which a token chooses.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", equations 12 to 16, section 2.1.2. A group's score is the sum of its
    choices / kept largest ones, as for the paper's nodes.
    """
    sigmoids_TE = logits_TE.sigmoid()
    scores_TE = sigmoids_TE.detach() if bias_E is None else sigmoids_TE.detach() + bias_E
    if kept < groups:
        scores_TE = in_best_groups(scores_TE, groups, kept, math.ceil(choices / kept))
    chosen_TK = scores_TE.topk(choices, -1).indices
    gates_TK = sigmoids_TE.gather(1, chosen_TK)
    return ExpertChoice(chosen_TK, _normalised(gates_TK) if normalise else gates_TK, _normalised(sigmoids_TE))


def in_best_groups(scores_TE: Tensor, groups: int, kept: int, counted: int) -> Tensor:
    """Return the scores (T, E), with minus infinity for experts outside of each token's best groups.

    Args:
        scores_TE: Scores of the experts.
        groups: Number of groups of consecutive experts, a divisor of E.
        kept: Number of groups that a token keeps.
        counted: A group's score is the sum of so many of its largest scores.
    """
    by_group = scores_TE.view(len(scores_TE), groups, -1)
    best = by_group.topk(min(counted, by_group.shape[-1]), -1).values.sum(-1).topk(kept, -1).indices
    far = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
    return by_group.masked_fill(far.unsqueeze(-1), -math.inf).view_as(scores_TE)


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Return the expert bias after a step: larger by ``rate`` for experts below the mean load, smaller for those above.

    Args:
        bias_E: The bias before.
        load_E: Number of choices of each expert in the whole step, on all replicas.
        rate: The paper's bias update speed, gamma.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.
    """
    load_E = load_E.to(bias_E)
    return bias_E + rate * (load_E.mean() - load_E).sign()


def _best(probs_TE: Tensor, choices: int, bias_E: Tensor | None) -> Tensor:
    scores_TE = probs_TE.detach()
    return (scores_TE if bias_E is None else scores_TE + bias_E).topk(choices, -1).indices


def _normalised(gates: Tensor) -> Tensor:
    return gates / gates.sum(-1, keepdim=True)


def capacity_of(factor: float, tokens: int, choices: int, num_experts: int) -> int:
    """Return the capacity of an expert for a group of tokens: its even share times the factor, rounded up.

    Args:
        factor: The capacity factor.
        tokens: Tokens of a group.
        choices: Choices of a token.
        num_experts: Number of experts.
    """
    return math.ceil(factor * tokens * choices / num_experts - 1e-9)  # 1.1 x 10 is not 11 in floating point


def over_capacity(chosen_TK: Tensor, num_experts: int, capacities: Sequence[int]) -> Tensor:
    """Return which choices are over the capacity of their expert.

    In a group, the first choices of all tokens come before the second ones, each in the order of the tokens.

    Args:
        chosen_TK: The experts that each token chose, int64; -1 for padding, which takes no capacity.
        num_experts: Number of experts.
        capacities: Capacity of an expert for each group of consecutive tokens. Their number is a divisor of T.

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
    sorted_bins, order = by_rank.sort(stable=True)
    positions = torch.arange(len(by_rank), device=chosen_TK.device) - torch.searchsorted(sorted_bins, sorted_bins)
    limit: int | Tensor = capacities[0]
    if len({*capacities}) > 1:  # with padding; a GPU waits for the numbers
        limit = torch.tensor([*capacities], device=chosen_TK.device)[sorted_bins // bins]
    is_over = (positions >= limit) & (sorted_bins % bins > 0)
    over = torch.empty_like(is_over).scatter_(0, order, is_over)
    return over.view(groups, choices, -1).transpose(1, 2).reshape(tokens, choices)
