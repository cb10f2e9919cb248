"""How an actor sums gradients with others, and updates weights: channels to the owners of weights, and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.data_parallel.reducer import Channel
from raypar.actors.data_parallel.replica_checks import fixed_weights
from raypar.actors.data_parallel.served_update import ServedUpdate
from raypar.actors.data_parallel.zero1 import ShardedUpdate, SharedBucket
from raypar.actors.flat_memory import flat_empty
from raypar.actors.mesh.world import Replicas
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.step import Told, Update, Updater
from raypar.actors.specs.model import Layers
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.worker.model_part import Part
from raypar.actors.worker.plan import Plan

Empty = Callable[[int, torch.dtype], Tensor]


def updater_of(plan: Plan, part: Part, groups: Mapping[str, Group], scaler: LossScaler) -> Updater:
    """Create the update of an actor's masters, which clips by the norm of all parameters of the model.

    Args:
        plan: The actor's plan.
        part: The actor's part of the model.
        groups: The actor's groups by key.
        scaler: The scale of the loss.
    """
    run, world, names = plan.run, plan.world, part.model.parameter_names()
    apart = part.owners.experts if world.mesh.folds_experts else frozenset[str]()
    watched = isinstance(run.model, Layers)
    tensors = ShardedGradients(part.shards, part.partial, groups.get("tp"), watched=watched, apart=apart)
    told = Told(ballot=plan.rank in world.server_ranks or world.tells(plan.rank))
    if world.experts is not None:
        first, tells = world.is_first(plan.rank, expert=True), world.is_first(plan.rank)
        tells &= not (world.mesh.folds_experts and world.mesh.coordinate(plan.rank)["tp"] > 0)
        experts = part.owners.experts
        told = told._replace(names=frozenset(one for one in part.parameters if (first if one in experts else tells)))
    policy = run.optim, run.clip, run.steps, scaler, run.nonfinite
    return Updater(part.masters, names, part.ties, groups.get(world.updaters), tensors, told, *policy)


def shared_update(
    plan: Plan, part: Part, buckets: list[Bucket], groups: Mapping[str, Group], scaler: LossScaler
) -> tuple[list[Channel], Update]:
    """Create the channels that gradients are summed over, and the update, for replicas or parameter servers.

    Returns:
        One channel for each owner, and the update.
    """
    world = plan.world
    if world.servers:
        servers = [groups[f"ps{index}"] for index in range(world.servers)]
        channels = [_channel_to(group, group.size - 1, partial(_empty, group.device)) for group in servers]
        return channels, ServedUpdate(buckets, servers)
    replicas = [one for one in (world.dense, world.experts) if one is not None and one.key in groups]
    channels = [channel for one in replicas for channel in _channels(plan, one, groups)]
    updater = updater_of(plan, part, groups, scaler)
    if not world.sharded:
        return channels, updater
    shared, fixed = [], set[str]()
    if not world.gathers:
        layers = [module for stage in part.stages.values() for module in stage.modules]
        fixed = fixed_weights(layers, part.parameters, part.owners.of)
        owners = [(groups[one.shard_key], rank) for one in replicas for rank in range(one.owners)]
        shared = [SharedBucket(bucket, *owners[bucket.owner]) for bucket in buckets]
    return channels, ShardedUpdate(updater, shared, fixed)


def _channels(plan: Plan, replicas: Replicas, groups: Mapping[str, Group]) -> Iterator[Channel]:
    """Yield the channels of replicas, one for each owner of their weights."""
    every, world = groups[replicas.key], plan.world
    if not world.sharded:
        yield Channel(every.all_reduce, every.host.all_reduce, every.empty, here=True)
        return
    owners = groups[replicas.shard_key]
    empty = partial(flat_empty, device=every.device) if world.zero > 1 else owners.empty
    for owner in range(owners.size):
        channel = _channel_to(owners, owner, empty)
        if world.hybrid:
            channel = channel._replace(tell=every.host.all_reduce, finish=groups["replicate"].all_reduce)
        yield channel


def _channel_to(group: Group, root: int, empty: Empty) -> Channel:
    """Create a channel that gives the sums to one rank of a group."""
    return Channel(partial(group.reduce, root=root), partial(group.host.reduce, root=root), empty, root == group.rank)


def _empty(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)
