"""Mixture of experts in place of a block's MLP, as plain data. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from raypar.actors.bounds import Count, NotNegative, Positive, Steps
from raypar.actors.known_fields import known_fields

Gate = Literal["softmax", "shazeer", "gshard", "switch", "sigmoid"]
ExpertLoss = Literal["switch", "gshard", "joint", "none"]

_CHOICES = {"gshard": 2, "switch": 1}  # of a token, where the gate's paper says it
_NOISY = ("softmax", "switch")  # gates whose noise has a size that is set
_BIASED = ("softmax", "sigmoid")
_RAW = ("softmax", "switch")  # gates that their papers do not normalise


@known_fields(num_experts="experts", k="top_k", capacity_factor="capacity", aux_loss="loss", loss_weight="alpha")
@dataclass(frozen=True)
class MoE:
    """Experts in place of the MLPs of some blocks: a router chooses a few of them for each token."""

    experts: Count | Annotated[tuple[Count, ...], MinLen(1)] = 8
    """experts of a layer, or a number for each layer that has some, as (4, 4, 8, 8)"""
    top_k: Count = 2
    """experts that a token chooses"""
    gate: Gate = "softmax"
    """softmax: the largest probabilities, with noise as an option; shazeer: the largest logits with learned noise, then
    softmax (Shazeer et al. 2017); gshard: two, the second by chance (Lepikhin et al. 2020); switch: one (Fedus et al.
    2021); sigmoid: the largest sigmoids (DeepSeek-AI 2024)"""
    normalise: bool | None = None
    """whether the gates of a token add up to 1; None: as in the gate's paper, true but for softmax, switch"""
    noise: NotNegative = 0.0
    """in training, of softmax the size of the normal noise in the logits, of switch the jitter of the router's input"""
    bias_rate: NotNegative = 0.0
    """with softmax and sigmoid, how much a step moves the bias that is added to scores for the choice: up for experts
    with less than the mean load, down for the others; 0: there is none"""
    groups: Count = 1
    """with sigmoid, groups of consecutive experts"""
    top_groups: Count = 1
    """with groups, how many of them a token may choose from"""
    capacity: Positive | None = None
    """capacity factor: an expert takes so many times its even share of a sequence, and drops what is more; None: it
    takes all"""
    loss: ExpertLoss = "switch"
    """auxiliary loss that evens out the load: of each layer that of Switch or of GShard; or joint, one over the tokens
    of all layers, as transformers has it for Mixtral and Qwen3-MoE"""
    alpha: NotNegative = 0.01
    """weight of the auxiliary loss"""
    z_loss: NotNegative = 0.0
    """weight of the loss that keeps the router's logits small (Zoph et al. 2022)"""
    width: Count | None = None
    """width of an expert; None: that of the model's MLP"""
    shared: Steps = 0
    """experts that every token has besides, as one MLP of so many widths (DeepSeek-AI 2024)"""
    residual: bool = False
    """add an MLP that every token has, mixed with the experts by a softmax over the two (Rajbhandari et al. 2022)"""
    every: Count = 1
    """one of every so many blocks has experts, the last of them; the others keep their MLP"""
    first: Annotated[int, Ge(0)] | None = None
    """the first block with experts, counted from 0; None: every - 1"""

    @classmethod
    def glam(cls, **changes: Any) -> MoE:
        """Return the experts of GLaM: 64, two of them for a token, in every other block.

        Args:
            **changes: Fields to change.

        Source: Du et al. 2022, "GLaM", section 4, whose gate and loss are GShard's.
        """
        fields: dict[str, Any] = {"experts": 64, "top_k": 2, "gate": "gshard", "loss": "gshard", "every": 2}
        return cls(**fields | changes)

    def blocks(self, layers: int) -> range:
        """Return the indices of the blocks that have experts.

        Args:
            layers: Number of blocks of the model.
        """
        return range(self.every - 1 if self.first is None else self.first, layers, self.every)

    def num_experts(self, block: int, layers: int) -> int:
        """Return the number of experts of a block; 0 if it has an MLP instead.

        Args:
            block: Index of the block.
            layers: Number of blocks of the model.
        """
        if block not in self.blocks(layers):
            return 0
        return self.experts if isinstance(self.experts, int) else self.experts[self.blocks(layers).index(block)]

    @property
    def normalises(self) -> bool:
        """Whether the gates of a token add up to 1."""
        return self.gate not in _RAW if self.normalise is None else self.normalise

    def faults(self, layers: int, seq: int) -> Iterator[str]:
        """Yield the settings that contradict each other, each with its fix.

        Args:
            layers: Number of blocks of the model.
            seq: Most tokens of a sequence.
        """
        blocks, path = self.blocks(layers), "model.moe"
        every = (self.experts,) if isinstance(self.experts, int) else self.experts
        fewest = min(every)
        if not blocks:
            field, most = (f"every {self.every}", layers) if self.first is None else (f"first {self.first}", layers - 1)
            yield f"{path}.{field} leaves no block of {layers} with experts: set it to {most} at most"
        elif not isinstance(self.experts, int) and len(self.experts) != len(blocks):
            what = f"{path}.experts has {len(self.experts)} numbers, and {len(blocks)} blocks have experts"
            yield f"{what}: give one number, or {len(blocks)}"
        if self.top_k > fewest:
            fix = f"set it to {fewest} at most, or use more experts"
            yield f"{path}.top_k {self.top_k} is more than the {fewest} experts: {fix}"
        yield from self._gate_faults(fewest, every)
        if self.capacity is not None and self.capacity * seq * self.top_k < (most := max(every)):
            left, least = self.capacity * seq * self.top_k / most, most / (seq * self.top_k)
            yield (
                f"{path}.capacity {self.capacity:g} leaves {left:.2g} tokens of a sequence for an expert (of {seq} "
                f"tokens, top_k {self.top_k}, {most} experts): set it to {_rounded_up(least):g} at least, or to None"
            )

    def _gate_faults(self, fewest: int, every: tuple[int, ...]) -> Iterator[str]:
        """Yield settings that the gate does not use or support."""
        path = "model.moe"
        if (choices := _CHOICES.get(self.gate, self.top_k)) != self.top_k:
            fix = f"set it to {choices}, or set gate to {'switch' if self.top_k == 1 else 'softmax'!r}"
            yield f"{path}.top_k is {self.top_k}, but gate {self.gate!r} chooses {choices}: {fix}"
        if self.noise and self.gate not in _NOISY:
            has = "none" if self.gate == "sigmoid" else "its own"
            fix = "leave it out, or set gate to 'softmax'"
            yield f"{path}.noise is {self.noise:g}, but gate {self.gate!r} has {has}: {fix}"
        if self.bias_rate and self.gate not in _BIASED:
            fix = "leave it out, or set gate to 'sigmoid'"
            yield f"{path}.bias_rate is {self.bias_rate:g}, but gate {self.gate!r} has no bias: {fix}"
        if self.normalise is False and self.gate == "shazeer":
            yield f"{path}.normalise is false, but gate 'shazeer' is a softmax of those chosen: leave it out"
        if self.loss == "none" and self.alpha != MoE.alpha:
            yield f"{path}.alpha is {self.alpha:g}, but loss is 'none': leave it out, or set loss to 'switch'"
        if self.groups == 1:
            if self.top_groups > 1:
                yield f"{path}.top_groups is {self.top_groups}, but groups is 1: leave it out, or set groups to more"
            return
        if self.gate != "sigmoid":
            fix = "leave it out, or set gate to 'sigmoid'"
            yield f"{path}.groups is {self.groups}, but gate {self.gate!r} knows none: {fix}"
            return
        for experts in sorted(set(every)):
            if experts % self.groups:
                below = experts // self.groups * self.groups
                near = " or ".join(str(fit) for fit in (below, below + self.groups) if fit)
                fix = f"set {path}.experts to {near}" if isinstance(self.experts, int) else f"use {near} experts"
                yield f"{path}.groups {self.groups} does not divide {experts} experts: {fix}"
        if self.top_groups > self.groups:
            fix = f"set it to {self.groups} at most"
            yield f"{path}.top_groups {self.top_groups} is more than groups {self.groups}: {fix}"
        elif (inside := self.top_groups * (fewest // self.groups)) < self.top_k <= fewest:
            yield f"{path}.top_groups {self.top_groups} leaves {inside} experts for top_k {self.top_k}: use more groups"


def orders_of(written: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Read the orders of experts, which are written as "0 2 1 3", by the name of the list."""
    return {name: tuple(map(int, words.split())) for name, words in written.items()}


def _rounded_up(number: float) -> float:
    """Return a positive number with two digits, and not less than it is."""
    digits = 1 - math.floor(math.log10(number))
    scale: float = 10.0**digits
    return math.ceil(number * scale) / scale
