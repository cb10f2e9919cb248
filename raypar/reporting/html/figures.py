"""The figures of a run folder, and their formats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

from pydantic import ValidationError

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import transformer_costs
from raypar.actors.specs.model import GPT, Llama, RopeScaling
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.types import ELEMENTS, LEARNED, TOKENS, names_cross_entropy
from raypar.reporting.loss_text import loss_text, metric_rows
from raypar.reporting.run_folder.damage import reader_of
from raypar.reporting.run_folder.failure_line import effective_share
from raypar.reporting.run_folder.read import Past
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import amount, duration, percentage, size

Points = list[tuple[float, float]]
_NO_PART = ("offloaded", "cache")  # memory that is not in the peak of a step
_KINDS: dict[str, Any] = {"gpt": GPT, "llama": Llama}
_AXIS = 1000  # most points of an axis, between which a page interpolates


@dataclass(frozen=True)
class History:
    """The steps and evaluations of a run, sorted by step. If a resumed run repeated a step, the last one counts.

    Attributes:
        steps: One dict for each step (``Report.to_dict``).
        evaluations: One dict for each evaluation (``Evaluation.to_dict``).
        config: The configuration of the run, as plain tables; empty if it could not be read.
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    config: dict[str, Any]

    @classmethod
    def of(cls, past: Past) -> History:
        """Sort the metrics of a run folder; of a step that was taken again, the last line counts."""
        steps: dict[int, dict[str, Any]] = {}
        evaluations: dict[int, dict[str, Any]] = {}
        for line in past.metrics:
            (evaluations if "val_loss" in line else steps)[line["step"]] = line
        return cls(_ordered(steps), _ordered(evaluations), past.config)

    @cached_property
    def unit(self) -> str:
        """What the run counts: the user's unit, else tokens of a sequence, else samples.

        If it is samples, and not all steps have their number, because an older raypar wrote them: targets.
        """
        model, named = self.config.get("model", {}), self.config.get("unit", "none")
        if named == "none":
            tokens = LEARNED if self.config.get("data", {}).get("kind") == "examples" else "tokens"
            named = tokens if isinstance(model.get("seq"), int) or "layers" in model else "samples"
        known = named in ELEMENTS or (self.steps and all(line.get("samples") for line in self.steps))
        return str(named) if known else "targets"

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is a cross-entropy of tokens, so that exp(loss) is a perplexity."""
        model = self.config.get("model", {})
        if not (isinstance(model.get("seq"), int) or "layers" in model or self.config.get("unit") in TOKENS):
            return False
        return "layers" in model or names_cross_entropy(str(model.get("loss")))

    def count(self, line: dict[str, Any]) -> int:
        """Return how many of its units a step had."""
        return int(line["tokens"] if self.unit in ELEMENTS else line["samples"])

    def seen(self) -> Points:
        """Return ``(number of steps taken, units seen until then)`` of every step.

        Steps that are missing at the start are in another folder, and not counted: they may have been of other sizes.
        """
        total, points = 0, Points()
        for line in self.steps:
            total += self.count(line)
            points.append((line["step"] + 1, total))
        return points

    def throughput(self) -> Points:
        """Return ``(number of steps taken, units a second)`` of every step."""
        if self.unit in ELEMENTS:
            return self.points("tokens_per_s")
        return [(line["step"] + 1, 1e3 * line["samples"] / line["step_ms"]) for line in self.steps if line["step_ms"]]

    def model_flops(self) -> Points:
        """Return ``(number of steps taken, model FLOP/s of one actor)`` of every step; empty if they are not known."""
        each, actors = flops_per_token(self.config), actors_of(self.config)
        if each is None or not actors:
            return []
        return [(step, speed * each / actors) for step, speed in self.points("tokens_per_s")]

    def axes(self) -> dict[str, Any]:
        """Return the axes over which a page draws this run: steps, and at each the units seen and seconds so far."""
        times = accumulate((line["step_ms"] or 0.0) / 1e3 for line in self.steps)
        rows = [(step, seen, round(time, 3)) for (step, seen), time in zip(self.seen(), times, strict=True)]
        kept = rows[:: -(-len(rows) // _AXIS) or 1] + rows[-1:]
        kept = [(kept[0][0] - 1, 0, 0.0), *kept] if kept else []
        return {
            "unit": self.unit,
            **dict(zip(("step", "seen", "time"), map(list, zip(*kept, strict=True)), strict=False)),
        }

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return ``(number of steps taken, figure)`` of every step that has it: times of steps by hand say nothing."""
        return [(line["step"] + 1, line[name]) for line in self.steps if line.get(name) is not None]

    @property
    def by_hand(self) -> int:
        """How many of the steps were taken by hand."""
        return sum(line.get("by_hand", False) for line in self.steps)

    @property
    def skipped(self) -> list[int]:
        """The steps, counted from 1, that changed no weight: a number was not finite, or they had no targets."""
        return [line["step"] + 1 for line in self.steps if line.get("skipped")]

    def validation(self) -> list[tuple[float, float]]:
        """Return ``(number of steps taken before, loss)`` of every evaluation that had targets."""
        return [(line["step"], line["val_loss"]) for line in self.evaluations if line["val_loss"] is not None]

    def effective(self, failures: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the share of effective training time: that of the steps that were kept, over it and what was lost.

        What a failure has cost that ended the run is not known: then None, if no other one was survived.
        """
        lost = [one["lost"] for one in failures if not one["is_end"]]
        return effective_share(float_sum(time for _, time in self.points("step_ms")) / 1e3, lost) if lost else None

    def median(self, name: str) -> float:
        """Return the median of a figure over all steps but the first, which also warms up."""
        return middle(self.points(name))

    def peaks(self) -> list[int]:
        """Return the largest memory of each pipeline rank over all steps, in bytes."""
        of_steps = (line["peak_memory"] for line in self.steps)  # a resumed run may have other ranks
        return [max(sizes) for sizes in zip_longest(*of_steps, fillvalue=0)]

    def memory(self) -> dict[str, list[int]]:
        """Return the largest memory of each kind on each pipeline rank, in bytes; empty if the steps do not have it.

        What is left of the peak are activations and messages, and the process where an older raypar did not count it.
        """
        kinds = dict.fromkeys(kind for line in self.steps for kind in line.get("memory") or {} if kind not in _NO_PART)
        found = {kind: [max(sizes) for sizes in zip_longest(*self._memory(kind), fillvalue=0)] for kind in kinds}
        rest = [max(0, peak - sum(held)) for peak, *held in zip_longest(self.peaks(), *found.values(), fillvalue=0)]
        if "process" in found:
            return {**found, "activations": rest, "process": found.pop("process")}
        return {**found, "activations, process": rest} if found else {}

    def _memory(self, kind: str) -> list[list[int]]:
        return [line["memory"][kind] for line in self.steps if kind in (line.get("memory") or {})]


def headline(past: Past, history: History, *, skips: bool = False) -> list[tuple[str, str]]:
    """Return the figures at the top of the page.

    Args:
        past: The content of the run folder.
        history: The steps and evaluations of the same folder.
        skips: Whether to say how many steps were skipped though none was, beside a run that skipped some.

    Returns:
        ``(name, formatted value)`` of each figure.
    """
    whole = f" of {past.config['steps']:,}" if past.config else ""
    rows = [("steps", f"{len(history.steps):,}{whole}")]
    if skips or history.skipped:
        rows.append(("skipped steps", f"{len(history.skipped):,}"))
    if history.steps:
        rows.append(("train loss", loss_text(history.steps[-1]["loss"])))
    if history.evaluations:
        rows.append(("validation loss", loss_text(history.evaluations[-1]["val_loss"])))
        if history.has_perplexity and history.evaluations[-1]["val_loss"] is not None:
            rows.append(("perplexity", significant(exp(history.evaluations[-1]["val_loss"]))))
        if (bits := history.evaluations[-1].get("bits_per_byte")) is not None:
            rows.append(("bits per byte", significant(bits)))
        rows += metric_rows(history.evaluations[-1].get("metrics") or {})
    if load := history.points("max_load"):
        rows.append(("max/mean load, median", f"{middle(load):.2f}"))
    if history.steps:
        times = [time for _, time in history.points("step_ms")]
        speed = (f"{history.unit}/s, median", f"{middle(history.throughput()):,.0f}")
        rows += [
            (f"{history.unit} seen{_since(history)}", f"{history.seen()[-1][1]:,.0f}"),
            *([speed, ("bubble, median", percentage(history.median("bubble"))), *_within(history)] if times else []),
            ("peak memory of a rank", size(max(history.peaks(), default=0), tenths=True)),
            *([("time in steps", duration(float_sum(times) / 1e3))] if times else []),
            *([("stepped by hand", f"{history.by_hand:,}")] if history.by_hand else []),
        ]
    if past.failures:
        rows.append(("failures", f"{len(past.failures):,}"))
    if (effective := history.effective(past.failures)) is not None:
        rows.append(("effective time", percentage(effective)))
    return rows


def smoothed(points: Points) -> Points:
    """Return the exponential moving average of points from both sides, which does not lag.

    Each spans a twentieth of the points, and at least 5 of them. Values that are not finite stay gaps.
    """
    ahead, back = _averaged(points), _averaged(points[::-1])[::-1]
    return [(step, (one + other) / 2.0) for (step, one), (_, other) in zip(ahead, back, strict=True)]


def _averaged(points: Points) -> Points:
    """Return the exponential moving average of points, without a bias to their first value."""
    keep = 1.0 - 2.0 / (max(5, len(points) // 20) + 1.0)
    mean = weight = 0.0
    found = Points()
    for step, value in points:
        if math.isfinite(value):
            mean, weight = keep * mean + (1.0 - keep) * value, keep * weight + 1.0 - keep
            value = mean / weight
        found.append((step, value))
    return found


def _within(history: History) -> list[tuple[str, str]]:
    """Return the share of time that went into communication within actions; nothing of a run without any."""
    share = history.median("communication")
    return [("communication in actions, median", percentage(share))] if share else []


def _since(history: History) -> str:
    """Say after which step a folder begins, if the steps before it are in another one."""
    first = history.steps[0]["step"]
    return f" since step {first:,}" if first else ""


def exp(loss: float) -> float:
    """Return the perplexity of a cross-entropy in nats; infinite where it is too large for a float."""
    return math.exp(loss) if not loss > 700 else math.inf


def middle(points: Points) -> float:
    """Return the median of the values of all points but the first step's, which also warms up; 0 if there are none."""
    return float(statistics.median(value for _, value in points[1:] or points)) if points else 0.0


def rate(flops: float) -> str:
    """Format FLOP/s: 1.5 GFLOP/s."""
    return f"{amount(flops)}FLOP/s" if flops >= 1000 else f"{amount(flops)} FLOP/s"


def significant(value: float) -> str:
    """Format a number with four digits and a separator for thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ordered(lines: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [lines[step] for step in sorted(lines)]


def flops_per_token(config: dict[str, Any]) -> float | None:
    """Return the FLOPs of one token of a training step: a forward, and twice as many in its backward.

    What is recomputed does not count (Chowdhery et al. 2022, appendix B).

    Args:
        config: The configuration of a run, as plain tables.

    Returns:
        The FLOPs; None for the user's own layers, whose FLOPs are not known.
    """
    table = config.get("model", {})
    kind = _KINDS.get(str(table.get("kind", "gpt")))
    if kind is None or "layers" not in table:
        return None
    try:
        model = reader_of(kind).validate_python(_known(kind, table))
        return 3.0 * float_sum(transformer_costs(model))
    except (ValidationError, ArithmeticError):
        return None


def actors_of(config: dict[str, Any]) -> int | None:
    """Return the number of actors of a run that compute; None if its mesh can't be read."""
    try:
        mesh: Mesh = reader_of(Mesh).validate_python(_known(Mesh, config.get("mesh", {})))
        return mesh.actors
    except (ValidationError, ValueError):
        return None


def _known(kind: type[Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that this version of raypar knows. An older one may have had others."""
    names = {one.name for one in fields(kind)}
    tables = {"moe": MoE, "rope_scaling": RopeScaling}
    inner = {name: _known(of, table[name]) for name, of in tables.items() if isinstance(table.get(name), dict)}
    return {name: None if value == "none" else value for name, value in (table | inner).items() if name in names}
