"""A line of metrics.jsonl, the report of a step or an evaluation: its schemas, and how it is written and read.

JSON has no NaN and no infinity. Figures that may be either, as those of a training that fails, are written as "NaN",
"Infinity" and "-Infinity". An older raypar wrote these words without quotes, which is read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AllowInfNan, BeforeValidator, FailFast


def _fitting(value: object) -> object:
    """Refuse a whole number that no float can be: JSON has no bound, and pydantic would take it for infinity."""
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError as error:
            raise ValueError("it is too large for a float") from error
    return value


Number = Annotated[int, Ge(0), Le(2**63 - 1)]
Figure = Annotated[float, AllowInfNan(False), Ge(-1e15), Le(1e15)]
Loss = Annotated[float, BeforeValidator(_fitting)] | Literal["NaN", "Infinity", "-Infinity"]
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
    of a step by hand are None, and so is the loss of a step without targets.
    """

    step: Number
    loss: Loss | None
    grad_norm: Loss
    lr: Figure
    tokens: Number
    tokens_per_s: Figure | None
    step_ms: Figure | None
    bubble: Figure | None
    overlap: Figure | None
    in_flight: Numbers
    peak_memory: Numbers
    communication: Figure | None = None
    mfu: Figure | None = None
    hfu: Figure | None = None
    memory: dict[str, Numbers] | None = None
    samples: Number | None = None
    loss_scale: Figure | None = None
    skipped: bool = False
    by_hand: bool = False
    overflow: OverflowLine | None = None
    aux: dict[str, Loss] | None = None
    aux_by_layer: dict[str, dict[str, Loss]] | None = None
    loads: LoadsLine | None = None
    max_load: Figure | None = None
    dropped: Figure | None = None


@dataclass(frozen=True)
class EvaluationLine:
    """The schema of an evaluation."""

    step: Number
    val_loss: Loss | None
    tokens: Number
    perplexity: Loss | None = None
    bits_per_byte: Loss | None = None
    metrics: dict[str, Loss | None] | None = None


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metrics_line(line: Mapping[str, Any]) -> str:
    """Return a report or an evaluation, as its ``to_dict`` makes it, as a line of JSON."""
    return json.dumps(_mapped(line, _word), allow_nan=False) + "\n"


def figures_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed line with floats instead of the words for NaN and infinity."""
    return _mapped(line, lambda value: _WORDS.get(value, value) if isinstance(value, str) else value)


def _word(value: Any) -> Any:
    """Return the word for a number that is not finite, other values as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return next(word for word, number in _WORDS.items() if number == value or (math.isnan(number) and value != value))


def _mapped(line: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Return a mapping, and the mappings in it, with every value changed."""
    return {key: _mapped(value, change) if isinstance(value, Mapping) else change(value) for key, value in line.items()}
