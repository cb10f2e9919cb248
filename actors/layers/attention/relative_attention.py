"""Transformer-XL's attention: scores by relative positions, and a memory of the segment before.

Shapes: B samples, S tokens of a segment, M tokens of memory, L = M + S keys, D hidden, N heads, d width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from raypar.actors.layers.positions import Sinusoidal


class RelativeAttention(nn.Module):
    """Causal self-attention (B, S, D) -> (B, S, D) over segments, each of which also sees some tokens before it.

    The score of query i and key j is ((q_i + u) k_j + (q_i + v) W R_(i-j)) / sqrt(d), where R are sines and cosines of
    the distance. A segment's memory is the layer's inputs at the tokens right before it, through which no gradient
    goes. It is within the sample, so that microbatches are independent.

    Args:
        hidden: Width D.
        heads: Number of heads, a divisor of ``hidden``.
        segment: Number of tokens of a segment; longer sequences are cut into segments.
        memory: Number M of tokens before a segment that its queries see.

    Raises:
        ValueError: If heads do not divide the width.

    Source: Dai et al. 2019, "Transformer-XL", sections 3.2 and 3.3.
    """

    def __init__(self, hidden: int, heads: int, segment: int, memory: int) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide the width {hidden}: use a divisor of it")
        self.width, self.segment, self.memory = hidden // heads, segment, memory
        self.q, self.k, self.v, self.distance = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, self.width))
        self.distance_bias = nn.Parameter(torch.zeros(heads, 1, self.width))
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.table = Sinusoidal(segment + memory, hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Attend from all segments of sequences."""
        made, end = [], 0
        for here_BSD in x_BSD.split(self.segment, 1):
            past_BMD = x_BSD[:, max(0, end - self.memory) : end].detach()
            made.append(self._attend(here_BSD, past_BMD))
            end += here_BSD.shape[1]
        out: Tensor = self.out(torch.cat(made, 1))
        return out

    def _attend(self, here_BSD: Tensor, past_BMD: Tensor) -> Tensor:
        """Return the attention of a segment's queries, heads side by side, (B, S, D)."""
        S, M = here_BSD.shape[1], past_BMD.shape[1]
        all_BLD = torch.cat((past_BMD, here_BSD), 1)
        q_BNSd, k_BNLd, v_BNLd, r_NLd = map(
            self._heads,
            (self.q(here_BSD), self.k(all_BLD), self.v(all_BLD), self.distance(self.table(M + S, here_BSD))),
        )
        gap_SL = torch.arange(M, M + S, device=q_BNSd.device)[:, None] - torch.arange(M + S, device=q_BNSd.device)
        by_gap_BNSL = (q_BNSd + self.distance_bias) @ r_NLd.mT
        by_gap_BNSL = by_gap_BNSL.gather(-1, gap_SL.clamp(min=0).expand_as(by_gap_BNSL))
        scores_BNSL = (q_BNSd + self.content_bias) @ k_BNLd.mT + by_gap_BNSL
        scores_BNSL = (scores_BNSL / math.sqrt(self.width)).masked_fill(gap_SL < 0, -math.inf)
        out: Tensor = (scores_BNSL.softmax(-1) @ v_BNLd).transpose(1, 2).flatten(2)
        return out

    def _heads(self, x_SD: Tensor) -> Tensor:
        """Return vectors (..., S, D) by head, (..., N, S, d)."""
        by_head: Tensor = x_SD.unflatten(-1, (-1, self.width)).transpose(-3, -2)
        return by_head
