"""Optimizers, their groups of weights and their learning-rate schedules, as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from raypar.actors.bounds import Count, NotNegative, Positive, Share, Steps
from raypar.actors.known_fields import known_fields

Decay = Literal["constant", "cosine", "linear", "wsd"]
DecayEnd = Literal["after", "last"]
DecayForm = Literal["linear", "sqrt"]
MuonScale = Literal["original", "match_rms_adamw"]
HalfOrSingle = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Base of AdamW, SGD and Muon: the learning rate of every step, and groups of weights with settings of their own.

    Patterns are shell patterns of logical names, such as ``blocks.0.mlp.up.weight``: ``*`` stands for any letters, dots
    too, ``?`` for one letter and ``[0-3]`` for one of these.
    """

    lr: Positive = 3e-4
    """peak learning rate"""
    warmup: Steps = field(default=0, kw_only=True)
    """steps of linear warm-up from lr / warmup"""
    decay: Decay = field(default="constant", kw_only=True)
    """constant; cosine or linear down to ``lr * final`` at the end of the run; wsd: constant, and then down to
    ``lr * final`` in the last decay_steps steps"""
    decay_end: DecayEnd = field(default="after", kw_only=True)
    """where the decay ends: after: after the last step, so that with final 0 the last step learns, too; last: at the
    last step. A run that is resumed keeps what it began with"""
    final: Annotated[float, Ge(0), Le(1)] = field(default=0.1, kw_only=True)
    """share of lr that is left at the end of the decay"""
    decay_steps: Count | None = field(default=None, kw_only=True)
    """with decay wsd, steps of the decay at the end of the run; None: a tenth of the run's steps"""
    decay_form: DecayForm = field(default="linear", kw_only=True)
    """with decay wsd, how the rate goes down: linear, or sqrt (1 minus the root of the decay's share that is over)"""
    no_decay: tuple[str, ...] = field(default=(), kw_only=True)
    """patterns of weights without weight decay, beside those of fewer than two dims, which never have one"""
    rates: Mapping[str, NotNegative] = field(default_factory=dict, kw_only=True, hash=False)
    """by pattern, what the learning rate of its weights is multiplied by; of several patterns the first counts"""

    @property
    def states(self) -> int:
        """Values that it keeps for a parameter, at the most."""
        return 2

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """Yield the fields that have no effect beside others.

        Args:
            right: Called with paths of a run's fields, returns whether these have valid values by themselves.
        """
        if not right("optim.decay") or self.decay == "wsd":
            return
        for name, idle in (("decay_steps", self.decay_steps is None), ("decay_form", self.decay_form == "linear")):
            if right(f"optim.{name}") and not idle:
                what = f"optim.{name} is {getattr(self, name)!r}, but optim.decay is {self.decay!r}"
                yield f"{what}: leave it out, or let decay be 'wsd'"


@known_fields()
@dataclass(frozen=True)
class AdamW(OptimizerSettings):
    """torch's AdamW (Loshchilov & Hutter 2019). Without weight decay it is Adam (Kingma & Ba 2015)."""

    kind: Literal["adamw"] = field(default="adamw", kw_only=True)
    """adamw, sgd or muon; each has fields and defaults of its own"""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """decay rates of the running means of gradients and of their squares"""
    eps: Positive = 1e-8
    """added to the denominator of an update"""
    weight_decay: NotNegative = 0.1
    """decoupled weight decay, for tensors of two or more dims only"""


@known_fields()
@dataclass(frozen=True)
class SGD(OptimizerSettings):
    """torch's SGD with momentum."""

    kind: Literal["sgd"] = field(default="sgd", kw_only=True)
    """adamw, sgd or muon; each has fields and defaults of its own"""
    lr: Positive = 1e-2
    """peak learning rate"""
    momentum: Share = 0.9
    """share of the last update that goes into the next one"""
    weight_decay: NotNegative = 0.0
    """L2 penalty, for tensors of two or more dims only"""

    @property
    def states(self) -> int:
        """The momentum, if it has one."""
        return int(self.momentum > 0)


@known_fields(betas="adamw_betas", eps="adamw_eps")
@dataclass(frozen=True)
class Muon(OptimizerSettings):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers, and AdamW for all other weights.

    A matrix is a weight of exactly two dims whose name no pattern of ``adamw`` matches. It is updated as one matrix, a
    fused projection of queries, keys and values too; three separate ones are better. Convolutions and other weights of
    more dims are AdamW's.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    scalable for LLM training", section 2.2 (weight decay and match_rms_adamw).
    """

    kind: Literal["muon"] = field(default="muon", kw_only=True)
    """adamw, sgd or muon; each has fields and defaults of its own"""
    momentum: Share = 0.95
    """share of the running mean of gradients that is kept in each step"""
    weight_decay: NotNegative = 0.1
    """decoupled weight decay, Muon's and AdamW's, for tensors of two or more dims only"""
    nesterov: bool = True
    """whether to look one step of the momentum ahead"""
    scale: MuonScale = "match_rms_adamw"
    """what an orthogonal update is multiplied by: match_rms_adamw: 0.2 * sqrt(the longer dim), so that lr and
    weight_decay may be those of AdamW; original: sqrt(max(1, rows / columns)), for an lr of about 0.02"""
    iterations: Annotated[int, Ge(1), Le(99)] = 5
    """Newton-Schulz iterations"""
    precision: HalfOrSingle = "fp32"
    """dtype of these iterations: fp32, or bf16 as in torch.optim.Muon, in half the time; but then rounding noise of
    gradients changes updates by a percent"""
    adamw: tuple[str, ...] = ("embed.*", "head.*")
    """patterns of the matrices that AdamW updates: embedding and head. With your own Layers name yours"""
    adamw_lr: Positive | None = None
    """peak learning rate of AdamW's weights; None: lr"""
    adamw_betas: tuple[Share, Share] = (0.9, 0.95)
    """betas of AdamW"""
    adamw_eps: Positive = 1e-8
    """eps of AdamW"""


AnyOptimizer = AdamW | SGD | Muon
