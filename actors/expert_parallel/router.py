"""The router: the experts that compute a token, and their weights.

Shapes: T tokens, D width of a token, E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.expert_parallel.gates import (
    ExpertChoice,
    gshard_top_2,
    learned_noise,
    sigmoid_top_k,
    softmax_top_k,
    top_k_softmax,
)
from raypar.actors.sharding import Sharding
from raypar.actors.specs.moe import MoE


class Routing(NamedTuple):
    """The result of a router.

    Attributes:
        chosen: The experts of each token, (T, K) int64, the best first, before any is dropped.
        gates: Their weights, (T, K) fp32.
        probs: Probabilities of all experts, (T, E) fp32, for the auxiliary loss.
        logits: The logits without noise, (T, E) fp32, for the z-loss.
        skipped: (T, K), which choices are left out at random; None if none are.
    """

    chosen: Tensor
    gates: Tensor
    probs: Tensor
    logits: Tensor
    skipped: Tensor | None


class TokenNoise(nn.Module):
    """Random numbers for tokens, from torch's generator. It has no weights.

    Attributes:
        sharding: This actor's part of the tokens (B, S). The numbers of all tokens are drawn, so that every layout
            draws the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharding = Sharding()

    def normal(self, like: Tensor, width: int) -> Tensor:
        """Return numbers of the standard normal distribution, fp32: (..., width) for tokens (..., D)."""
        return self._own(torch.randn(self._shape(like, width), device=like.device))

    def uniform(self, like: Tensor, width: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return numbers between two bounds, fp32: (..., width) for tokens (..., D)."""
        return self._own(torch.rand(self._shape(like, width), device=like.device) * (high - low) + low)

    def _shape(self, like: Tensor, width: int) -> Sequence[int]:
        return self.sharding.for_dims(like.dim()).whole_shape((*like.shape[:-1], width))

    def _own(self, drawn: Tensor) -> Tensor:
        return self.sharding.for_dims(drawn.dim()).take(drawn)


class Router(nn.Module):
    """Chooses experts for tokens: (..., D) -> Routing. It computes in fp32, whatever the dtype of the tokens.

    Args:
        moe: The gate and its settings.
        hidden: Width D of a token.
        num_experts: Number E of experts.

    Attributes:
        weight: Weight of the logits, (E, D).
        noise_weight: W_noise of Shazeer's gate, (E, D); None with other gates.
        bias: Added to scores for the choice, (E,), a buffer without a gradient; None if there is none.
        noise: Draws the random numbers of a training step; an evaluation draws none.
    """

    bias: Tensor | None

    def __init__(self, moe: MoE, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        nn.init.normal_(self.weight, 0.0, 0.02)
        self.register_parameter("noise_weight", None)
        if moe.gate == "shazeer":
            self.noise_weight = nn.Parameter(torch.zeros(num_experts, hidden))
        self.register_buffer("bias", torch.zeros(num_experts) if moe.bias_rate else None)
        self.noise = TokenNoise()

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for tokens (T, D) or (B, S, D); random numbers are drawn in training only."""
        moe, x, num_experts = self.moe, x.float(), len(self.weight)
        noisy = self.training and moe.noise > 0
        if noisy and moe.gate == "switch":
            x = x * self.noise.uniform(x, x.shape[-1], 1 - moe.noise, 1 + moe.noise)
        clean = logits = F.linear(x, self.weight.float())
        if noisy and moe.gate == "softmax":
            logits = clean + moe.noise * self.noise.normal(x, num_experts)
        elif self.training and self.noise_weight is not None:
            widths = F.linear(x, self.noise_weight.float())
            logits = clean + learned_noise(self.noise.normal(x, num_experts), widths)
        chance = self.noise.uniform(x, 1).flatten() if self.training and moe.gate == "gshard" else None
        choice = self._choose(logits.flatten(0, -2), chance)
        return Routing(choice.chosen, choice.gates, choice.probs, clean.flatten(0, -2), choice.skipped)

    def _choose(self, logits_TE: Tensor, chance_T: Tensor | None) -> ExpertChoice:
        moe = self.moe
        if moe.gate == "shazeer":
            return top_k_softmax(logits_TE, moe.top_k)
        if moe.gate == "gshard":
            return gshard_top_2(logits_TE, chance_T, normalise=moe.normalises)
        if moe.gate == "sigmoid":
            groups, kept = moe.groups, moe.top_groups
            return sigmoid_top_k(
                logits_TE, moe.top_k, normalise=moe.normalises, bias_E=self.bias, groups=groups, kept=kept
            )
        return softmax_top_k(logits_TE, moe.top_k, normalise=moe.normalises, bias_E=self.bias)
