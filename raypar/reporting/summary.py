"""The summary of a planned or finished run: rows of a name and a figure."""

from __future__ import annotations

import logging
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from raypar.actors.data.examples.example_batches import open_sequences
from raypar.actors.data.text.stretches import TokenWindows
from raypar.actors.data.text.token_batches import open_corpus
from raypar.actors.in_brief import in_brief
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches, Examples, Text
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.resources import Resources
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import LEARNED
from raypar.config.run import check_run, unrecorded
from raypar.errors import ConfigError
from raypar.log_details import DETAIL
from raypar.planner.calibrated.calibration_file import found_calibration
from raypar.planner.hardware.stop_wait import SAVE_SECONDS, STOP_WAIT, is_ray_job, outlasts, stop_wait
from raypar.planner.prediction import (
    FROM_CALIBRATION,
    IN_SLOTS,
    Prediction,
    before_run,
    calibration_misfits,
    cautions,
    predictor_of,
)
from raypar.planner.resource_needs import TOO_MUCH, Rows, actors_text, memory_needs
from raypar.planner.rules_of_thumb import Remedy, more_microbatches, pipeline_advice
from raypar.planner.sizes.sized_run import SizedRun
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.experts import figures
from raypar.reporting.forecasting import forecast_and_measured, forecast_of
from raypar.reporting.loss_text import loss_text, metric_rows
from raypar.reporting.report import Report, unit_of, utilisation_text
from raypar.reporting.run_folder.failure_line import effective_share
from raypar.reporting.screen import PathFigure
from raypar.schedules.action import Op
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.drawing.text import WIDTH, grid
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import milliseconds
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import UNIT, simulate
from raypar.schedules.versions import staleness

log = logging.getLogger(__name__)
_MOST_SHOWN = 200  # largest schedule, in actions, that a job's repr shows


def plan_rows(
    run: Run,
    schedule: Schedule,
    skeleton: Skeleton | None = None,
    origins: Mapping[str, str] | None = None,
    step: int = 0,
) -> Rows:
    """Summarize what a run would do, and what it needs.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights, from which the user's own Layers are counted; None builds it for
            them.
        origins: By axis of the mesh, what set it if that was not the user: "recipe gpt-small".
        step: The steps that the checkpoint has taken from which it goes on; 0 for a new run.

    Returns:
        Rows of a name and a figure.
    """
    skeleton = skeleton or Skeleton(run.model, run.seed)
    sized = SizedRun.of(run, schedule, skeleton)
    predict = predictor_of(run)
    world, prediction = sized.world, predict(sized)
    left = f"; it goes on after step {step:,}, with {run.steps - step:,} left" if step else ""
    rows = [("actors", actors_text(run, origins)), ("steps", f"{run.steps:,} of {_batch_text(run)}{left}")]
    rows += _resource_rows(run)
    if isinstance(run.data, Text) and run.model.seq is not None:
        rows.append(("data", _passes_text(run, run.data, run.model.seq)))
    if isinstance(run.data, Examples) and run.model.seq is not None:
        rows += [("data", text) for text in _examples_texts(run, run.data, run.model.seq)]
    if world.servers:
        rows.append(("parameter servers", f"{run.servers} for each of {run.mesh.pp} pipeline ranks"))
    if isinstance(run.model, Transformer):
        layers = split_layers(run.split, transformer_costs(run.model), schedule.num_stages)
    else:
        layers = skeleton.model.stages(run.split, schedule.num_stages)
    rows.append(("layers of each stage", _each(map(len, layers))))
    if schedule.stream:
        oldest = max(most for _, most in staleness(schedule).delays)
        late = f"weights of a gradient are up to {oldest} step{'s' * (oldest != 1)} old"
        late = late if oldest else "no gradient is late, and updates are validated later"
        rows.append(("flushes", f"after every {schedule.stream} steps, evaluation and checkpoint; {late}"))
    rows += memory_needs(sized, skeleton, prediction, step)
    halves = [sum(action.op is Op.I for action in row) for row in schedule.rows]
    if any(halves):
        rows.append(("backwards in halves", f"{_each(halves)}: {_halves_text(run)}"))
    if world.reduces and (exchanged := _exchange_text(prediction)):
        rows.append(("between replicas", exchanged))
    if prediction.source != IN_SLOTS:
        rows.append(("time", _time_text(run.steps - step, prediction)))
        rows += [("calibration", text) for text in _unfit(run, prediction)]
    return [
        *rows,
        ("bubble", prediction.bubble),
        ("activations in flight", f"{_each(prediction.timeline.in_flight)} predicted"),
        *(("advice", text) for text in _advice(sized, skeleton, prediction, predict)),
    ]


