"""Position encodings: tables added to embeddings, rotations of queries and keys (RoPE), biases on scores (ALiBi).

Shapes: B microbatch, S sequence, D hidden, N heads, d width of a head. Tables that are not weights are computed at the
first call, on the device of its tensors, and shared by the blocks of an actor.

Sources of RoPE's angles and their scaling for longer sequences: Su et al. 2021, "RoFormer", section 3.2; Chen et al.
2023, "Extending Context Window of Large Language Models via Positional Interpolation"; Peng et al. 2023, "YaRN",
sections 3.1 to 3.4 (with the NTK-aware and dynamic forms); Llama team 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.sharding import Pieces
from raypar.actors.specs.model import RopeScaling, Transformer
from raypar.actors.tensors import in_fp32

ALPHA = 0.4  # weight of the outer position in the hierarchical decomposition


def speeds(width: int, base: float, scaling: RopeScaling | None = None, length: int = 0) -> Tensor:
    """Return the angle per token of each pair of a head, (ceil(width / 2),) float64 on the CPU.

    Args:
        width: Width d of a head.
        base: Base of the angles.
        scaling: How they are scaled; None for not at all.
        length: Number of tokens of the whole sequence, on which ``dynamic`` depends.
    """
    if scaling is None or scaling.kind == "dynamic":
        return _plain(width, base if scaling is None else _larger_base(width, base, scaling, length))
    plain = _plain(width, base)
    if scaling.kind == "linear":
        return plain / scaling.factor
    assert scaling.trained is not None
    kept = _kept_by_yarn(width, base, scaling) if scaling.kind == "yarn" else _kept_by_llama3(plain, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def magnitude(scaling: RopeScaling | None) -> float:
    """Return the factor of queries and keys: more than 1 with YaRN alone."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention is None else scaling.attention


