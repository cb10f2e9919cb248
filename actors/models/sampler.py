"""Choose tokens from logits. Shapes: B sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.actors.rng import derive
from raypar.actors.specs.sampling import Sampling


def choose(logits_BV: Tensor, sampling: Sampling, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Choose the next token of each sequence.

    The choice depends on the seed, the prompt and the position alone, and not on the other sequences.

    Args:
        logits_BV: Logits, of any floating dtype.
        sampling: How to choose.
        prompts: Number of each sequence's prompt.
        positions: Position of each sequence's next token.

    Returns:
        Token ids, (B,) int64.
    """
    logits_BV = logits_BV.float()
    if not sampling.temperature:
        return logits_BV.argmax(dim=-1)
    p_BV = (logits_BV / sampling.temperature).softmax(dim=-1).double()
    p_BV = p_BV.masked_fill(~_allowed(p_BV, sampling), 0.0)
    # By id and not by likelihood: of tokens that are nearly equally likely, rounding would change the order.
    below_BV = p_BV.cumsum(dim=-1)
    drawn = [_uniform(derive(sampling.seed, "token", *at)) for at in zip(prompts, positions, strict=True)]
    wanted_B1 = torch.tensor(drawn, dtype=torch.float64, device=p_BV.device)[:, None] * below_BV[:, -1:]
    return torch.searchsorted(below_BV, wanted_B1, right=True).squeeze(1).clamp(max=p_BV.shape[1] - 1)


def _allowed(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens may be chosen, (B, V) bool."""
    allowed_BV = torch.ones_like(p_BV, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < p_BV.shape[1]:
        best = p_BV.topk(sampling.top_k, dim=-1).indices
        allowed_BV = torch.zeros_like(allowed_BV).scatter_(1, best, value=True)
    if sampling.top_p < 1:
        kept_BV = p_BV.masked_fill(~allowed_BV, 0.0)
        sorted_BV, order_BV = (kept_BV / kept_BV.sum(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
        allowed_BV = allowed_BV & torch.zeros_like(allowed_BV).scatter_(1, order_BV, before_BV < sampling.top_p)
    return allowed_BV


def _uniform(seed: int) -> float:
    """Return a number in [0, 1) that a seed of 63 bits determines."""
    return (seed >> 10) / 2.0**53
