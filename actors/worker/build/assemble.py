"""Build what a worker needs for a run from its plan: stages with weights, the update, the reducer and the batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.data.batches import TokenMean, batch_source, cast_source, context_source, sliced_source
from raypar.actors.data_parallel.reducer import Reducer
from raypar.actors.data_parallel.sums import GradientSums
from raypar.actors.expert_parallel.record import RouterRecord
from raypar.actors.extents import Extents
from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.offload_storage import storage_of
from raypar.actors.models.base import Model, unsharded
from raypar.actors.models.build import build_model, first_learning
from raypar.actors.models.skip_connections import stage_skips
from raypar.actors.models.tied_weights import ties_of
from raypar.actors.models.tiles.tile_names import tile_patterns
from raypar.actors.models.tiles.tiled import tiled_model
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.step import ParameterUpdate
from raypar.actors.pipeline.moves import move_activations
from raypar.actors.pipeline.stage import Stage
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.specs.data import Text
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import ProgramName, format_watched
from raypar.actors.tensors import dtype_of
from raypar.actors.worker.build.flow import StageExchange, TokenFlow
from raypar.actors.worker.build.layers import LayerMaker, captures_graphs, compile_layers
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.parallelize import Parallelizer, axis_styles
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.updates import buckets_of, channels_of, most_bytes_of, shared_update, updater_of
from raypar.actors.worker.build.weight_owners import (
    between_updaters,
    cuts_of,
    owners_of,
    ranks_of_layers,
)
from raypar.schedules.action import Action, Op
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.rules import MAKES_GRADIENTS


def build_part(
    plan: ActorPlan, model: Model, device: ComputeDevice, groups: Mapping[str, Group], server: int | None = None
) -> ModelPart:
    """Build this actor's part of the stages of its pipeline rank.

    Only its weights are created: on the host, in fp32, so that all actors get the same bits; then moved and cast.

    Args:
        plan: The actor's plan.
        model: Its model without weights: see ``unweighted_model``.
        device: The device that it computes on.
        groups: The actor's groups by key.
        server: The index of a parameter server among those of its pipeline rank; None for a worker.
    """
    run, world = plan.run, plan.world
    if run.precision.compute == "fp8":
        device.demand_fp8()
    device.choose_products(tf32=run.precision.tf32)
    axes = axis_styles(run, groups)
    parallelizer = Parallelizer(model, axes)
    train = plan.programs["train"]
    parts = model.stages(run.split, train.num_stages)
    own = train.stages_of(world.row(plan.rank))
    ties, same = ties_of(model, ranks_of_layers(model, run.split, train))
    if world.is_expert(plan.rank):
        same = {}  # it has none of the layers that share weights
    owners = owners_of(plan, model, server)
    storage = storage_of(device.device, run.offload_folder, world.label(plan.rank), apart=run.offload != "none")
    cuts, parallelize = cuts_of(plan, model, groups), parallelizer.parallelize if axes else unsharded
    layers = LayerMaker(plan, device, storage, groups, model, parallelize, cuts)
    layers.make({number: parts[number] for number in own}, owners.experts, same)
    overflow, record = overflow_watch(plan, model, parallelizer), RouterRecord()
    first = 0 if run.mesh.divides_experts else first_learning(model, parts)  # experts exchange gradients in any case
    stages = _stages_of(layers, parts, parallelizer, overflow, record, first)
    held = (one for stage in stages.values() for one in stage.parameters().items())
    parameters = {name: parameter for name, parameter in held if name not in same}
    own_parts = layers.parts(parameters)
    mine = {name: p for name, p in parameters.items() if (name in own_parts if name in cuts else owners.is_own(name))}
    masters = layers.masters(mine, own_parts)
    learning = [tie for tie in ties if tie.original in owners.of]
    return ModelPart(
        model=model,
        stages=stages,
        parameters=parameters,
        masters=masters,
        owners=owners,
        cuts=cuts,
        parts=own_parts,
        ties=[between_updaters(tie, plan, owners.of, groups) for tie in learning],
        shards=parallelizer.shards,
        partial=parallelizer.partial,
        outputs=parallelizer.outputs,
        weights=layers.weights,
        layer_shards=layers.shards,
        overflow=overflow,
        gathered=layers.gathered,
        record=record,
        gathers=world.gathers,
        first_learning=first,
    )


def _stages_of(
    layers: LayerMaker,
    parts: Sequence[range],
    parallelizer: Parallelizer,
    overflow: OverflowWatch | None,
    record: RouterRecord,
    first: int,
) -> dict[int, Stage]:
    """Return the actor's stages by number. ``first`` is the first stage of the model that learns."""
    plan = layers.plan
    model = layers.model
    modules, weights = layers.modules, layers.weights
    run, train, is_expert = plan.run, plan.programs["train"], plan.world.is_expert(plan.rank)
    skips, halved, shared = [*stage_skips(model.skips, parts)], _halved(plan), _shared(modules.values())
    return {
        number: Stage(
            model,
            parts[number],
            [modules[index] for index in parts[number]],
            device=layers.device,
            is_last=number == train.num_stages - 1 and not is_expert,
            recompute=run.recompute,
            seed=run.seed,
            halved=halved[number],
            shared=shared,
            is_half=run.precision.is_half,
            check_loss=parallelizer.check_loss,
            weights=weights.get(number),
            overflow=None if is_expert else overflow,
            record=record,
            ends=StageEnds(skips[number], takes_data=number <= first and not is_expert, first_learning=first),
            learns=number >= first,
            is_alone=not (parallelizer.shards or weights or run.mesh.cp > 1 or run.mesh.divides_experts),
        )
        for number in train.stages_of(plan.world.row(plan.rank))
    }


