"""RWKV's time mixing: an average of the values so far, whose weights fade at a learned rate per channel.

Shapes: B samples, S tokens, D channels, C tokens of a chunk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class TimeState(NamedTuple):
    """The recurrent state after the tokens so far.

    Attributes:
        last: (B, D), the last token.
        above: (B, D), the faded sum of exp(k) v, divided by exp(size).
        below: (B, D), the faded sum of exp(k), divided by exp(size).
        size: (B, D), the size of both, as a logarithm; -inf before the first token.
    """

    last: Tensor
    above: Tensor
    below: Tensor
    size: Tensor


class TimeMixing(nn.Module):
    """RWKV-4's layer instead of attention: (B, S, D) -> (B, S, D), causal, linear in the sequence.

    Chunks of tokens are computed at once, and the state goes from chunk to chunk. ``resume`` continues a sequence;
    token by token it is the recurrent form of the same layer.

    Args:
        hidden: Width D.
        chunk: Number of tokens C that are computed at once, which takes B x C x C x D elements.

    Source: Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", sections 4.1 to 4.3.
    """

    def __init__(self, hidden: int, chunk: int = 16) -> None:
        super().__init__()
        self.chunk = chunk
        share = torch.arange(hidden) / hidden
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(share.clone()) for _ in range(3))
        self.decay = nn.Parameter(-5 + 8 * share)  # of exp(decay) per token, from slow to fast channels
        self.bonus = nn.Parameter(torch.full((hidden,), math.log(0.3)))
        self.key, self.value, self.receptance = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Mix the tokens of whole sequences."""
        return self.resume(x_BSD, None)[0]

    def resume(self, x_BSD: Tensor, state: TimeState | None) -> tuple[Tensor, TimeState]:
        """Mix the next tokens of sequences.

        Args:
            x_BSD: The tokens, one or more.
            state: The state after the tokens before them; None if there are none.

        Returns:
            The outputs (B, S, D), and the state after these tokens.
        """
        if state is None:
            zero = torch.zeros_like(x_BSD[:, 0])
            state = TimeState(zero, zero, zero, torch.full_like(zero, -math.inf))
        before_BSD = torch.cat((state.last[:, None], x_BSD[:, :-1]), 1)
        k, v, r = (
            linear(x_BSD * mix + before_BSD * (1 - mix))
            for linear, mix in ((self.key, self.mix_k), (self.value, self.mix_v), (self.receptance, self.mix_r))
        )
        made = []
        for k_BCD, v_BCD in zip(k.split(self.chunk, 1), v.split(self.chunk, 1), strict=True):
            made.append(self._averages(k_BCD, v_BCD, state))
            state = self._later(k_BCD, v_BCD, state)
        out: Tensor = self.out(r.sigmoid() * torch.cat(made, 1))
        return out, state._replace(last=x_BSD[:, -1])

    def _averages(self, k_BCD: Tensor, v_BCD: Tensor, state: TimeState) -> Tensor:
        """Return the average (B, C, D) at each token of a chunk, over this token and all earlier ones."""
        fade, at = self.decay.exp(), torch.arange(k_BCD.shape[1], device=k_BCD.device)
        gap_CC1 = (at[:, None] - 1 - at).unsqueeze(-1)  # tokens between the query and the key
        logs_BCCD = k_BCD[:, None] - fade * gap_CC1.clamp(min=0)
        logs_BCCD = torch.where(gap_CC1 == -1, k_BCD[:, None] + self.bonus, logs_BCCD)
        logs_BCCD = logs_BCCD.masked_fill(gap_CC1 < -1, -math.inf)
        early_BCD = state.size[:, None] - fade * at[:, None]
        most_BCD = torch.maximum(logs_BCCD.amax(2), early_BCD).detach()
        weights_BCCD, early_BCD = (logs_BCCD - most_BCD.unsqueeze(2)).exp(), (early_BCD - most_BCD).exp()
        above = (weights_BCCD * v_BCD[:, None]).sum(2) + early_BCD * state.above[:, None]
        return above / (weights_BCCD.sum(2) + early_BCD * state.below[:, None])

    def _later(self, k_BCD: Tensor, v_BCD: Tensor, state: TimeState) -> TimeState:
        """Return the state after a chunk."""
        length, fade = k_BCD.shape[1], self.decay.exp()
        logs_BCD = k_BCD - fade * torch.arange(length - 1, -1, -1, device=k_BCD.device)[:, None]
        early_BD = state.size - fade * length
        most_BD = torch.maximum(logs_BCD.amax(1), early_BD).detach()
        weights_BCD, early_BD = (logs_BCD - most_BD[:, None]).exp(), (early_BD - most_BD).exp()
        above = (weights_BCD * v_BCD).sum(1) + early_BD * state.above
        return TimeState(state.last, above, weights_BCD.sum(1) + early_BD * state.below, most_BD)
