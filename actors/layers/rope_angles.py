"""The angles by which RoPE turns the pairs of a head, as they are or scaled for longer sequences.

Sources: Su et al. 2021, "RoFormer", section 3.2; Chen et al. 2023, "Extending Context Window of Large Language Models
via Positional Interpolation"; Peng et al. 2023, "YaRN", sections 3.1 to 3.4 (with the NTK-aware and dynamic forms);
Llama team 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raypar.actors.specs.rope_scaling import RopeScaling


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
    span = (
        0.001 if first == last else last - first
    )  # below 0 where no pair turns so often: then all stay, as in the reference
    return 1 - ((pairs - first) / span).clamp(0, 1)


def _kept_by_llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return how much of each pair's angle stays, by how many times it turns in the trained tokens."""
    assert scaling.trained is not None
    turns = scaling.trained * plain / (2 * math.pi)
    return ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
