"""Where a token stands: tables that are added to embeddings, angles that turn queries and keys, bias on scores.

Shapes: S sequence, D hidden, N heads, d width of a head. What is no weight is made when it is first asked for, on the
device that asks, and shared by the blocks of an actor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from raypar.actors.sharding import Portion
from raypar.actors.specs.model import Transformer

ALPHA = 0.4  # of the hierarchical decomposition


class Learned(nn.Module):
    """A vector for every position (Radford et al. 2019)."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))

    def forward(self, length: int) -> Tensor:
        """The table of the first positions, (length, D)."""
        return self.weight[:length]


class Hierarchical(Learned):
    """A table p of n rows for n^2 positions (Su 2020, https://kexue.fm/archives/7947), counted from 1:

    q_{(i-1)n+j} = a u_i + (1-a) u_j with u_i = (p_i - a p_1) / (1-a), so that the first n are p itself.
    """

    def forward(self, length: int) -> Tensor:
        p_nD = self.weight
        n = len(p_nD)
        u_nD = (p_nD - ALPHA * p_nD[0]) / (1 - ALPHA)
        outer, inner = math.ceil(length / n), min(length, n)
        table = ALPHA * u_nD[:outer, None] + (1 - ALPHA) * u_nD[None, :inner]
        return table.flatten(0, 1)[:length]


class Sinusoidal(nn.Module):
    """Sines and cosines of wavelengths from 2 pi to 10,000 x 2 pi, in turn (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self._rows, self._hidden = rows, hidden
        self._table: Tensor | None = None

    def forward(self, length: int, like: Tensor) -> Tensor:
        """The table of the first positions, (length, D), in the dtype and on the device of ``like``."""
        if self._table is None:
            angles = _angles(self._rows, self._hidden, 10_000.0)
            both = torch.stack((angles.sin(), angles.cos()), dim=-1)
            self._table = both.flatten(1)[:, : self._hidden].to(like)
        return self._table[:length]


class Rope:
    """Rotary positions (Su et al. 2021): the pair (x_i, x_{i+d/2}) is turned by position x base^(-2i/d), so that the
    product of a query and a key depends on their distance only."""

    def __init__(self, seq: int, width: int, base: float) -> None:
        self._seq, self._width, self._base = seq, width, base
        self._table: tuple[Tensor, Tensor] | None = None
        self._here: tuple[Portion, int, list[Tensor]] | None = None  # the part of it that was asked for last

    def turn(self, x_BNSd: Tensor, tokens: Portion) -> Tensor:
        """Every head's vector, turned; S are these tokens of the sequence."""
        cos, sin = self._rows(tokens, x_BNSd)
        one, other = x_BNSd.chunk(2, dim=-1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)

    def _rows(self, tokens: Portion, x_BNSd: Tensor) -> list[Tensor]:
        """Cosines and sines (S, d/2) of the angles of these tokens."""
        if self._table is None:
            angles = _angles(self._seq, self._width, self._base)
            self._table = angles.cos().to(x_BNSd), angles.sin().to(x_BNSd)
        length = x_BNSd.shape[-2]
        if self._here is None or self._here[:2] != (tokens, length):
            rows = [tokens.take(part[: tokens.whole(length)], 0) for part in self._table]
            self._here = tokens, length, rows
        return self._here[2]


class Alibi:
    """A bias on scores instead of positions (Press et al. 2022): -slope x distance, another slope for every head.

    slopes  of the heads
    """

    def __init__(self, heads: int, seq: int) -> None:
        self.slopes, self._seq = alibi_slopes(heads), seq
        self._table: Tensor | None = None
        self._parts: dict[tuple[int, int], Alibi] = {}

    def part(self, start: int, stop: int) -> Alibi:
        """The bias of some of the heads; whoever asks for the same ones shares a table."""
        if (start, stop) not in self._parts:
            part = self._parts[start, stop] = Alibi(len(self.slopes), self._seq)
            part.slopes = self.slopes[start:stop]
        return self._parts[start, stop]

    def bias(self, length: int, like: Tensor) -> Tensor:
        """(N, length, length), -inf for what is later; in the dtype and on the device of ``like``."""
        if self._table is None:
            at = torch.arange(self._seq, dtype=torch.float32)
            later = torch.ones(self._seq, self._seq, dtype=torch.bool).triu(1)
            distance = (at[:, None] - at).masked_fill(later, math.inf)
            self._table = (-torch.tensor(self.slopes)[:, None, None] * distance).to(like)
        return self._table[:, :length, :length]


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: 2^(-8k/heads) for k = 1, 2, ... if heads is a power of two.

    Else those of the next smaller one, and then every other one of its double, as the paper's authors do.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    between = [2 ** (-8 * k / (2 * power)) for k in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def added(spec: Transformer) -> Learned | Sinusoidal | None:
    """What is added to the embeddings, if anything is."""
    if spec.positions == "learned":
        return Learned(spec.seq, spec.hidden)
    if spec.positions == "hierarchical":
        return Hierarchical(math.isqrt(spec.seq - 1) + 1, spec.hidden)
    return Sinusoidal(spec.seq, spec.hidden) if spec.positions == "sinusoidal" else None


def between(spec: Transformer) -> Rope | Alibi | None:
    """What tells attention how far apart tokens are, if anything does."""
    if spec.positions == "rope":
        return Rope(spec.seq, spec.hidden // spec.heads, spec.rope_base)
    return Alibi(spec.heads, spec.seq) if spec.positions == "alibi" else None


def _angles(rows: int, width: int, base: float) -> Tensor:
    """position x base^(-2i/width), (rows, half of width rounded up) float64 on the CPU."""
    speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    return torch.arange(rows, dtype=torch.float64, device="cpu")[:, None] * speeds
