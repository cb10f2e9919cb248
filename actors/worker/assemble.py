"""Put together what a worker needs for a run: its part of the model, the update, the reducer and the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.data.batches import BatchSource, CastSource, ContextSource, TokenMean, batch_source
from raypar.actors.data_parallel.buckets import Bucket, pack
from raypar.actors.data_parallel.reducer import Channel, Complete, Reducer
from raypar.actors.data_parallel.replica_checks import fixed_weights
from raypar.actors.data_parallel.served_update import ServedUpdate
from raypar.actors.data_parallel.sums import GradientSums
from raypar.actors.data_parallel.zero1 import ShardedUpdate
from raypar.actors.device import Place
from raypar.actors.flat_memory import flat_empty
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.step import Update, Updater
from raypar.actors.specs.model import Layers
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.tensors import dtype_of
from raypar.actors.worker.build import Part, build_part, last_backwards
from raypar.actors.worker.plan import Plan
from raypar.schedules.action import Op

_MIB = 2**20


@dataclass(frozen=True)
class Assembly:
    """Everything that one worker needs for a run.

    Attributes:
        part: Its part of the model.
        update: The end of a step: clipping and the optimizer.
        source: The batches.
        mean: The weights of the microbatches in the loss.
        reducer: Sums gradients over replicas, or moves them away from the device; None if neither is to be done.
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
    channels, update = _shared(plan, part, buckets, groups, place.device, scaler)
    row = plan.programs["train"].rows[plan.world.pp(plan.rank)]
    rounds = [action.stage for action in row if action.op is Op.REDUCE_GRAD and action.stage is not None]
    here = [number for number, bucket in enumerate(buckets) if channels[bucket.owner].here]
    sums = GradientSums(buckets, here, part.home, part.masters.parameters)
    reducer = Reducer(buckets, channels, place, sums, rounds, lends=plan.world.lends)
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
    plan: Plan,
    part: Part,
    buckets: list[Bucket],
    groups: Mapping[str, Group],
    device: torch.device,
    scaler: LossScaler,
) -> tuple[list[Channel], Update]:
    """Create the channels that gradients are summed over, and the update.

    Returns:
        One channel for each owner, and the update.
    """
    if plan.world.servers:
        servers = [groups[f"ps{index}"] for index in range(plan.world.servers)]
        channels = [_channel_to(group, group.size - 1, partial(_empty, group.device)) for group in servers]
        return channels, ServedUpdate(buckets, servers)
    dp, lent = groups.get("dp"), partial(flat_empty, device=device)
    if dp is None:
        return [Channel(Complete, Complete, lent, here=True)], updater_of(plan, part, groups, scaler)
    if not plan.world.sharded:
        channels = [Channel(dp.all_reduce, dp.host.all_reduce, lent if plan.world.lends else dp.empty, here=True)]
        return channels, updater_of(plan, part, groups, scaler)
    owners, channels = groups[plan.world.shard_key], []
    empty = lent if plan.world.lends else owners.empty
    for owner in range(owners.size):
        channel = _channel_to(owners, owner, empty)
        if plan.world.hybrid:
            channel = channel._replace(tell=dp.host.all_reduce, finish=groups["replicate"].all_reduce)
        channels.append(channel)
    updater = updater_of(plan, part, groups, scaler)
    if plan.world.gathers:
        return channels, ShardedUpdate(updater, (), owners)
    if plan.world.unshards:
        resting = buckets_of(plan, part, part.layer_shards)
        return channels, ShardedUpdate(updater, resting, owners, set(part.layer_shards), lent, part.home)
    layers = [module for stage in part.stages.values() for module in stage.modules]
    fixed = fixed_weights(layers, part.parameters, part.owner_of)
    return channels, ShardedUpdate(updater, buckets, owners, fixed)


def _channel_to(group: Group, root: int, empty: Callable[[int, torch.dtype], Tensor]) -> Channel:
    """Create a channel that gives the sums to one rank of a group."""
    return Channel(partial(group.reduce, root=root), partial(group.host.reduce, root=root), empty, root == group.rank)


def _empty(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


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
        members = {name: parameters[name] for name in part.stages[number].parameters() if name in parameters}
        buckets += pack(number, members, part.owner_of, limit)
    return buckets
