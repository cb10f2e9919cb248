"""Rules of schedules: asynchronous ones, the dynamic order of actions, and slices of microbatches.

An asynchronous schedule excludes all that needs the gradients of every stage at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceChoice
from raypar.config.conflicts.named_settings import (
    CLIP,
    CONTEXT,
    CUDA,
    DYNAMIC,
    EMA,
    EXPERTS,
    HALVES,
    NONFINITE,
    OFFLOAD,
    OFFLOADED_WEIGHTS,
    OVERFLOW,
    OWN_LAYERS,
    RECHECK,
    SERVERS,
    SHARDED_WEIGHTS,
    SLICES,
    TIED,
    UNEVEN,
)
from raypar.config.conflicts.parallel import divisors_near
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.schedules.schedule import Schedule

_ROWS = "but {other}, and weights come for use in the order of the rows"
_COMPILED = RunSetting("executor", "compiled", undo="set executor to 'tasks'")
_BY_THEMSELVES = "but {other}, and its actors follow their rows by themselves"
_FLUSH = RunSetting("flush_every", lambda steps: steps is not None)
_DROPOUT = RunSetting("model.dropout", undo="set model.dropout to 0")
_PACKED = RunSetting("data.packing", undo="set data.packing to False")
_VARYING = RunSetting("data.varying", undo="set data.varying to False")
_NOT_EAGER = RunSetting("compile", undo="set compile to False")


def _stream_faults(examined: Examined) -> Iterator[str]:
    """Yield what does not fit the sizes of an asynchronous schedule, or the steps between two flushes."""
    run, schedule = examined.run, examined.train
    if not schedule.stream:
        return
    name = f"schedule {schedule.name!r}"
    if run.flush_every not in (None, schedule.stream):
        yield f"flush_every is {run.flush_every}, but {name} has {schedule.stream} steps: set it to {schedule.stream}"
    if schedule.num_stages > schedule.num_ranks:
        yield f"{name} has {schedule.num_stages} stages on {schedule.num_ranks} ranks: give each rank one stage"
    if run.max_failures and run.snapshot_every % schedule.stream > (run.snapshot_every == 1):
        why = f"{name} flushes the pipeline after {schedule.stream} steps"
        fix = f"set it to 1 or a multiple of {schedule.stream}"
        yield f"snapshot_every is {run.snapshot_every}, but {why}: {fix}"


def unversioned_weight_faults(skeleton: Skeleton, schedule: Schedule, ranks: Mapping[int, int]) -> Iterator[str]:
    """Yield the weights of the user's layers whose versions an asynchronous schedule can't keep.

    Args:
        skeleton: The skeleton of a model of the user's layers, which can be built.
        schedule: The schedule of training steps.
        ranks: The pipeline rank of each layer, by the layer's index.
    """
    if not schedule.stream:
        return
    from raypar.actors.autograd.torch_private import has_gradient_hooks
    from raypar.actors.models.init.unregistered import held_apart  # imports torch
    from raypar.actors.models.tied_weights import ties_of

    model, alone = skeleton.model, f"and in {schedule.name!r} every stage updates by itself"
    for tie in ties_of(model, ranks)[0]:
        yield (
            f"model: {tie.copy} is {tie.original}, which is on another actor (pp={tie.copy_rank} and "
            f"pp={tie.original_rank}), {alone}: give both layers to one stage with split, or each its own parameter"
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


_ALONE = "in schedule {train.name!r}%s every stage updates by itself"
_UNVOTED = RunSetting("train", lambda train: train.stream and not train.validated, _ALONE % "")
_VOTED = RunSetting("train", lambda train: train.validated, _ALONE % " with flush_every={run.flush_every}")
_ON_TIME = RunSetting(
    "train", lambda train: not train.stream or train.validated, "in schedule {train.name!r} no gradient is late"
)
_FLUSHED_LATE = RunSetting("train", lambda train: train.validated, "flush_every is {run.flush_every}", "leave it out")
_TIED_ENDS = RunSetting("run", lambda run: run.mesh.pp > 1 and getattr(run.model, "tied", False), "model.tied is True")
_WHOLE_VERSIONS = "set zero to 0, so that replicas hold all versions whole"
_SHARED = tuple(
    RunSetting(
        "run", lambda run, level=level: run.mesh.dp * run.mesh.cp > 1 and run.zero == level, said, _WHOLE_VERSIONS
    )
    for level, said in ((None, "zero is 1 (its usual level)"), *((level, f"zero is {level}") for level in (1, 2, 3)))
)
_TOGETHER = (SERVERS, OFFLOAD, HALVES, DYNAMIC, RECHECK, OVERFLOW, *_SHARED)
_SCALED = RunSetting(
    "run",
    lambda run: run.loss_scale.is_on(run.precision),
    "the loss is scaled",
    "set precision.compute to 'bf16' or 'fp32', or loss_scale.use to 'off'",
)
_LOADS = "but {other}, and loads of experts are counted in a step"
_NO_TAGS = "but messages of NCCL have no tags on GPUs, and forwards come again"
STREAM_RULES: tuple[RunRule, ...] = (
    _stream_faults,
    Conflict(RunSetting("delay_feedback"), _ON_TIME, fix="leave it out"),
    Conflict(_FLUSHED_LATE, CUDA, _NO_TAGS),
    *(Conflict(one, _UNVOTED, fix=one.without) for one in (CLIP, NONFINITE, EMA)),
    Conflict(_SCALED, _UNVOTED, "but {other}, without a vote of all", _SCALED.undo),
    *(Conflict(one, when, fix=one.without) for one in _TOGETHER for when in (_UNVOTED, _VOTED)),
    *(Conflict(EXPERTS, when, _LOADS, EXPERTS.undo) for when in (_UNVOTED, _VOTED)),
    *(Conflict(_TIED_ENDS, when, fix=TIED.undo) for when in (_UNVOTED, _VOTED)),
)


def order_on(run: Run, device: DeviceChoice) -> Iterator[str]:
    """Yield a fault if messages on a device have no tags, and so must keep the order of the rows.

    Args:
        run: The run.
        device: The device, as far as it is known.
    """
    if run.order == "dynamic" and device == "cuda":
        yield f"order is 'dynamic', but messages of NCCL have no tags on GPUs: {DYNAMIC.without}, or device to 'cpu'"


ORDER_RULES: tuple[RunRule, ...] = (
    Conflict(DYNAMIC, _COMPILED, _BY_THEMSELVES, "set executor to 'tasks', or order to 'row'"),
    Conflict(DYNAMIC, SHARDED_WEIGHTS, _ROWS, DYNAMIC.undo),
    Conflict(DYNAMIC, OFFLOADED_WEIGHTS, _ROWS, DYNAMIC.undo),
    lambda examined: order_on(examined.run, examined.run.device),
)


def _length_faults(examined: Examined) -> Iterator[str]:
    """Yield why sequences can't be cut into slices of equal length, which tensor ranks divide."""
    run = examined.run
    if OWN_LAYERS.is_in(examined) or not SLICES.is_in(examined):
        return
    named, seq = f"token_slices is {run.token_slices}", run.model.seq
    assert seq is not None
    if seq % run.token_slices:
        yield f"{named}, but model.seq is {seq}: set token_slices to {divisors_near(run.token_slices, seq)}"
    elif run.sequence_parallel and seq // run.token_slices % run.mesh.tensor_ranks:
        each = seq // run.token_slices
        yield f"{named}, so that a slice has {each} tokens, which mesh.tp does not divide: give fewer slices"


SLICE_RULES: tuple[RunRule, ...] = (
    Conflict(SLICES, OWN_LAYERS, "but own layers compute whole sequences"),
    Conflict(SLICES, EXPERTS, "but experts are chosen among the tokens of whole sequences"),
    Conflict(SLICES, _DROPOUT, "but {other}, and masks are drawn for whole sequences"),
    _length_faults,
    Conflict(SLICES, CONTEXT, "but with mesh.cp actors hold parts of a sequence"),
    *(Conflict(SLICES, axis, "but with {other} replicas that take turns would take slices in turn") for axis in UNEVEN),
    Conflict(SLICES, _PACKED, "but with data.packing a slice does not know its documents"),
    Conflict(SLICES, _VARYING, "but with data.varying lengths change"),
    Conflict(SLICES, _NOT_EAGER, "but with compile layers are made for whole sequences"),
    Conflict(SLICES, _FLUSH, "but with flush_every steps are one stream of whole microbatches"),
)