def _unfit(run: Run, prediction: Prediction) -> Iterator[str]:
    """Yield why a calibration that is there was not used, or may be wrong; of one that can't be read, the log says."""
    try:
        calibration = found_calibration()
    except ConfigError:
        return
    if calibration is not None:
        is_used = prediction.source == FROM_CALIBRATION
        if why := cautions(calibration) if is_used else "; ".join(calibration_misfits(run, calibration)):
            yield why


def _advice(
    sized: SizedRun, skeleton: Skeleton, prediction: Prediction, predict: Callable[[SizedRun], Prediction]
) -> Iterator[str]:
    """Yield the rules of thumb that a run's pipeline breaks, and what saves it; without flushes no step has a bubble.

    Args:
        sized: The run.
        skeleton: Its model without weights.
        prediction: A step.
        predict: Predicts a step of the run with other fields.
    """
    run = sized.run

    def changed(other: Run) -> float | None:
        """Return the bubble of another run; None if it is not allowed."""
        try:
            programs = check_run(other, skeleton=skeleton)
        except ConfigError:
            return None
        return predict(SizedRun.of(other, programs["train"], skeleton)).timeline.bubble

    if not sized.schedule.stream:
        plain, more = unrecorded(run), more_microbatches(run.mesh.pp, run.microbatches)
        larger, simple = replace(plain, microbatches=more), replace(plain, schedule="1f1b", chunks=None)
        remedies = [
            Remedy(f"with {more} microbatches", partial(changed, larger)),
            Remedy("with schedule 1f1b, which may hold more activations,", partial(changed, simple)),
        ]
        yield from pipeline_advice(run.mesh.pp, run.microbatches, prediction.timeline.bubble, remedies)
    yield from _stop_advice(run, prediction.step)


def _stop_advice(run: Run, step: float) -> Iterator[str]:
    """Yield what saves a run that `ray job stop` ends, where this process is a job whose steps take longer than that.

    Args:
        run: The run.
        step: Predicted seconds of a step.
    """
    if is_ray_job() and run.folder is not None and outlasts(step):
        fits = 60 * math.ceil((step + SAVE_SECONDS) / 60)
        setting = f'{{"env_vars": {{"{STOP_WAIT}": "{fits}"}}}}'
        yield (
            f"ray job stop kills after {stop_wait():g} s, and a step of {step:.1f} s and its checkpoint may take "
            f"longer: submit with --runtime-env-json '{setting}', so that a run that is stopped is saved after its step"
        )


def _time_text(steps: int, prediction: Prediction) -> str:
    """Say how long the computing takes at least; what each action and message costs besides is not known before.

    Args:
        steps: How many steps the run takes.
        prediction: A step.
    """
    step, source = prediction.step, f"predicted {prediction.from_what}"
    whole = timedelta(seconds=round(steps * step))
    if prediction.source == FROM_CALIBRATION:
        return f"{whole}: {steps:,} step{'s' * (steps != 1)} of {milliseconds(step)}, {source}"
    return f"{whole} and more: {steps:,} step{'s' * (steps != 1)} of {milliseconds(step)} and more, {source}"


def _halves_text(run: Run) -> str:
    """Say what a split backward leaves for later."""
    if run.mesh.grid is not None:
        return f"but nothing is left for W, as layers on the grid {run.mesh.tp} make their gradients at once"
    if isinstance(run.model, Layers) and not run.model.halves:
        return "but nothing is left for W, as your own Layers are split only with Layers(halves=True)"
    return "their weights' gradients (W) fill waits"