def _plain(width: int, base: float) -> Tensor:
    """Return base^(-2i/width) for each pair i."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)


def _larger_base(width: int, base: float, scaling: RopeScaling, length: int) -> float:
    """Return the base with which the slowest pair turns as far over the sequence as it did over the trained tokens."""
    assert scaling.trained is not None
    if length <= scaling.trained or width == 2:
        return base
    longer = scaling.factor * length / scaling.trained - (scaling.factor - 1)
    return float(base * longer ** (width / (width - 2)))


def _kept_by_yarn(width: int, base: float, scaling: RopeScaling) -> Tensor:
    """Return how much of each pair's angle stays: 1 of fast pairs, 0 of slow ones, a ramp over the pairs between."""
    assert scaling.trained is not None
    trained = scaling.trained

    def pair_that_turns(times: float) -> float:
        return width * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.fast), pair_that_turns(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(-(-width // 2), dtype=torch.float64, device="cpu")
    # below 0 where no pair turns so often: then all stay, as in the reference
    span = 0.001 if first == last else last - first
    return 1 - ((pairs - first) / span).clamp(0, 1)


def _kept_by_llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return how much of each pair's angle stays, by how many times it turns in the trained tokens."""
    assert scaling.trained is not None
    turns = scaling.trained * plain / (2 * math.pi)
    return ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)


class Learned(nn.Module):
    """A learned vector for every position (Radford et al. 2019). ``rows`` is the number of positions."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))

    def forward(self, length: int, first: int = 0) -> Tensor:
        """Return the vectors of ``length`` positions from ``first`` on, (length, D)."""
        return self.weight[first : first + length]


class Hierarchical(Learned):
    """Learned vectors for n^2 positions from a table p of only n rows (hierarchical decomposition).

    With positions counted from 1, position (i-1) n + j gets a u_i + (1-a) u_j, where u_i = (p_i - a p_1) / (1-a) and
    a = ALPHA. The first n positions are thus the rows of p themselves.

    Source: Su 2020, https://kexue.fm/archives/7947.
    """

    def forward(self, length: int, first: int = 0) -> Tensor:
        """Return the vectors of ``length`` positions from ``first`` on, (length, D)."""
        p_nD = self.weight
        n = len(p_nD)
        u_nD = (p_nD - ALPHA * p_nD[0]) / (1 - ALPHA)
        stop = first + length
        outer, inner = math.ceil(stop / n), min(stop, n)
        table = ALPHA * u_nD[:outer, None] + (1 - ALPHA) * u_nD[None, :inner]
        return table.flatten(0, 1)[first:stop]


class Sinusoidal(nn.Module):
    """Fixed position vectors: alternating sines and cosines of wavelengths from 2 pi to 10,000 x 2 pi.

    Args:
        rows: Number of positions.
        hidden: Width D of a vector.

    Source: Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self._rows, self._hidden = rows, hidden
        self._table: Tensor | None = None

    def forward(self, length: int, like: Tensor, first: int = 0) -> Tensor:
        """Return the vectors of ``length`` positions from ``first`` on, (length, D).

        The dtype and the device are those of ``like`` at the first call.
        """
        if self._table is None:
            at = torch.arange(self._rows, dtype=torch.float64, device="cpu")[:, None]
            angles = at * speeds(self._hidden, 10_000.0)
            both = torch.stack((angles.sin(), angles.cos()), dim=-1)
            self._table = both.flatten(1)[:, : self._hidden].to(like)
        return self._table[first : first + length]


class Rope:
    """Rotary position encoding of queries and keys.

    The pair (x_i, x_{i+d/2}) is rotated by the angle position x base^(-2i/d), so that the product of a query and a key
    depends on their distance only.

    Args:
        seq: Largest number of positions.
        width: Width d of a head.
        base: Base of the angles.
        scaling: How angles are scaled for longer sequences; None for not at all.

    Source: Su et al. 2021, "RoFormer", section 3.2.
    """

    def __init__(self, seq: int, width: int, base: float, scaling: RopeScaling | None = None) -> None:
        self._seq = seq
        self._width = width
        self._base = base
        self._scaling = scaling
        # the length that the angles depend on, and their table
        self._cached: tuple[int, tuple[Tensor, Tensor]] | None = None
        self._here: tuple[Pieces, int, list[Tensor]] | None = None  # last call's tokens, length and rows
        self._there: tuple[Tensor, list[Tensor]] | None = None  # last call's positions (B,), and their rows

    def turn(self, x_BNSd: Tensor, tokens: Pieces) -> Tensor:
        """Rotate the vectors of all heads.

        Args:
            x_BNSd: Queries or keys.
            tokens: The pieces of the whole sequence that dim S holds.

        Returns:
            The rotated vectors (B, N, S, d).
        """
        return apply_function(_Turned, x_BNSd, *self._rows(tokens, x_BNSd), False)

    def turn_at(self, x_BNSd: Tensor, at_B: Tensor) -> Tensor:
        """Rotate vectors (B, N, S, d), all of a sequence at its position in ``at_B``.

        If the angles depend on the length, sequences are no longer than those of the earlier training.
        """
        if self._there is None or self._there[0] is not at_B:  # queries and keys of all layers are turned alike
            self._there = at_B, [part[at_B][:, None] for part in self._table(1, in_fp32(x_BNSd))]
        return apply_function(_Turned, x_BNSd, *self._there[1], False)

    def _rows(self, tokens: Pieces, x_BNSd: Tensor) -> list[Tensor]:
        """Return the cosines and the sines of the tokens' angles, each (S, 1, d); see ``_table``."""
        length = x_BNSd.shape[-2]
        if self._here is None or self._here[:2] != (tokens, length):
            whole = tokens.whole_length(length)
            rows = [tokens.take(part[:whole], 0) for part in self._table(whole, in_fp32(x_BNSd))]
            self._here = tokens, length, rows
        return self._here[2]

    def _table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines for sequences of this length, each (seq, 1, d), with ``like``'s dtype.

        Both numbers of a pair have the same cosine; the first one has minus the sine.
        """
        by = length if self._scaling is not None and self._scaling.kind == "dynamic" else 0
        if self._cached is None or self._cached[0] != by:
            at = torch.arange(self._seq, dtype=torch.float64, device="cpu")[:, None]
            angles = at * speeds(self._width, self._base, self._scaling, length)
            size = magnitude(self._scaling)
            cos, sin = (angles.cos() * size).to(like), (angles.sin() * size).to(like)
            self._cached = by, (torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
        return self._cached[1]


class Alibi:
    """Attention with linear biases: add -slope x distance to the scores instead of encoding positions.

    Args:
        heads: Number of query heads N.
        seq: Largest number of positions.

    Attributes:
        slopes: The slope of each head.

    Source: Press et al. 2022, "Train Short, Test Long", section 3.
    """

    def __init__(self, heads: int, seq: int) -> None:
        self.slopes, self._seq = alibi_slopes(heads), seq
        self._table: Tensor | None = None
        self._parts: dict[tuple[int, int], Alibi] = {}

    def part(self, start: int, stop: int) -> Alibi:
        """Return the bias of the heads ``start`` to ``stop - 1``. Equal calls return one object with one table."""
        if (start, stop) not in self._parts:
            part = self._parts[start, stop] = Alibi(len(self.slopes), self._seq)
            part.slopes = self.slopes[start:stop]
        return self._parts[start, stop]

    def bias(self, length: int, like: Tensor) -> Tensor:
        """Return the bias on the scores, (N, length, length), with -inf for later tokens.

        The dtype and the device are those of ``like`` at the first call.
        """
        if self._table is None:
            at = torch.arange(self._seq, dtype=torch.float32)
            later = torch.ones(self._seq, self._seq, dtype=torch.bool).triu(1)
            distance = (at[:, None] - at).masked_fill(later, math.inf)
            self._table = (-torch.tensor(self.slopes)[:, None, None] * distance).to(like)
        return self._table[:, :length, :length]


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of each head: 2^(-8k/heads) for k = 1, 2, ... if ``heads`` is a power of two.

    Otherwise the slopes are those of the next smaller power of two, followed by every other slope of its double, as in
    the code of the paper's authors.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    return slopes + [2 ** (-4 * k / power) for k in range(1, 2 * (heads - power), 2)]


def added_positions(spec: Transformer) -> Learned | Sinusoidal | None:
    """Return the position table that a model adds to its embeddings, or None."""
    if spec.positions == "learned":
        return Learned(spec.seq, spec.hidden)
    if spec.positions == "hierarchical":
        return Hierarchical(math.isqrt(spec.seq - 1) + 1, spec.hidden)
    return Sinusoidal(spec.seq, spec.hidden) if spec.positions == "sinusoidal" else None


def between(spec: Transformer) -> Rope | Alibi | None:
    """Return the position encoding that a model uses inside attention, or None."""
    if spec.positions == "rope":
        return Rope(spec.seq, spec.head_size, spec.rope_base, spec.rope_scaling)
    return Alibi(spec.heads, spec.seq) if spec.positions == "alibi" else None


class _Turned(torch.autograd.Function):
    """Vectors rotated pair by pair, by four ops: autograd's own graph takes six in half precision, with two casts.

    They are laid out in memory as (B, N, S, d), and gradients as (B, S, N, d), which the backward of the projections
    reads without a copy.
    """

    @staticmethod
    def forward(ctx: Any, x_BNSd: Tensor, cos: Tensor, sin: Tensor, is_gradient: bool) -> Tensor:
        """Return the rotated vectors (B, N, S, d) in the dtype of ``x_BNSd``, computed in that of the angles.

        Args:
            ctx: autograd's context.
            x_BNSd: The vectors.
            cos: Cosines that can be broadcast to (B, S, N, d), the same for both numbers of a pair.
            sin: Sines, minus those of the angles for the first number of a pair.
            is_gradient: Whether the vectors are gradients of rotated ones: these are rotated back.
        """
        ctx.save_for_backward(cos, sin)
        ctx.is_gradient = is_gradient
        if is_gradient:
            x_BSNd = x_BNSd.transpose(1, 2)
            return _rotated(x_BSNd, cos, sin, -1).transpose(1, 2)
        return _rotated(x_BNSd, cos.transpose(-3, -2), sin.transpose(-3, -2), 1)

    @staticmethod
    def backward(ctx: Any, gradient_BNSd: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient of the output back."""
        return apply_function(_Turned, gradient_BNSd, *ctx.saved_tensors, not ctx.is_gradient), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return x (..., d) with rotated pairs, contiguous: x cos + swapped sin; ``sign`` -1 subtracts the second term."""
    rotated = x.roll(x.shape[-1] // 2, -1)
    return torch.add(x * cos, rotated * sin, alpha=sign, out=rotated)
