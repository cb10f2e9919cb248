"""Linear attention: a kernel instead of the softmax, so that time and memory are linear in the sequence.

Shapes: B samples, S tokens, D hidden, N heads, d width of a head, C tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearState(NamedTuple):
    """The recurrent state: all that linear attention needs of the tokens so far.

    Attributes:
        sums: (B, N, d, d), the sum of phi(k)^T v.
        weights: (B, N, d), the sum of phi(k).
    """

    sums: Tensor
    weights: Tensor


class LinearAttention(nn.Module):
    """Causal self-attention (B, S, D) -> (B, S, D) with weights phi(q) phi(k)^T, where phi(x) = elu(x) + 1.

    Each chunk of a sequence is computed by matrix products, and the state goes from chunk to chunk. ``resume``
    continues a sequence; token by token it is the recurrent form of the same layer.

    With tensor parallelism ``q``, ``k`` and ``v`` are columns and ``out`` a row: each actor has some of the heads.

    Args:
        hidden: Width D.
        heads: Number of heads, a divisor of ``hidden``.
        chunk: Number of tokens whose weights are computed at a time.

    Raises:
        ValueError: If heads do not divide the width.

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 to 3.4.
    """

    def __init__(self, hidden: int, heads: int, chunk: int = 64) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide the width {hidden}: use a divisor of it")
        self.width, self.chunk = hidden // heads, chunk
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Attend to the tokens of whole sequences."""
        return self.resume(x_BSD, None)[0]

    def resume(self, x_BSD: Tensor, state: LinearState | None) -> tuple[Tensor, LinearState]:
        """Attend from the next tokens of sequences.

        Args:
            x_BSD: The tokens, one or more.
            state: The state after the tokens before them; None if there are none.

        Returns:
            The outputs (B, S, D), and the state after these tokens.
        """
        q, k, v = (y(x_BSD).unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if state is None:
            sums = k.new_zeros(*k.shape[:2], self.width, self.width)
            state = LinearState(sums, sums[..., 0])
        made = []
        for q_BNCd, k_BNCd, v_BNCd in zip(*(part.split(self.chunk, 2) for part in (q, k, v)), strict=True):
            weights_BNCC = (q_BNCd @ k_BNCd.mT).tril()
            above = weights_BNCC @ v_BNCd + q_BNCd @ state.sums
            below = weights_BNCC.sum(-1, keepdim=True) + q_BNCd @ state.weights.unsqueeze(-1)
            made.append(above / below)
            state = LinearState(state.sums + k_BNCd.mT @ v_BNCd, state.weights + k_BNCd.sum(2))
        out: Tensor = self.out(torch.cat(made, 2).transpose(1, 2).flatten(2))
        return out, state