def _shared(modules: Iterable[nn.Module]) -> frozenset[nn.Parameter]:
    """Return the parameters that several modules have."""
    uses = Counter(p for module in modules for _, p in module.named_parameters(remove_duplicate=False))
    return frozenset(parameter for parameter, count in uses.items() if count > 1)


def unweighted_model(run: Run) -> Model:
    """Return the model of a run without weights, with linear layers in tiles if the run has them."""
    model, patterns = build_model(run.model, run.seed, run.precision.compute), tile_patterns(run.model, run.tile)
    return model if all(count == 1 for count in patterns.values()) else tiled_model(model, patterns)


def overflow_watch(plan: ActorPlan, model: Model, parallelizer: Parallelizer) -> OverflowWatch | None:
    """Create the watch for overflow of an actor whose layers are parallelized; None if the run has none."""
    if not plan.run.overflow_every:
        return None
    weights = {name: shard.sharding for name, shard in parallelizer.shards.items()}
    addends = {name: tuple(group.rank for group in groups) for name, groups in parallelizer.partial.items()}
    watched = format_watched(plan.run.overflow_format, plan.run.precision.layers)
    return OverflowWatch(plan.run.overflow_every, watched, model.names, parallelizer.outputs, weights, addends)


def _halved(plan: ActorPlan) -> dict[int, set[int]]:
    """Return the microbatches whose backwards are split, by stage.

    Microbatches are numbered over the whole step and all replicas, because those of others may be computed again here.
    """
    dp, found = plan.run.mesh.dp, defaultdict[int, set[int]](set)
    for stage, op, microbatch, _ in plan.programs["train"].rows[plan.world.row(plan.rank)]:
        if op is Op.I and stage is not None and microbatch is not None:
            found[stage].update(range(microbatch * dp, (microbatch + 1) * dp))
    return found


