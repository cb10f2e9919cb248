"""Check a run as a whole and create its schedules, before any actor starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_faults
from raypar.actors.models.skeleton import Skeleton, with_its_names
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.optim import OptimizerSettings
from raypar.actors.specs.recompute import recompute_faults
from raypar.actors.specs.resources import Resources
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.actors.specs.worlds import world_of
from raypar.config.fields import FieldFault, field_faults, right_fields
from raypar.config.hints import hint
from raypar.config.mended import mended
from raypar.config.schedule import (
    Programs,
    ZeroActions,
    programs_of,
    schedule_faults,
    takes_costs,
    with_backward,
    with_offload,
    with_zero,
)
from raypar.config.skip_connections import skips_of
from raypar.config.validate.adapter_folder import adapter_folder_faults, lora_faults
from raypar.config.validate.asynchronous import asynchronous_faults, unversioned_weight_faults
from raypar.config.validate.data import data_faults
from raypar.config.validate.device import resource_faults
from raypar.config.validate.experts import expert_faults, idle_expert_faults
from raypar.config.validate.hugging_face import weight_folder_faults as weight_faults
from raypar.config.validate.optim import average_faults, group_faults
from raypar.config.validate.order import order_faults, order_on
from raypar.config.validate.outputs import run_folder_faults, track_faults
from raypar.config.validate.parallel import batch_faults, context_faults, tensor_faults
from raypar.config.validate.precision import precision_faults
from raypar.config.validate.replica_checks import replica_check_faults
from raypar.config.validate.sharing import sharing_faults
from raypar.config.validate.tiles import tile_faults
from raypar.config.validate.token_slices import slice_faults
from raypar.config.validate.uneven import turn_faults, uneven_faults
from raypar.config.validate.zero import host_faults, offload_faults, server_faults, zero_faults
from raypar.errors import ConfigError
from raypar.planner.cost_model import costs_of_run, costs_with_halving
from raypar.schedules.passes.skip_connections import no_skips
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs


def check_run(
    run: Run,
    resumed: Path | None = None,
    skeleton: Skeleton | None = None,
    *,
    overwrite: bool = False,
    wrong: Sequence[FieldFault] = (),
) -> Programs:
    """Check a run and return its programs (training step and evaluation) as the actors perform them.

    A field of a wrong type or range is one fault. Checks that would compare it with other fields are then skipped.

    Args:
        run: The run.
        resumed: The checkpoint to continue from. Only a run that resumes from a run folder may use that folder again.
        skeleton: Skeleton of the run's model, if the caller has one already.
        overwrite: Whether the run may replace one that is in its folder.
        wrong: Faults that were found where the run was read, such as unknown fields of a file. They come first.

    Raises ConfigError with all faults of the run.
    """
    own = _own_faults(run)
    skeleton = Skeleton(run.model, run.seed) if skeleton is None else skeleton
    faults = [*(fault.text for fault in wrong), *(fault.text + hint(run, fault.path) for fault in own)]
    right = right_fields([*wrong, *own])
    programs, compared = _compared(run, skeleton, right, resumed, overwrite=overwrite, typed=not wrong)
    faults += compared
    if own and not wrong and (pair := mended(run, own)) is not None:
        faults += [fault for fault in _besides(pair, resumed, overwrite=overwrite) if fault not in faults]
    if faults or programs is None:
        raise ConfigError(faults)
    whole = with_zero(_with_backward(run, _searched(run, programs)), zero_actions_of(run))
    return with_offload(whole, run.activations_on_device)


def _own_faults(run: Run) -> list[FieldFault]:
    """Return what is wrong with single fields of a run."""
    own = list(field_faults(run))
    if right_fields(own)("mesh.pp", "mesh.rank_dp", "mesh.rank_tp"):
        own += [FieldFault(path, text, of_type=False) for path, text in run.mesh.count_faults()]
    return own


def _besides(pair: tuple[Run, Run], resumed: Path | None, *, overwrite: bool) -> list[str]:
    """Return what is wrong with two runs alike, if their single fields are sound."""
    found: list[list[str]] = []
    for run in pair:
        if own := _own_faults(run):
            return []
        skeleton = Skeleton(run.model, run.seed)
        found.append(_compared(run, skeleton, right_fields(own), resumed, overwrite=overwrite)[1])
    return [fault for fault in found[0] if fault in found[1]]


def _compared(
    run: Run,
    skeleton: Skeleton,
    right: Callable[..., bool],
    resumed: Path | None,
    *,
    overwrite: bool,
    typed: bool = True,
) -> tuple[Programs | None, list[str]]:
    """Return a run's programs, None if there are none, and what is wrong with several of its fields together.

    Data are converted only if all words of the run were understood (``typed``).
    """
    faults = list[str]()
    if isinstance(run.model, Transformer):
        faults += run.model.faults(right)
    if isinstance(run.mesh, Mesh):
        faults += run.mesh.faults(right)
    faults += [*server_faults(run, right), *zero_faults(run, right)]
    faults += [*offload_faults(run, right), *replica_check_faults(run, right), *order_faults(run, right)]
    faults += [*precision_faults(run, right), *uneven_faults(run, right), *lora_faults(run, right)]
    faults += [*average_faults(run, right), *slice_faults(run, right), *host_faults(run, right)]
    faults += resource_faults(run, right)
    if right("model", "mesh.tp", "data_parallel", "sequence_parallel"):
        faults += tensor_faults(
            run.model, run.mesh.tp, run.data_parallel, sequence=run.sequence_parallel, plan=_plan(run, skeleton)
        )
    if right("mesh.tp", "data", "micro_batch_size") and isinstance(run.mesh.tp, str):
        faults += batch_faults(run.mesh.tp, run.data, run.micro_batch_size)
    if right("model", "mesh.cp", "mesh.tp", "context", "sequence_parallel"):
        faults += context_faults(run.model, run.mesh, run.context, sequence=run.sequence_parallel)
    programs, misfits = _programs(run, skeleton, right)
    faults += misfits
    if right("backward", "model", "mesh.tp"):
        faults += _backward_faults(run)
    faults += _optimizer_faults(run, skeleton, right)
    faults += _module_faults(run, skeleton, right)
    begins = resumed is None or (isinstance(run.model, Transformer) and run.model.lora is not None)
    if begins and right("model") and _fits(run, skeleton, right):
        faults += weight_faults(run.model, skeleton)  # with adapters, checkpoints have only what learns
        if resumed is None and isinstance(run.model, Transformer):
            faults += adapter_folder_faults(run.model, skeleton)
    faults += data_faults(run, right, converts=typed) if right("data") else ()
    faults += _output_faults(run, resumed, right, overwrite=overwrite)
    return programs, faults


def _searched(run: Run, programs: Programs) -> Programs:
    """Return the programs; those of a schedule that depends on costs are made again, for the costs of the run."""
    if not takes_costs(run.schedule):
        return programs
    return _lowered(run, run.schedule, costs_of_run(run, programs["train"].num_stages))


def _lowered(run: Run, schedule: str | Schedule, costs: Costs | None = None) -> Programs:
    """Return the programs of a schedule in the sizes of a run, without splitting backwards. Raises ScheduleError."""
    return programs_of(
        schedule,
        run.mesh.pp,
        run.microbatches,
        run.chunks,
        steps=run.flush_every,
        reduce_grad=zero_actions_of(run).reduce == "step",
        costs=costs,
        replicas=run.mesh.rank_dp,
        skips=skips_of(run, Skeleton(run.model, run.seed)),
        slices=run.token_slices,
    )


def _programs(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> tuple[Programs | None, list[str]]:
    """Return a run's lowered programs, None if there are none, and what does not fit its schedule."""
    if not right("schedule", "mesh.pp", "microbatches", "chunks"):
        return None, schedule_faults(run.schedule) if right("schedule") else []
    reduces = right("mesh", "data_parallel", "servers", "zero", "offload") and world_of(run).reduces
    try:
        once = reduces and zero_actions_of(run).reduce == "step"
        steps = run.flush_every if right("flush_every") else None
        sizes = run.mesh.pp, run.microbatches, run.chunks
        fits = right("mesh.rank_dp") and len(run.mesh.rank_dp) == run.mesh.pp and not [*turn_faults(run)]
        counts = run.mesh.rank_dp if fits else ()
        skips = skips_of(run, skeleton) if right("model", "split") else no_skips
        # A schedule by name is not built in slices that are refused anyway: of many slices that takes minutes.
        refused = isinstance(run.schedule, str) and any(slice_faults(run, right))
        slices = run.token_slices if right("token_slices") and not refused else 1
        programs = programs_of(
            run.schedule, *sizes, steps=steps, reduce_grad=once, replicas=counts, skips=skips, slices=slices
        )
        misfits = _layer_faults(run, skeleton, programs["train"].num_stages, right)
        misfits = misfits or [*_placement_faults(run, skeleton, programs["train"], right)]
        if right("activations_on_device"):
            misfits += _activation_faults(run, programs)
        return programs, [*asynchronous_faults(run, programs["train"], right), *misfits]
    except ScheduleError as error:
        return None, [
            str(error),
            *_layer_faults(run, skeleton, run.mesh.pp * (run.chunks or 1), right),
        ]


