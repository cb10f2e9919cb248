"""Build what a worker needs for a run from its plan: stages with weights, the update, the reducer and the batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Group, Groups
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.data.batches import BatchSource, CastSource, ContextSource, TokenMean, batch_source
from raypar.actors.data_parallel.buckets import Bucket, pack, share_out
from raypar.actors.data_parallel.high_water import HighWater
from raypar.actors.data_parallel.reducer import Channel, Reducer
from raypar.actors.data_parallel.replica_checks import digest, fixed_weights
from raypar.actors.data_parallel.served_update import ServedUpdate
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.data_parallel.units import digests_of
from raypar.actors.data_parallel.zero1 import ShardedUpdate
from raypar.actors.device import Place
from raypar.actors.flat_memory import flat_empty
from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.mesh.world import World
from raypar.actors.models.base import Model, unsharded
from raypar.actors.models.build import build_model
from raypar.actors.models.tied_weights import Tie, ties_of
from raypar.actors.models.tile_names import patterns_of
from raypar.actors.models.tiled import TiledModel
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.step import Update, Updater
from raypar.actors.pipeline.stage import Stage
from raypar.actors.sharding import Shard, Sharding
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Split, format_watched
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.tensors import dtype_of, nbytes
from raypar.actors.worker.layers import LayerMaker
from raypar.actors.worker.parallelize import Parallelizer, axis_styles
from raypar.actors.worker.plan import Plan
from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule

_MIB = 2**20


@dataclass(frozen=True)
class Part:
    """One actor's part of the model.

    Attributes:
        model: The model.
        stages: The actor's stages by number.
        parameters: Trainable parameters by logical name; a tied weight whose home is on this rank too is listed once.
        masters: The weights that this actor updates.
        owner_of: Which rank updates each parameter of the model, among the owners (see World) of its pipeline rank.
        ties: Ties between pipeline ranks; their ranks are those of the owners in the group of all updaters.
        shards: This actor's part of each sharded parameter, by logical name.
        partial: Groups over which a parameter's gradient is partial, by logical name: see Parallelizer.
        outputs: Sharding of the outputs of layers and of some modules in them, by logical name.
        weights: With ZeRO stage 3, the sharded weights of each stage, by its number.
        overflow: Counts overflow in the stages; None if the run does not ask for it.
        gathered: With ZeRO stage 3, the bytes of weights that are whole; else None.
    """

    model: Model
    stages: dict[int, Stage]
    parameters: dict[str, nn.Parameter]
    masters: Masters
    owner_of: dict[str, int]
    ties: list[Tie]
    shards: Mapping[str, Shard]
    partial: Mapping[str, Groups]
    outputs: Mapping[str, Sharding]
    weights: Mapping[int, StageWeights]
    overflow: OverflowWatch | None
    gathered: HighWater | None

    @property
    def kept(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the actor always holds, by logical name: with ZeRO stage 3, the shards that it owns."""
        return self.masters.parameters if self.weights else self.parameters

    @property
    def held(self) -> list[nn.Parameter]:
        """The weights that the actor always holds in the dtype in which layers compute: with ZeRO stage 3, shards."""
        units = [unit for weights in self.weights.values() for unit in weights.units]
        shards = {name: shard for unit in units for name, shard in unit.shards.items()}
        return list((shards if self.weights else self.parameters).values())

    def digests(self, owner: int) -> list[bytes]:
        """Return digests of the initial values of the parameters that one owner updates."""
        if not self.weights:
            return [digest(self.share(owner))]
        made = digests_of(unit for weights in self.weights.values() for unit in weights.units)
        return [one for name, one in made.items() if self.owner_of[name] == owner]

    def share(self, owner: int) -> dict[str, nn.Parameter]:
        """Return the parameters that one owner updates, by logical name."""
        return {name: p for name, p in self.parameters.items() if self.owner_of[name] == owner}

    def fixed(self) -> dict[str, Tensor]:
        """Return the tensors that no optimizer changes, by logical name: frozen parameters, and buffers."""
        return {
            f"{self.model.names[index]}.{inner}": tensor
            for stage in self.stages.values()
            for index, module in zip(stage.layers, stage.modules, strict=True)
            for inner, tensor in chain(module.named_parameters(), module.named_buffers())
            if not tensor.requires_grad
        }