def _exchange_text(prediction: Prediction) -> str:
    """Say how long the gathers and reductions of a step are predicted to take; "" if that is unknown."""
    kinds = {"gathers": Op.UNSHARD, "reductions": Op.REDUCE_GRAD, "after the update": Op.STEP}
    each = {name: prediction.most(op) for name, op in kinds.items()}
    if not any(each.values()):
        return ""
    durations = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in each.items() if seconds)
    whole = prediction.simulated
    longer = f"{whole / prediction.alone - 1:.1%} longer than without them"
    return f"{durations}; a step of {milliseconds(whole)}, {longer}, predicted {prediction.source}"


def _resource_rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what each actor takes of its node, and how actors of one GPU exchange tensors, unless both are usual."""
    if run.resources != Resources():
        threads = f"; it computes with {run.num_threads} thread{'s' * (run.num_threads != 1)}"
        yield "each actor takes", f"{run.resources}{threads}"
    if run.shared_gpu == "nccl":
        yield (
            "actors of one GPU",
            "exchange tensors over NCCL, whose kernels take turns: for trying, and slower than predicted",
        )


def _batch_text(run: Run) -> str:
    """Describe the data of a step. The user's own batches have as many samples as their function makes."""
    replicas = f"{run.mesh.dp} replicas x " if run.mesh.dp > 1 else ""
    microbatches = f"{replicas}{run.microbatches} microbatches"
    if isinstance(run.data, Batches):
        return microbatches
    samples, seq = run.mesh.dp * run.microbatches * run.micro_batch_size, run.model.seq
    tokens = "" if seq is None else f" x {seq:,} tokens = {samples * seq:,} tokens"
    return f"{microbatches} x {run.micro_batch_size} samples{tokens}"


def _passes_text(run: Run, text: Text, seq: int) -> str:
    """Say how many tokens a text has, and how often the run passes over them."""
    corpus = open_corpus(text, seq)
    train, val = len(corpus.train), len(corpus.val)
    passes = run.steps * run.mesh.dp * run.microbatches * run.micro_batch_size / len(TokenWindows(corpus.train, seq))
    blocks = f"{len(corpus.val.firsts)} blocks drawn over all of it" if len(corpus.val.firsts) > 1 else "a part of it"
    where = "val_path" if text.val_path is not None else blocks if text.val_from == "blocks" else "its end"
    return f"{train:,} tokens to train with, {val:,} to validate ({where}); {_passes(passes)}"


def _passes(count: float) -> str:
    """Say how often a run passes over its data."""
    often = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    return f"the run makes {often} pass{'es' * (often != '1')} over them"


def _examples_texts(run: Run, examples: Examples, seq: int) -> Iterator[str]:
    """Say of each set of examples how many sequences they are, and how often the run passes over these."""
    train, val = open_sequences(examples, seq)
    samples, shares = (
        run.steps * run.mesh.dp * run.microbatches * run.micro_batch_size,
        train.shares / sum(train.shares),
    )
    for (path, part), share in zip(train.parts.items(), shares.tolist(), strict=True):
        pieces, full = part.pieces, int(part.pieces.lengths.sum()) / (len(part) * seq)
        cut = f" ({pieces.cut:,} of them cut)" if pieces.cut else ""
        dropped = f"; {pieces.dropped:,} examples are left out, as nothing is learned in them" if pieces.dropped else ""
        held = f", and {len(val.parts.get(path, val)):,} sequences to validate"
        yield (
            f"{'' if share == 1 else f'{share:.3g} of the sequences from {path}: '}{len(pieces.firsts):,} pieces of "
            f"examples{cut} in {len(part):,} sequences that are {full:.0%} full{held}{dropped}; "
            f"{_passes(samples * share / len(part))}"
        )


