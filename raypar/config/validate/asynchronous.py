"""Check what an asynchronous schedule can't have: all that takes the gradients of every stage together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from raypar.actors.models.skeleton import Skeleton
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
        if right("delay_feedback") and run.delay_feedback:
            yield f"delay_feedback is True, but in {name} no gradient is late: leave it out"
        return
    if right("flush_every") and run.flush_every not in (None, schedule.stream):
        yield f"flush_every is {run.flush_every}, but {name} has {schedule.stream} steps: set it to {schedule.stream}"
    if schedule.num_stages > schedule.num_ranks:
        yield f"{name} has {schedule.num_stages} stages on {schedule.num_ranks} ranks: give each rank one stage"
    when = f" with flush_every={run.flush_every}" if schedule.validated else ""
    told = f"but in {name}{when} every stage updates by itself"
    if schedule.validated and right("device") and run.device == "cuda":
        tags = "messages of NCCL have no tags on GPUs, and forwards come again"
        yield f"flush_every is {run.flush_every}, but {tags}: leave it out, or set device to 'cpu'"
    if schedule.validated and right("delay_feedback") and run.delay_feedback:
        yield f"delay_feedback is True, but in {name} no gradient is late: leave it out"
    for field, fits, fix in _FITTING:
        if (field not in _VALIDATED or not schedule.validated) and right(field) and not fits(getattr(run, field)):
            yield f"{field} is {getattr(run, field)!r}, {told}: set {field} to {fix}"
    if right("zero", "mesh") and run.mesh.dp * run.mesh.cp > 1 and run.zero != 0:
        level = 1 if run.zero is None else run.zero
        yield f"zero is {level}, {told}: set zero to 0, so that replicas hold all versions whole"
    if right("loss_scale", "precision") and not schedule.validated and run.loss_scale.is_on(run.precision):
        fix = "leave loss_scale.use out" if run.loss_scale.use == "on" else "set precision.compute to 'bf16' or 'fp32'"
        yield f"the loss is scaled, {told}, without a vote of all: {fix}"
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


def unversioned_weight_faults(skeleton: Skeleton, schedule: Schedule, homes: Mapping[int, int]) -> Iterator[str]:
    """Yield the weights of own layers of which an asynchronous schedule can't keep versions.

    Args:
        skeleton: The skeleton of a model of own layers, which can be built.
        schedule: The schedule of training steps.
        homes: The pipeline rank of each layer, by the layer's index.
    """
    if not schedule.stream:
        return
    from raypar.actors.autograd.torch_private import has_gradient_hooks
    from raypar.actors.models.tied_weights import ties_of
    from raypar.actors.models.unregistered import held_apart  # imports torch

    model, told = skeleton.model, f"and in {schedule.name!r} every stage updates by itself"
    for tie in ties_of(model, homes)[0]:
        yield (
            f"model: {tie.copy} is {tie.home}, which is on another actor (pp={tie.copy_rank} and pp={tie.home_rank}), "
            f"{told}: give both layers to one stage with split, or each a parameter of its own"
        )
    for prefix, module in zip(model.names, model.skeleton, strict=True):
        for name, parameter in module.named_parameters():
            if has_gradient_hooks(parameter):
                fault = f"model: {prefix}.{name} has gradient hooks, which its versions have not"
                yield f"{fault}: take a synchronous schedule, as 1f1b, or leave the hooks out"
    for layer, owner, name in held_apart(model.skeleton):
        yield (
            f"model: {model.names[layer]} keeps {model.names[owner]}.{name} in a list, a closure or an attribute past "
            f"nn.Module too, and {schedule.name!r} replaces a parameter by its versions: let the forward read it from "
            "the module that registers it"
        )


_VALIDATED = ("clip", "nonfinite", "ema")  # what all stages decide together, which validated updates allow
_FITTING: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("clip", lambda value: value is None, "None, as there is no global norm"),
    ("nonfinite", lambda value: value == "stop", "'stop'"),
    ("ema", lambda value: value is None, "None"),
    ("data_parallel", lambda value: value == "all_reduce", "'all_reduce'"),
    ("offload", lambda value: value == "none", "'none'"),
    ("backward", lambda value: value != "split", "'whole'"),
    ("order", lambda value: value == "row", "'row'"),
    ("recheck_every", lambda value: not value, "0"),
    ("overflow_every", lambda value: not value, "0"),
)
