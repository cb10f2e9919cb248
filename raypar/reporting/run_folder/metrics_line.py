"""The schemas of a line of metrics.jsonl: the report of a step, or an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AllowInfNan, FailFast

Number = Annotated[int, Ge(0), Le(2**63 - 1)]
Figure = Annotated[float, AllowInfNan(False), Ge(-1e15), Le(1e15)]
Numbers = Annotated[tuple[Number, ...], FailFast()]  # each error takes a hundred times the memory of a digit


@dataclass(frozen=True)
class LayerLine:
    """The schema of what overflows in one layer."""

    layer: str
    kind: str
    microbatch: Number | None
    actor: str
    values: Number
    over: Number
    under: Number


@dataclass(frozen=True)
class OverflowLine:
    """The schema of a step's counts of overflow."""

    format: str
    layers: Annotated[list[LayerLine], FailFast()]


@dataclass(frozen=True)
class LoadLine:
    """The schema of the load of one layer's experts."""

    layer: str
    asked: Numbers
    dropped: Numbers = ()


@dataclass(frozen=True)
class LoadsLine:
    """The schema of the load of all experts."""

    layers: Annotated[list[LoadLine], FailFast()]


@dataclass(frozen=True)
class StepLine:
    """The schema of a step's report, as all versions of raypar write it; what only some of them write has a default.

    Its figures must be finite, except losses and gradient norm, which a failing training makes infinite or NaN. Times
    of a step by hand are None.
    """

    step: Number
    loss: float
    grad_norm: float
    lr: Figure
    tokens: Number
    tokens_per_s: Figure | None
    step_ms: Figure | None
    bubble: Figure | None
    overlap: Figure | None
    in_flight: Numbers
    peak_memory: Numbers
    memory: dict[str, Numbers] | None = None
    samples: Number | None = None
    loss_scale: Figure | None = None
    skipped: bool = False
    by_hand: bool = False
    overflow: OverflowLine | None = None
    aux: dict[str, float] | None = None
    aux_by_layer: dict[str, dict[str, float]] | None = None
    loads: LoadsLine | None = None
    max_load: Figure | None = None
    dropped: Figure | None = None


@dataclass(frozen=True)
class EvaluationLine:
    """The schema of an evaluation."""

    step: Number
    val_loss: float
    tokens: Number
    perplexity: float | None = None