def build_part(plan: Plan, place: Place, groups: Mapping[str, Group], owner: int) -> Part:
    """Build this actor's part of the stages of its pipeline rank.

    Only its weights are made: on the host, in fp32, so that all get the same bits. Then they are moved and cast.

    Args:
        plan: The actor's plan.
        place: The device that it computes on.
        groups: The actor's groups by key.
        owner: Which of the owners of the pipeline rank's weights it is.
    """
    run, world = plan.run, plan.world
    model = model_of(run)
    axes = axis_styles(run, groups)
    parallelizer = Parallelizer(model, axes)
    train = plan.programs["train"]
    parts = model.stages(run.split, train.num_stages)
    own = train.stages_of(world.pp(plan.rank))
    ties, same = ties_of(model, homes_of(model, run.split, train))
    owner_of = _owner_of(plan, model)
    layers = LayerMaker(plan, place, groups.get("gather"), model, parallelizer.parallelize if axes else unsharded)
    modules, weights = layers.make({number: parts[number] for number in own}, owner_of, same)
    overflow = overflow_of(plan, model, parallelizer)
    places = Counter(p for module in modules.values() for _, p in module.named_parameters(remove_duplicate=False))
    shared = frozenset(parameter for parameter, count in places.items() if count > 1)
    stages = {
        number: Stage(
            model,
            parts[number],
            [modules[index] for index in parts[number]],
            place=place,
            is_last=number == train.num_stages - 1,
            recompute=run.recompute,
            seed=run.seed,
            halved=_halved(plan)[number],
            shared=shared,
            is_half=run.precision.is_half,
            check_loss=parallelizer.check_loss,
            weights=weights.get(number),
            overflow=overflow,
        )
        for number in own
    }
    parameters = {
        name: parameter
        for stage in stages.values()
        for name, parameter in stage.parameters().items()
        if name not in same
    }
    mine = {name: parameter for name, parameter in parameters.items() if owner_of[name] == owner}
    masters = layers.masters(mine)
    ties = [_between_owners(tie, world, owner_of) for tie in ties]
    sharded = parallelizer.shards, parallelizer.partial, parallelizer.outputs
    return Part(model, stages, parameters, masters, owner_of, ties, *sharded, weights, overflow, layers.gathered)


def model_of(run: Run) -> Model:
    """Return the model of a run without weights, its linear layers cut into tiles as the run says."""
    model, patterns = build_model(run.model, run.seed), patterns_of(run.model, run.tile)
    return model if all(count == 1 for count in patterns.values()) else TiledModel(model, patterns)


def overflow_of(plan: Plan, model: Model, parallelizer: Parallelizer) -> OverflowWatch | None:
    """Create the watch for overflow of an actor whose layers are parallelized; None if the run does not ask for it."""
    if not plan.run.overflow_every:
        return None
    weights = {name: shard.sharding for name, shard in parallelizer.shards.items()}
    addends = {name: tuple(group.rank for group in groups) for name, groups in parallelizer.partial.items()}
    watched = format_watched(plan.run.overflow_format, plan.run.precision.compute)
    return OverflowWatch(plan.run.overflow_every, watched, model.names, parallelizer.outputs, weights, addends)


def _owner_of(plan: Plan, model: Model) -> dict[str, int]:
    """Return which owner of its pipeline rank updates each parameter of the model."""
    sizes = sizes_of(model, plan.run.split, plan.programs["train"]).values()
    return {name: owner for one in sizes for name, owner in share_out(one, plan.world.owners).items()}


def _between_owners(tie: Tie, world: World, owner_of: Mapping[str, int]) -> Tie:
    """Return a tie between pipeline ranks as one between the owners of its ends, in the group of all updaters."""
    home = world.owner_rank(tie.home_rank, owner_of[tie.home])
    return Tie(tie.home, home, tie.copy, world.owner_rank(tie.copy_rank, owner_of[tie.copy]))


