"""Attention over some of the heads, with the dropout that all of them together would have."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.group import Group
from raypar.actors.layers.dropout import part_of_dropout


class DividedAttention(nn.Module):
    """Causal attention of this member's heads: three (B, own N, S, d) -> (B, own N, S, d).

    Without dropout heads know nothing of each other.
    """

    def __init__(self, dropout: float, group: Group) -> None:
        super().__init__()
        self.dropout, self._group = dropout, group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        return part_of_dropout(scores.softmax(-1), self.dropout, self._group, dim=1) @ v
