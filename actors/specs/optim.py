"""Optimizers and their learning-rate schedules, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from raypar.actors.bounds import NotNegative, Positive, Share, Steps
from raypar.actors.known_fields import known_fields

Decay = Literal["constant", "cosine", "linear"]


@known_fields()
@dataclass(frozen=True)
class AdamW:
    """torch's AdamW (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = field(default="adamw", kw_only=True)
    """adamw or sgd; each has fields and defaults of its own"""
    lr: Positive = 3e-4
    """peak learning rate"""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """decay rates of the running means of gradients and of their squares"""
    eps: Positive = 1e-8
    """added to the denominator of an update"""
    weight_decay: NotNegative = 0.1
    """decoupled weight decay, for tensors of two or more dims only"""
    warmup: Steps = 0
    """steps of linear warm-up from lr / warmup"""
    decay: Decay = "constant"
    """constant, or cosine / linear down to ``lr * final`` at the last step of the run"""
    final: Annotated[float, Ge(0), Le(1)] = 0.1
    """share of lr that is left at the last step"""


@known_fields()
@dataclass(frozen=True)
class SGD:
    """torch's SGD with momentum."""

    kind: Literal["sgd"] = field(default="sgd", kw_only=True)
    """adamw or sgd; each has fields and defaults of its own"""
    lr: Positive = 1e-2
    """peak learning rate"""
    momentum: Share = 0.9
    """share of the last update that goes into the next one"""
    weight_decay: NotNegative = 0.0
    """L2 penalty, for tensors of two or more dims only"""
    warmup: Steps = 0
    """steps of linear warm-up from lr / warmup"""
    decay: Decay = "constant"
    """constant, or cosine / linear down to ``lr * final`` at the last step of the run"""
    final: Annotated[float, Ge(0), Le(1)] = 0.1
    """share of lr that is left at the last step"""