def _activation_faults(run: Run, programs: Programs) -> list[str]:
    """Return why the activations of a run's schedule can't go to host memory as it says."""
    try:
        with_offload(programs, run.activations_on_device)
    except ConfigError as error:
        return [*error.faults]
    return []


def _with_backward(run: Run, programs: Programs) -> Programs:
    """Return the programs with backwards split as the run says."""
    if run.backward == "auto" and isinstance(run.model, Layers) and not run.model.halves:
        return programs
    weighed = costs_of_run if run.backward == "split" else costs_with_halving  # where all are split, nothing is weighed
    costs = weighed(run, programs["train"].num_stages)
    # What a layer keeps for a later W is as large as all its activations, which recomputation is meant to spare.
    return with_backward(programs, run.backward, costs, hold=run.recompute == "none")


def zero_actions_of(run: Run) -> ZeroActions:
    """Return when the replicas of a run reduce gradients and gather weights."""
    world = world_of(run)
    each = world.zero > 1 or (world.replicas == 1 and world.lends)
    return ZeroActions(
        reduce=(run.zero_reduce or ("microbatch" if each else "step")) if world.reduces else None,
        gather=run.zero_gather if world.unshards else None,
        reshard_after_forward=run.reshard_after_forward,
        resident=run.zero_resident if run.zero_gather == "step" else None,
    )