def _halved(plan: Plan) -> dict[int, set[int]]:
    """Return the microbatches whose backwards are split, by stage.

    Microbatches are numbered over the whole step and all replicas.
    """
    dp, found = plan.run.mesh.coordinate(plan.rank)["dp"], defaultdict[int, set[int]](set)
    for stage, op, microbatch in plan.programs["train"].rows[plan.world.pp(plan.rank)]:
        if op is Op.I and stage is not None and microbatch is not None:
            found[stage].add(microbatch * plan.run.mesh.dp + dp)
    return found


def buckets_of(plan: Plan, part: Part, parameters: Mapping[str, nn.Parameter]) -> list[Bucket]:
    """Group parameters into buckets, in the order in which a step completes their gradients.

    Args:
        plan: The actor's plan.
        part: The actor's part of the model.
        parameters: The parameters of the part to group, by logical name.
    """
    row, limit = plan.programs["train"].rows[plan.world.pp(plan.rank)], int(plan.run.bucket_mb * _MIB)
    buckets = []
    for number in last_backwards(row):
        members = {name: p for name, p in part.stages[number].parameters().items() if name in parameters}
        buckets += pack(number, members, part.owner_of, limit)
    return buckets


def ends_of_rounds(row: Sequence[Action]) -> tuple[set[Action], set[Action]]:
    """Return the first and the last backwards (B or W) of each round of reductions in a row.

    A round of a stage ends with its REDUCE_GRAD, or with the row.
    """
    first, last, latest = set[Action](), set[Action](), dict[int, Action]()
    for action in row:
        if action.stage is not None and action.op in (Op.B, Op.W):
            if action.stage not in latest:
                first.add(action)
            latest[action.stage] = action
        elif action.op is Op.REDUCE_GRAD and action.stage in latest:
            last.add(latest.pop(action.stage))
    return first, last | set(latest.values())


def last_backwards(row: Sequence[Action]) -> dict[int, Action]:
    """Return the last backward (B or W) of each stage in a row, in the order of the row.

    If stages of one rank share a weight, it belongs to the first of them. The last backward of that stage depends on
    those of the other stages, so the weight's gradient is complete after it.
    """
    last: dict[int, Action] = {}
    for action in row:
        if action.stage is not None and action.op in (Op.B, Op.W):
            last.pop(action.stage, None)
            last[action.stage] = action
    return last


def homes_of(model: Model, split: Split, schedule: Schedule) -> dict[int, int]:
    """Return the pipeline rank of each layer, by the layer's index.

    Args:
        model: The model.
        split: How its layers are split into stages.
        schedule: The schedule, which places the stages on ranks.
    """
    parts = model.stages(split, schedule.num_stages)
    return {index: schedule.placement[number] for number, part in enumerate(parts) for index in part}


def sizes_of(model: Model, split: Split, schedule: Schedule) -> dict[int, dict[str, int]]:
    """Return the size in bytes of each pipeline rank's trainable parameters, by rank and logical name.

    A tied weight whose home is on the same rank is listed once. The arguments are those of ``homes_of``.
    """
    homes = homes_of(model, split, schedule)
    _, same = ties_of(model, homes)
    sizes: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for index, (layer, module) in enumerate(zip(model.names, model.skeleton, strict=True)):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            if parameter.requires_grad and name not in same:
                sizes[homes[index]][name] = nbytes(parameter)
    return sizes


@dataclass(frozen=True)
class Assembly:
    """Everything that one worker needs for a run.

    Attributes:
        part: Its part of the model.
        update: The end of a step: clipping and the optimizer.
        source: The batches.
        mean: The weights of the microbatches in the loss.
        reducer: Sums gradients over replicas; None if there are neither replicas nor parameter servers.
        scaler: The scale of the loss.
    """

    part: Part
    update: Update
    source: BatchSource
    mean: TokenMean
    reducer: Reducer | None
    scaler: LossScaler


