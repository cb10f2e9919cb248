"""Low-rank adapters, which learn in the place of a model's weights, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.actors.bounds import Count, Positive
from raypar.actors.known_fields import known_fields

Targets = Literal["attn", "mlp", "all"]
LORA = "_lora"  # what the logical name of an adapter ends with, behind that of its layer


@known_fields(r="rank", lora_alpha="alpha", target_modules="targets, attn, mlp or all")
@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a linear layer W of a block becomes W + alpha / rank B A, of which only A and B learn.

    A is (rank, in) and random, B (out, rank) and 0 at first.

    Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    rank: Count = 8
    """inner width of the adapters"""
    alpha: Positive = 16.0
    """what they add is multiplied by alpha / rank"""
    targets: Targets = "all"
    """linear layers that get one: attn: queries, keys, values and the output; mlp: those of the MLP; all: both"""
    hf: str | None = None
    """folder of adapters that they begin with, as PEFT and raypar ckpt export --adapter write it; None: random ones"""

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, part: Literal["attn", "mlp"]) -> bool:
        """Return whether the linear layers of a part of the blocks get adapters."""
        return self.targets in (part, "all")


def is_adapter(name: str) -> bool:
    """Return whether a weight with this logical name belongs to an adapter."""
    return f"{LORA}." in name