def lowered_step(run: Run, schedule: str | Schedule) -> Schedule:
    """Lower a schedule for a training step of a run, without splitting backwards. Raises ScheduleError."""
    return with_zero(_lowered(run, schedule), zero_actions_of(run))["train"]


def unrecorded(run: Run) -> Run:
    """Return the run without a folder, checkpoints and trackers."""
    return replace(run, folder=None, save_every=0, track=())


def reset_faults(run: Run, device: DeviceKind, resources: Resources | None = None) -> Iterator[str]:
    """Yield the reasons why a run cannot start on existing actors.

    Args:
        run: The run.
        device: Device on which they compute.
        resources: What they have taken of their nodes; None if it is what the run asks for.
    """
    if run.device not in ("auto", device):
        yield f"reset keeps the actors: device must stay {device!r}; launch anew for {run.device!r}"
    if resources is not None and run.resources != resources:
        yield "reset keeps the actors, which can't take other resources: leave resources as they are, or launch anew"
    yield from order_on(run, device)


def _optimizer_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the faults of the optimizer, and of its patterns if the model can be built."""
    if isinstance(run.optim, OptimizerSettings):
        yield from run.optim.faults(right)
    if not right("optim", "model"):
        return
    if isinstance(run.model, Transformer) and any(run.model.faults(right)):
        skeleton = Skeleton(with_its_names(run.model), run.seed)
    if not isinstance(run.model, Layers) or _builds(skeleton):
        yield from group_faults(run.optim, run.model, skeleton)


def _fits(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> bool:
    """Return whether a model can be compared with the folder that its weights come from."""
    if isinstance(run.model, Transformer):
        return not any(run.model.faults(right))
    return run.model.hf is not None and _builds(skeleton)


def _builds(skeleton: Skeleton) -> bool:
    """Return whether a model can be built. Where the user's own function fails, ``_layer_faults`` says so."""
    try:
        return bool(skeleton.model)
    except Exception:
        return False


def _plan(run: Run, skeleton: Skeleton) -> str:
    """Return a plan to give for own layers that have none; "" where none is wanted or they do not build."""
    if not isinstance(run.model, Layers) or run.model.plan or run.mesh.tensor_ranks == 1 or not _builds(skeleton):
        return ""
    from raypar.actors.models.user_plan import plan_to_give  # imports torch

    return plan_to_give(skeleton.layers, run.mesh.tensor_ranks)


def _backward_faults(run: Run) -> Iterator[str]:
    """Yield a fault if backwards are to be split but W would have nothing to compute."""
    if run.backward != "split":
        return
    fix = "or let backward be auto or whole"
    if isinstance(run.model, Layers) and not run.model.halves:
        yield f"backward is 'split', but your own Layers are not to be split: give Layers(halves=True), {fix}"


