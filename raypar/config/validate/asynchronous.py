"""Check what an asynchronous schedule can't have: all that takes the gradients of every stage together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.schedules.schedule import Schedule


def asynchronous_faults(run: Run, schedule: Schedule, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what does not combine with a run's schedule because that is asynchronous, or because it is not.

    Args:
        run: The run.
        schedule: Its schedule of training steps.
        right: Returns whether some fields have their declared types and ranges.
    """
    name = f"schedule {schedule.name!r}"
    if not schedule.stream:
        if right("flush_every") and run.flush_every is not None:
            yield f"flush_every is {run.flush_every}, but {name} flushes the pipeline in every step: leave it out"
        if right("delay_feedback") and run.delay_feedback:
            yield f"delay_feedback is True, but in {name} no gradient is late: leave it out"
        return
    if right("flush_every") and run.flush_every not in (None, schedule.stream):
        yield f"flush_every is {run.flush_every}, but {name} has {schedule.stream} steps: set it to {schedule.stream}"
    told = f"but in {name} every stage updates by itself"
    for field, fits, fix in _FITTING:
        if right(field) and not fits(getattr(run, field)):
            yield f"{field} is {getattr(run, field)!r}, {told}: set {field} to {fix}"
    if right("zero", "mesh") and run.mesh.dp > 1 and run.zero != 0:
        level = 1 if run.zero is None else run.zero
        yield f"zero is {level}, {told}: set zero to 0, so that replicas hold all versions whole"
    if right("loss_scale", "precision") and run.loss_scale.is_on(run.precision):
        yield f"the loss is scaled, {told}, without a vote of all: compute in bf16 or fp32"
    if right("model") and isinstance(run.model, Transformer):
        if run.model.moe is not None:
            yield f"model.moe is given, {told}, and loads of experts are counted in a step: set model.moe to None"
        if run.model.tied and right("mesh") and run.mesh.pp > 1:
            yield f"model.tied ties the first stage's weights to the last one's, {told}: set model.tied to False"
    if (
        right("snapshot_every", "max_failures")
        and run.max_failures
        and run.snapshot_every % schedule.stream > (run.snapshot_every == 1)
    ):
        yield (
            f"snapshot_every is {run.snapshot_every}, but {name} flushes the pipeline after {schedule.stream} steps: "
            f"set it to 1 or a multiple of {schedule.stream}"
        )


_FITTING: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("clip", lambda value: value is None, "None, as there is no global norm"),
    ("nonfinite", lambda value: value == "stop", "'stop'"),
    ("data_parallel", lambda value: value == "all_reduce", "'all_reduce'"),
    ("offload", lambda value: value == "none", "'none'"),
    ("backward", lambda value: value != "split", "'whole'"),
    ("executor", lambda value: value == "compiled", "'compiled'"),
    ("check_every", lambda value: not value, "0"),
    ("recheck_every", lambda value: not value, "0"),
    ("overflow_every", lambda value: not value, "0"),
)