def ends_of_rounds(row: Sequence[Action]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return which backwards (B or W) of each stage are the first and the last ones of a round of reductions.

    A round of a stage ends with its REDUCE_GRAD, or with the row.

    Args:
        row: The row of the actor's pipeline rank.

    Returns:
        The first ones and the last ones: each the stage, and how many of its backwards come before it in the step.
    """
    first = set[tuple[int, int]]()
    last = set[tuple[int, int]]()
    begun = set[int]()
    counts = Counter[int]()
    for action in row:
        stage = action.stage
        if stage is not None and action.op in MAKES_GRADIENTS:
            if stage not in begun:
                first.add((stage, counts[stage]))
                begun.add(stage)
            counts[stage] += 1
        elif stage in begun and action.op is Op.REDUCE_GRAD:
            last.add((stage, counts[stage] - 1))
            begun.discard(stage)
    return first, last | {(stage, counts[stage] - 1) for stage in begun}


@dataclass(frozen=True)
class Assembly:
    """Everything that one worker needs for a run.

    Attributes:
        part: Its part of the model.
        update: The end of a step: clipping and the optimizer.
        flow: The inputs and outputs of its stages.
        reducer: Sums gradients over replicas, or moves them off the device; None if neither is needed.
        scaler: The scale of the loss.
    """

    part: ModelPart
    update: ParameterUpdate
    flow: StageExchange
    reducer: Reducer | None
    scaler: LossScaler


def assemble(context: RankContext) -> Assembly:
    """Build everything that a worker needs for a run."""
    plan, groups, device = context.plan, context.groups, context.device
    model, run = unweighted_model(plan.run), plan.run
    context.compare_layers(model)
    part = build_part(plan, model, device, groups)
    for stage in part.stages.values():
        stage.replicas = context.replicas
    if run.activations_on_device is not None:
        move_activations(part.stages)
    if run.compile:
        graphs = captures_graphs(plan, device)
        compile_layers([module for stage in part.stages.values() for module in stage.modules], graphs=graphs)
        for stage in part.stages.values():
            stage.is_captured = graphs
    scaler = LossScaler(run.loss_scale if run.loss_scale.is_on(run.precision) else None)
    flow = _flow_of(context, part, scaler)
    if not plan.world.reduces_at(context.pp) or (plan.world.is_expert(plan.rank) and not part.storage.is_off_device):
        return Assembly(part, updater_of(context, part, scaler), flow, None, scaler)
    buckets = buckets_of(plan, part, _reduced(plan, part, groups))
    channels = channels_of(context)
    train = plan.programs["train"]
    row = first_steps(train, 1).rows[context.row] if train.stream else train.rows[context.row]
    rounds = [action.stage for action in row if action.op is Op.REDUCE_GRAD and action.stage is not None]
    here = [number for number, bucket in enumerate(buckets) if channels[bucket.channel].gets_sum]
    sums = GradientSums(buckets, here, part.storage, part.masters.parameters)
    update = shared_update(context, part, buckets, scaler)  # last: it reserves what the first step allocates
    frees, most = plan.world.frees_buckets, most_bytes_of(plan, part, buckets)
    reducer = Reducer(buckets, channels, device, sums, rounds, frees_buckets=frees, most_bytes=most)
    for number, stage in part.stages.items():
        stage.make_gradients_in(reducer.gradient_views(number))
    return Assembly(part, update, flow, reducer, scaler)


def _flow_of(context: RankContext, part: ModelPart, scaler: LossScaler) -> StageExchange:
    """Create the flow of batches and values through the stages of a worker or an expert actor."""
    plan, run = context.plan, context.plan.run
    if context.world.is_expert(plan.rank):
        empty = torch.empty((0, 1), dtype=dtype_of(run.precision.layers))
        return StageExchange(context.device.to((empty,)))
    train = plan.programs["train"]
    source = batch_source(run.data, run.model, run.micro_batch_size, train.microbatches_a_step, run.mesh.dp, run.seed)
    if part.model.slices is not None and train.slices > 1:
        part.model.slices.count, part.model.slices.replicas = train.slices, run.mesh.dp
        source = sliced_source(source, train.slices)
    mean = TokenMean(part.model, source, train.numbers_a_step, run.mesh.dp)
    if run.mesh.cp > 1:
        source = context_source(source, tokens_of(run.context, run.mesh.cp)[context.cp])
    if run.precision.is_half:
        source = cast_source(source, dtype_of(run.precision.layers))
    if part.model.documents is not None:

        def extents(program: ProgramName, step: int, number: int) -> Extents:
            """Return the extents of documents and padding in a microbatch, which is numbered over all replicas."""
            step += scaler.left_out if program == "train" else 0
            return source.extents(program, step, *divmod(number, run.mesh.dp)).on(context.device)

        part.model.documents.reads = extents
    # All blocks of a text have the same count, and stages that update independently refuse any other count.
    is_even = isinstance(run.data, Text) or (train.stream > 0 and not train.validated)
    ahead = not is_even and any(router.adds_losses for _, router in part.routers())
    return TokenFlow(context, part.stages, source, mean, scaler, counts_ahead=ahead)


def _reduced(plan: ActorPlan, part: ModelPart, groups: Mapping[str, Group]) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are reduced, by logical name: not those of experts on this actor only.

    If gradients are moved off the device, those of all parameters are.
    """
    alone = plan.world.experts is not None and "edp" not in groups and not part.storage.is_off_device
    return {name: p for name, p in part.parameters.items() if not (alone and name in part.owners.experts)}