def log_plan(run: Run, schedule: Schedule, skeleton: Skeleton, step: int = 0) -> None:
    """Write what a run would do and needs to the log, as ``plan_rows`` says it, before its first step.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights.
        step: The steps that the checkpoint has taken from which it goes on; 0 for a new run.
    """
    rows = plan_rows(run, schedule, skeleton, step=step)
    brief = brief_head(rows)
    for name, figure in rows:
        if TOO_MUCH in figure:
            log.warning("%s: %s", name, figure)
        else:
            log.info("%s: %s", name, figure, extra={**DETAIL, "brief": brief.get(name, "")})


def brief_head(rows: Rows) -> dict[str, str]:
    """Return the few lines with which a run begins on a terminal, by the row of ``plan_rows`` of which each is made."""
    said = dict(rows)
    batch, semicolon, since = said["steps"].partition("; ")
    steps, _, each = batch.partition(" of ")
    lasts = f", {said['time'].partition(': ')[0]} (predicted)" if "time" in said else ""
    bubble = said["bubble"].partition(" predicted")[0]
    memory = said["memory in all"].partition(", ")[0].removesuffix(" here")
    return {
        "actors": f"actors: {said['actors']}; {said['parameters'].partition('; ')[0]} parameters",
        "steps": f"steps: {steps} of {each.rpartition(' = ')[2]}{lasts}{semicolon}{since}",
        "memory in all": f"memory: {memory}; bubble {bubble}",
    }


def planned_grid(schedule: Schedule, bubble: str, *, color: bool = False) -> str:
    """Draw the schedule of a run, each action one slot, above the bubble that is predicted for the run.

    Args:
        schedule: The lowered schedule of a training step.
        bubble: The bubble in words, as ``plan_rows`` has it.
        color: Whether to colour the cells, for a terminal.
    """
    width = shutil.get_terminal_size().columns if color else WIDTH
    drawn = grid({"": simulate(schedule, UNIT)}, color=color, width=width, whole="raypar draw -o FILE.svg")
    return "\n".join([*drawn, f"{schedule.name}: bubble {bubble}; the grid shows the order, a slot for each action"])


def closing_rows(
    run: Run,
    schedule: Schedule,
    reports: Sequence[Report],
    evaluation: Evaluation,
    launch_seconds: float,
    wall_seconds: float,
    files: Mapping[str, Path | None],
    overlay: Overlay | None = None,
) -> Rows:
    """Summarize a finished run. Speed and bubble leave out the first step, which also warms up.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        reports: The reports of all steps, at least one.
        evaluation: The last evaluation.
        launch_seconds: Time that the launch took, in seconds.
        wall_seconds: Time that everything took, in seconds.
        files: The files that were written, by what they are; None for one that was not.
        overlay: The last step with its prediction from measured costs; None without.

    Returns:
        Rows of a name and a figure.
    """
    prediction = before_run(SizedRun.of(run, schedule))
    forecast = forecast_of(run, schedule, None, prediction=prediction)
    last = reports[-1]
    steady = reports[1:] or reports
    held = [max(counts) for counts in zip(*(report.in_flight for report in reports), strict=True)]
    memory = [max(sizes) for sizes in zip(*(report.peak_memory for report in reports), strict=True)]
    unit = unit_of(run)
    speed = statistics.median(report.per_second(unit) for report in steady)
    bubble = statistics.median(report.bubble for report in steady)
    hidden = [report.overlap for report in steady if report.overlap is not None]
    measured = "" if overlay is None else f"; {overlay.predicted.bubble:.1%} predicted {overlay.source}"
    skipped = sum(report.skipped for report in reports)
    since = f" in this session, after step {reports[0].step:,}" if reports[0].step else ""
    step_time, *peaks = forecast_and_measured(forecast, [report.step_ms for report in steady], memory)
    return [
        ("steps", f"{len(reports):,}{since}" + (f", of which {skipped:,} skipped" if skipped else "")),
        ("train loss", loss_text(last.loss)),
        *_expert_rows(reports),
        ("validation loss", loss_text(evaluation.loss)),
        *([] if evaluation.perplexity is None else [("perplexity", f"{evaluation.perplexity:.2f}")]),
        *([] if evaluation.bits_per_byte is None else [("bits per byte", f"{evaluation.bits_per_byte:.3f}")]),
        *metric_rows(evaluation.metrics),
        (f"{unit}/s", f"{speed:,.0f} (median)" + _of_all(run, unit, steady)),
        *([] if prediction.source == IN_SLOTS else [("step time", f"{step_time}, {prediction.from_what}")]),
        *([("calibration", forecast.better)] if forecast.better else []),
        *_utilisation_row(steady),
        ("bubble", f"{bubble:.1%} measured (median), {prediction.bubble}{measured}"),
        ("why they differ", prediction.leaves_out),
        *([("reduction hidden", f"{statistics.median(hidden):.0%} under compute (median)")] if hidden else []),
        ("activations in flight", f"{_each(held)} measured, {_each(prediction.timeline.in_flight)} predicted"),
        ("peak memory", "; ".join(f"{peak.name.removeprefix('peak memory, ')} {peak}" for peak in peaks)),
        ("wall time", f"{wall_seconds:.1f} s from the launch on, of which launch {launch_seconds:.1f} s"),
        *((name, PathFigure(path)) for name, path in files.items() if path is not None),
    ]


