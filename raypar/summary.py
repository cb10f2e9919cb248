"""What a finished run, or one that could start, comes to: rows of a name and its figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from raypar.actors.plan import performed
from raypar.actors.recompute import word_of
from raypar.actors.specs import Transformer
from raypar.actors.split import core_cost, split_layers, transformer_costs
from raypar.config import Run, world_of
from raypar.report import Evaluation, Report
from raypar.schedules.action import Op
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulate import Costs, simulate
from raypar.schedules.timeline import Timeline

Rows = list[tuple[str, str]]


class _Work(NamedTuple):
    """What a microbatch costs a stage: its forward, what its backward runs again, what it can leave for W."""

    forward: float
    again: float
    later: float


def predicted(run: Run, schedule: Schedule) -> Timeline:
    """The step on paper: a stage's forward lasts as its layers' FLOPs say, a backward twice as long.

    The user's own Layers count as stages of equal length.
    """
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, (forward, again, later) in enumerate(_works(run, schedule.num_stages)):
        backward = {Op.B: 2 * forward + again, Op.I: 2 * forward + again - later, Op.W: later}
        of_stage |= {(stage, op): cost for op, cost in ({Op.F: forward} | backward).items()}
    return simulate(performed(run.model, schedule), Costs(of_stage=of_stage))


def _works(run: Run, num_stages: int) -> list[_Work]:
    """A W makes the gradients of linear layers that are not divided, in layers that are not run again by themselves."""
    halves = run.mesh.tensor_ranks == 1
    if not isinstance(run.model, Transformer):
        return [_Work(1.0, 1.0 if run.recompute == "full" else 0.0, 1.0 if halves else 0.0)] * num_stages
    costs, body, core = transformer_costs(run.model), range(run.model.layers), core_cost(run.model)
    scores = run.model.attention == "materialised" or run.model.dropout > 0  # else the kernel does it in any case
    words = [word_of(run.recompute, body, layer) for layer in body]
    again = [
        {"none": 0.0, "selective": core if scores else 0.0, "full": cost}[word]
        for word, cost in zip(words, costs, strict=True)
    ]
    alone = [word == "full" and run.recompute != "full" for word in words]
    later = [cost - core if halves and not own else 0.0 for cost, own in zip(costs, alone, strict=True)]
    return [
        _Work(*(sum(each[layer] for layer in layers) for each in (costs, again, later)))
        for layers in split_layers(run.split, costs, num_stages)
    ]


def plan_rows(run: Run, schedule: Schedule) -> Rows:
    """What a run would do."""
    timeline = predicted(run, schedule)
    samples = run.mesh.dp * run.microbatches * run.micro_batch_size
    replicas = f"{run.mesh.dp} replicas x " if run.mesh.dp > 1 else ""
    seq = run.model.seq
    tokens = "" if seq is None else f" x {seq:,} tokens = {samples * seq:,} tokens"
    batch = f"{replicas}{run.microbatches} microbatches x {run.micro_batch_size} samples{tokens}"
    rows = [("actors", str(world_of(run).size)), ("steps", f"{run.steps:,} of {batch}")]
    if world_of(run).servers:
        rows.append(("parameter servers", f"{run.servers} for each of {run.mesh.pp} pipeline ranks"))
    if isinstance(run.model, Transformer):
        layers = split_layers(run.split, transformer_costs(run.model), schedule.num_stages)
        rows.append(("layers of each stage", _each(map(len, layers))))
    return [
        *rows,
        ("bubble", f"{timeline.bubble:.1%} predicted from FLOPs"),
        ("activations in flight", f"{_each(timeline.in_flight)} predicted"),
    ]


def closing_rows(
    run: Run,
    schedule: Schedule,
    reports: Sequence[Report],
    evaluation: Evaluation,
    launch_seconds: float,
    wall_seconds: float,
    files: Mapping[str, Path | None],
) -> Rows:
    """What a finished run has come to; the first step, which also warms up, does not count for speed.

    ``files`` were written, by what they are.
    """
    timeline, last = predicted(run, schedule), reports[-1]
    steady = reports[1:] or reports
    held = [max(counts) for counts in zip(*(report.in_flight for report in reports), strict=True)]
    memory = [max(sizes) for sizes in zip(*(report.peak_memory for report in reports), strict=True)]
    speed = statistics.median(report.tokens_per_s for report in steady)
    bubble = statistics.median(report.bubble for report in steady)
    hidden = [report.overlap for report in steady if report.overlap is not None]
    named = (f"pp={rank} {size / 2**20:,.0f} MiB" for rank, size in enumerate(memory))
    return [
        ("steps", f"{len(reports):,}"),
        ("train loss", f"{last.loss:.4f}"),
        ("validation loss", f"{evaluation.loss:.4f}"),
        ("perplexity", f"{evaluation.perplexity:.2f}"),
        ("tokens/s", f"{speed:,.0f} (median)"),
        ("bubble", f"{bubble:.1%} measured, {timeline.bubble:.1%} predicted from FLOPs"),
        *([("reduction hidden", f"{statistics.median(hidden):.0%} behind compute (median)")] if hidden else []),
        ("activations in flight", f"{_each(held)} measured, {_each(timeline.in_flight)} predicted"),
        ("peak memory", ", ".join(named)),
        ("wall time", f"{wall_seconds:.1f} s, of which launch {launch_seconds:.1f} s"),
        *((name, str(path)) for name, path in files.items() if path is not None),
    ]


def _each(counts: Iterable[int]) -> str:
    return " ".join(map(str, counts))
