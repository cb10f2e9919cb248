"""How the angles of RoPE are changed for sequences longer than a model was trained with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from raypar.actors.bounds import Count, Positive
from raypar.actors.known_fields import known_fields

ScalingKind = Literal["linear", "dynamic", "yarn", "llama3"]


@known_fields(rope_type="kind", type="kind", original_max_position_embeddings="trained")
@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations, so that positions beyond those of an earlier training rotate by known angles."""

    kind: ScalingKind = "linear"
    """linear: all angles divided by factor (Chen et al. 2023); dynamic: a larger base for sequences beyond trained
    (NTK-aware); yarn: slow pairs divided by factor, fast ones kept, and larger scores (Peng et al. 2023); llama3: by
    the wavelength of each pair (Llama team 2024)"""
    factor: Annotated[float, Ge(1.0)] = 1.0
    """how many times longer sequences become"""
    trained: Count | None = None
    """most tokens in a sequence of the earlier training; linear needs none"""
    low: Positive = 1.0
    """of llama3: pairs that turn fewer than low times in trained tokens are divided by factor"""
    high: Positive = 4.0
    """of llama3: pairs that turn more than high times in trained tokens stay"""
    fast: Positive = 32.0
    """of yarn: pairs that turn more than fast times in trained tokens stay"""
    slow: Positive = 1.0
    """of yarn: pairs that turn fewer than slow times in trained tokens are divided by factor"""
    truncate: bool = True
    """of yarn: whether the bounds between pairs are rounded to whole ones"""
    attention: Positive | None = None
    """of yarn: what queries and keys are multiplied by; None: 0.1 ln(factor) + 1"""

    def faults(self, positions: str) -> Iterator[str]:
        """Yield the fields that do not fit each other.

        Args:
            positions: The model's positions.
        """
        if positions != "rope":
            message = f"model.rope_scaling is given, but model.positions is {positions!r}"
            yield f"{message}: set positions to 'rope', or leave rope_scaling out"
        if self.kind != "linear" and self.trained is None:
            message = f"model.rope_scaling.trained is None, and {self.kind!r} goes by it"
            yield f"{message}: give the most tokens in a sequence of the earlier training"
        if self.kind == "llama3" and self.low >= self.high:
            message = f"model.rope_scaling.low is {self.low:g}, and high {self.high:g}"
            yield f"{message}: low must be less than high, as 1 and 4"
        if self.kind == "yarn" and self.slow >= self.fast:
            message = f"model.rope_scaling.slow is {self.slow:g}, and fast {self.fast:g}"
            yield f"{message}: slow must be less than fast, as 1 and 32"