def _utilisation_row(steady: Sequence[Report]) -> Rows:
    """Say how much of the peak of its GPUs a run has reached; nothing where that is not known."""
    used = [(report.mfu, report.hfu) for report in steady if report.mfu is not None and report.hfu is not None]
    reached = utilisation_text(*map(statistics.median, zip(*used, strict=True))) if used else ""
    return [("utilisation", f"{reached} (median)")] if reached else []


def _of_all(run: Run, unit: str, steady: Sequence[Report]) -> str:
    """Say how many tokens go through the model in a second, where only some of them are learned."""
    if unit != LEARNED or run.model.seq is None:
        return ""
    every = statistics.median(report.per_second("samples") for report in steady) * run.model.seq
    return f", of {every:,.0f} tokens/s with prompts and padding"


def failures_summary(reports: Sequence[Report], lost: Sequence[float]) -> str:
    """Say how many failures a run has survived, and what they have cost.

    Args:
        reports: The reports of the steps that were kept.
        lost: Seconds that each failure has cost.
    """
    share = effective_share(float_sum(report.step_ms for report in reports) / 1e3, lost)
    return f"{len(lost):,}, which cost {float_sum(lost):.1f} s: effective training time {share:.1%} (ETTR)"


def _expert_rows(reports: Sequence[Report]) -> Rows:
    """Summarize auxiliary losses and the load of experts; nothing of a model without them."""
    loads = [report.loads for report in reports if report.loads is not None]
    rows = figures(reports[-1].aux, reports[-1].loads)
    if loads:
        most = statistics.median(each.max_load for each in loads)
        rows = [(name, f"{figure}, {most:.2f} (median)" if name == "expert load" else figure) for name, figure in rows]
    return rows


def job_summary(run: Run, device: str, taken: int, last: Report | None, failure: str | None) -> str:
    """Return a summary of a job in three lines.

    Args:
        run: Its run.
        device: The device of its actors.
        taken: Number of steps taken.
        last: Report of the latest step; None before the first.
        failure: Why the job is over; None while it is alive.
    """
    over = f", over: {failure}" if failure is not None else ""
    loss = f", loss {loss_text(last.loss)} in step {last.step + 1}" if last is not None else ""
    head = f"<Job, actors: {actors_text(run)}, {device}{over}>\n{in_brief(run.model)}"
    return f"{head}\n{steps_text(taken, run.steps)}{loss}"


def schedule_text(schedule: Schedule) -> str:
    """Return a schedule as a grid, or its title if the grid were too large."""
    return repr(schedule) if schedule.num_actions <= _MOST_SHOWN else schedule.title


def steps_text(taken: int, steps: int) -> str:
    """Say how many of a run's steps are taken: "3 of 4 steps taken"; or that more are than it was made for."""
    if taken <= steps:
        return f"{taken} of {steps} steps taken"
    return f"{taken} steps taken, {taken - steps} more than the run's {steps}"


def _each(counts: Iterable[int]) -> str:
    return " ".join(map(str, counts))