def assemble(plan: Plan, groups: Mapping[str, Group], place: Place) -> Assembly:
    """Build everything that one worker needs for a run.

    Args:
        plan: The worker's plan.
        groups: The worker's groups by key.
        place: The worker's device.
    """
    part = build_part(plan, place, groups, groups[plan.world.shard_key].rank if plan.world.sharded else 0)
    run, m = plan.run, plan.programs["train"].num_microbatches
    source = batch_source(run.data, run.model, run.micro_batch_size, m, run.mesh.dp, run.seed)
    mean = TokenMean(part.model, source, m, run.mesh.dp)
    if run.mesh.cp > 1:
        source = ContextSource(source, tokens_of(run.context, run.mesh.cp)[run.mesh.coordinate(plan.rank)["cp"]])
    if run.precision.is_half:
        source = CastSource(source, dtype_of(run.precision.compute))
    scaler = LossScaler(run.loss_scale if run.loss_scale.is_on(run.precision) else None)
    if not plan.world.reduces:
        return Assembly(part, updater_of(plan, part, groups, scaler), source, mean, None, scaler)
    buckets = buckets_of(plan, part, part.parameters)
    channels, update = _shared(plan, part, buckets, groups, scaler)
    row = plan.programs["train"].rows[plan.world.pp(plan.rank)]
    rounds = [action.stage for action in row if action.op is Op.REDUCE_GRAD and action.stage is not None]
    reducer = Reducer(buckets, channels, place, rounds, lends=plan.world.zero > 1)
    for number, stage in part.stages.items():
        stage.make_gradients_in(reducer.places(number))
    return Assembly(part, update, source, mean, reducer, scaler)


def updater_of(plan: Plan, part: Part, groups: Mapping[str, Group], scaler: LossScaler) -> Updater:
    """Create the update of an actor's masters, which clips by the norm of all parameters of the model.

    Args:
        plan: The actor's plan.
        part: The actor's part of the model.
        groups: The actor's groups by key.
        scaler: The scale of the loss.
    """
    run, names, group = plan.run, part.model.parameter_names(), groups.get(plan.world.updaters)
    tensors = ShardedGradients(part.shards, part.partial, groups.get("tp"), watched=isinstance(run.model, Layers))
    policy = run.optim, run.clip, run.steps, scaler, run.nonfinite
    return Updater(part.masters, names, part.ties, group, tensors, *policy)


def _shared(
    plan: Plan, part: Part, buckets: list[Bucket], groups: Mapping[str, Group], scaler: LossScaler
) -> tuple[list[Channel], Update]:
    """Create the channels that gradients are summed over, and the update, for replicas or parameter servers.

    Returns:
        One channel for each owner, and the update.
    """
    if plan.world.servers:
        servers = [groups[f"ps{index}"] for index in range(plan.world.servers)]
        channels = [_channel_to(group, group.size - 1, partial(_empty, group.device)) for group in servers]
        return channels, ServedUpdate(buckets, servers)
    dp = groups["dp"]
    if not plan.world.sharded:
        channels = [Channel(dp.all_reduce, dp.host.all_reduce, dp.empty, here=True)]
        return channels, updater_of(plan, part, groups, scaler)
    owners, channels = groups[plan.world.shard_key], []
    empty = partial(flat_empty, device=dp.device) if plan.world.zero > 1 else owners.empty
    for owner in range(owners.size):
        channel = _channel_to(owners, owner, empty)
        if plan.world.hybrid:
            channel = channel._replace(tell=dp.host.all_reduce, finish=groups["replicate"].all_reduce)
        channels.append(channel)
    updater = updater_of(plan, part, groups, scaler)
    if plan.world.gathers:
        return channels, ShardedUpdate(updater, (), owners, frozenset())
    layers = [module for stage in part.stages.values() for module in stage.modules]
    fixed = fixed_weights(layers, part.parameters, part.owner_of)
    return channels, ShardedUpdate(updater, buckets, owners, fixed)


def _channel_to(group: Group, root: int, empty: Callable[[int, torch.dtype], Tensor]) -> Channel:
    """Create a channel that gives the sums to one rank of a group."""
    return Channel(partial(group.reduce, root=root), partial(group.host.reduce, root=root), empty, root == group.rank)


def _empty(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)
