"""Positions of tokens: vectors that are added, rotations, biases. Written from the papers, in float64.

Shapes: S tokens, D width of the model, d width of a head, N heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def sinusoidal(at_S: Tensor, width: int) -> Tensor:
    """Return the vectors of positions, (S, D): Vaswani et al. 2017, section 3.5."""
    table = torch.zeros(len(at_S), width, dtype=torch.float64)
    for dim in range(width):
        angle = at_S.double() / 10000.0 ** (2 * (dim // 2) / width)
        table[:, dim] = torch.sin(angle) if dim % 2 == 0 else torch.cos(angle)
    return table


def hierarchical(table_nD: Tensor, at_S: Tensor) -> Tensor:
    """Return the vectors of positions, (S, D), from a table of n rows for n^2: Su 2020, kexue.fm/archives/7947."""
    n, a = len(table_nD), 0.4
    rows = []
    for at in at_S.tolist():
        outer, inner = divmod(at, n)
        u_outer, u_inner = ((table_nD[row] - a * table_nD[0]) / (1 - a) for row in (outer, inner))
        rows.append(a * u_outer + (1 - a) * u_inner)
    return torch.stack(rows)


def rotated(x_BNSd: Tensor, at_S: Tensor, base: float, scaling: dict[str, Any] | None, length: int) -> Tensor:
    """Rotate the pairs (i, i + d/2) of queries or keys: Su et al. 2021, section 3.2, equation 34.

    Args:
        x_BNSd: The vectors.
        at_S: The positions of the tokens, (S,) or (B, S).
        base: Base of the angles.
        scaling: Fields kind, factor, trained and others; None for none.
        length: Tokens of the whole sequence.
    """
    d = x_BNSd.shape[-1]
    out = torch.empty_like(x_BNSd)
    angles, size = _angles(d, base, scaling, length)
    for pair in range(d // 2):
        turn = at_S.double() * angles[pair]
        cos, sin = torch.cos(turn) * size, torch.sin(turn) * size
        if cos.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        one, other = x_BNSd[..., pair], x_BNSd[..., pair + d // 2]
        out[..., pair] = one * cos - other * sin
        out[..., pair + d // 2] = one * sin + other * cos
    return out


def _angles(d: int, base: float, scaling: dict[str, Any] | None, length: int) -> tuple[list[float], float]:
    """Return the angle a token of each pair, and what vectors are multiplied by."""
    plain = [base ** (-2 * pair / d) for pair in range(d // 2)]
    if scaling is None:
        return plain, 1.0
    kind, factor, trained = scaling["kind"], scaling["factor"], scaling["trained"]
    if kind == "linear":  # Chen et al. 2023: positions are divided
        return [angle / factor for angle in plain], 1.0
    if kind == "dynamic":  # Peng et al. 2023, section 3.3: the base grows with the sequence
        if length > trained and d > 2:
            base = base * ((factor * length / trained) - (factor - 1)) ** (d / (d - 2))
        return [base ** (-2 * pair / d) for pair in range(d // 2)], 1.0
    if kind == "llama3":  # Llama team 2024: by wavelength
        made = []
        for angle in plain:
            wavelength = 2 * math.pi / angle
            if wavelength < trained / scaling["high"]:
                made.append(angle)
            elif wavelength > trained / scaling["low"]:
                made.append(angle / factor)
            else:
                smooth = (trained / wavelength - scaling["low"]) / (scaling["high"] - scaling["low"])
                made.append((1 - smooth) * angle / factor + smooth * angle)
        return made, 1.0
    assert kind == "yarn"  # Peng et al. 2023, section 3.2 (by parts) and 3.4 (temperature)

    def pair_of(rotations: float) -> float:
        return d * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(scaling["fast"]), pair_of(scaling["slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    made = []
    for pair, angle in enumerate(plain):
        ramp = min(1.0, max(0.0, (pair - low) / (high - low if high - low > 0.001 else 0.001)))
        made.append(angle / factor * ramp + angle * (1 - ramp))
    size = 0.1 * math.log(factor) + 1.0 if scaling["attention"] is None else scaling["attention"]
    return made, size


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head: Press et al. 2022, section 3, and the authors' code where N is no power of 2."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
    power = 1 << (heads.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[0::2][: heads - power]
