"""Low-rank adapters, which are trained instead of a model's weights, as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from raypar.actors.bounds import Count, Positive
from raypar.actors.known_fields import known_fields

Adaptable = Literal["q", "k", "v", "out", "gate", "up", "down"]  # the linear layers of a block
Targets = Literal["attn", "mlp", "all"] | tuple[Adaptable, ...]
LAYERS: tuple[Adaptable, ...] = get_args(Adaptable)
OF_PARTS: Mapping[str, tuple[Adaptable, ...]] = {"attn": LAYERS[:4], "mlp": LAYERS[4:], "all": LAYERS}
LORA = "_lora"  # suffix of the logical name of an adapter, after that of its layer


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
    """linear layers that get one: attn: queries, keys, values and the output; mlp: those of the MLP; all: both; or
    their names, of q, k, v, out, gate, up and down, as ("q", "v")"""
    hf: str | None = None
    """folder of adapters that they begin with, as PEFT and raypar ckpt export --adapter write it; None: random ones"""

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / self.rank

    @property
    def layers(self) -> tuple[Adaptable, ...]:
        """The linear layers of a block that get adapters; a GPT has no gate."""
        return OF_PARTS[self.targets] if isinstance(self.targets, str) else self.targets

    def faults(self, *, gated: bool) -> Iterator[str]:
        """Yield why ``targets`` does not fit the model.

        Args:
            gated: Whether its MLPs have gates.
        """
        if isinstance(self.targets, str):
            return
        says = f"model.lora.targets is {self.targets!r}"
        if not self.targets or len(set(self.targets)) < len(self.targets):
            yield f"{says}: name one layer at least, and each once"
        if "gate" in self.targets and not gated:
            yield f"{says}, and a GPT's MLP has up and down alone: leave out 'gate'"


def is_adapter(name: str) -> bool:
    """Return whether a weight with this logical name belongs to an adapter."""
    return f"{LORA}." in name