def _placement_faults(run: Run, skeleton: Skeleton, schedule: Schedule, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the faults that depend on which pipeline rank holds which layer."""
    yield from _share_faults(run, skeleton, schedule, right)
    if right("mesh", "model", "split"):
        yield from idle_expert_faults(run, skeleton, schedule.placement)
    if right("model", "zero"):
        yield from sharing_faults(run, skeleton)
    if isinstance(run.model, Layers) and right("model", "split") and (schedule.num_ranks > 1 or schedule.stream):
        from raypar.actors.models.unregistered import borrowed  # imports torch
        from raypar.actors.worker.build.weight_owners import homes_of

        homes, names = homes_of(skeleton.model, run.split, schedule), skeleton.model.names
        yield from unversioned_weight_faults(skeleton, schedule, homes)
        for layer, owner, name in borrowed(skeleton.model.skeleton):
            if homes[layer] != homes[owner]:
                where = f"they are on different actors, pp={homes[layer]} and pp={homes[owner]}"
                yield (
                    f"model: {names[layer]} uses {names[owner]}.{name} without registering it, and {where}: make the "
                    f"module or the parameter an attribute of {names[layer]} (then it is one tied weight), or give "
                    "both to one stage with split"
                )


def _share_faults(run: Run, skeleton: Skeleton, schedule: Schedule, right: Callable[..., bool]) -> Iterator[str]:
    """Yield a fault if a pipeline rank has fewer parameters than servers. One server is always allowed."""
    if not right("servers", "data_parallel", "zero", "mesh", "model", "split") or world_of(run).servers < 2:
        return
    from raypar.actors.worker.build.weight_owners import sizes_of  # imports torch

    sizes = sizes_of(skeleton.model, run.split, schedule)
    fewest, pp = min((len(sizes.get(pp, {})), pp) for pp in range(schedule.num_ranks))
    if run.servers > fewest:
        fix = f"use {max(1, fewest)} at most"
        yield f"servers is {run.servers}, but pp={pp} has {fewest} parameters, and each is on one server: {fix}"


def _layer_faults(run: Run, skeleton: Skeleton, num_stages: int, right: Callable[..., bool]) -> list[str]:
    """Return the faults of the fields that refer to the model's layers: split, recompute and a plan."""
    transformer = isinstance(run.model, Transformer)
    if not right("model.layers" if transformer else "model"):
        return []
    faults: list[str] = []
    if isinstance(run.model, Transformer):
        count = run.model.layers
    else:
        from torch.nn import Module

        from raypar.actors.models.skip_connections import skip_faults
        from raypar.actors.models.their_layers import TheirLayers
        from raypar.actors.models.user_layers import UnfitLayersError
        from raypar.actors.models.user_plan import embedding_faults, plan_faults  # imports torch
        from raypar.config.distributed_trial import shared_norm_faults
        from raypar.config.validate.batches import loss_faults, user_function_failure
        from raypar.config.validate.transformers_modules import their_plan_faults

        faults += loss_faults(run.model)
        if isinstance(run.model.fn, Module):
            kind, fix = type(run.model.fn).__name__, "give a function that returns a list of modules, lambda: [...]"
            return [*faults, f"model.fn is a module, {kind}: {fix}"]
        try:
            count, layers = len(skeleton.model.body), skeleton.layers
        except UnfitLayersError as error:
            return [*faults, *str(error).splitlines()]
        except Exception as error:
            return [*faults, user_function_failure("model.fn", error)]
        copied = right("mesh") and max(run.mesh.ways("dp"), run.mesh.ways("tp")) > 1
        faults += embedding_faults(layers, alone=not copied and run.data_parallel != "parameter_server")
        if copied and run.mesh.ways("dp") > 1:
            faults += shared_norm_faults(layers)
        ranks = run.mesh.tensor_ranks if right("mesh.tp") else 1
        if isinstance(run.model.fn, TheirLayers):
            faults += their_plan_faults(run.model, layers, ranks)
        else:
            faults += plan_faults(run.model.plan, layers, ranks)
        faults += skip_faults(run.model.skips, count)
        if right("mesh") and run.model.skips and run.mesh.expert_actors:
            faults.append("model.skips has skips, which expert actors have no part in: set mesh.expert_actors to 0")
    faults += split_faults(run.split, count, num_stages) if right("split") else []
    if right("recompute"):
        faults += recompute_faults(run.recompute, count, has_core=transformer)
    return faults


def _module_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the faults of the fields that cut or divide modules inside layers: tile, and the axis of experts."""
    if not right("model") or (isinstance(run.model, Layers) and not _builds(skeleton)):
        return
    if right("tile"):
        yield from tile_faults(run, skeleton, right)
    if right("mesh.ep", "mesh.etp", "mesh.expert_actors"):
        yield from expert_faults(run, skeleton, right)


def _output_faults(run: Run, resumed: Path | None, right: Callable[..., bool], *, overwrite: bool) -> Iterator[str]:
    """Yield the faults of what the run writes: its folder, checkpoints and trackers."""
    if right("folder") and run.folder is not None:
        yield from run_folder_faults(run.folder, resumed, overwrite=overwrite)
    if right("folder", "track"):
        yield from track_faults(run.track, run.folder)
    if right("folder", "save_every") and run.save_every and run.folder is None:
        fix = "leave save_every out, or give folder"
        yield f"save_every is {run.save_every}, but there is no folder for checkpoints: {fix}"
