"""The sum of gradients over replicas and the update: buckets, channels, and the updater of this actor or of servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median_high

import torch
from torch import Tensor, nn

from raypar.actors.bucket_bounds import most_in_buckets
from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.buckets import Bucket, CutBucket, pack
from raypar.actors.data_parallel.reducer import Channel, Complete
from raypar.actors.data_parallel.replica_checks import fixed_weights
from raypar.actors.data_parallel.zero1 import (
    MOST_FLATS,
    CutWeights,
    ShardedUpdate,
    SharedWeights,
    StoredCutWeights,
)
from raypar.actors.machine.flat_memory import flat_empty
from raypar.actors.mesh.world import ReplicaGroup
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.muon.matrix_exchange import CutMatrices
from raypar.actors.optim.step import ParameterUpdate, Updater
from raypar.actors.optim.votes import ReadBallot, ReportedGradients
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.results import Updated
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.build.rank_context import RankContext
from raypar.schedules.action import Action, Op

_MIB = 2**20
Empty = Callable[[int, torch.dtype], Tensor]


class ServedUpdate:
    """End of a step on a worker without an optimizer: it receives the new weights from the parameter servers.

    Args:
        buckets: Buckets of all the worker's parameters. The channel of each is the index of a server.
        groups: For each server, the group of this pipeline rank's replicas and that server, which is the last member.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Sequence[Group]) -> None:
        self._buckets, self._groups = buckets, groups

    def step(self, step: int, ballot: ReadBallot) -> Updated:
        """Receive the weights that the servers broadcast, and load them.

        If a server rejects the step with NonFiniteError, it broadcasts its unchanged weights. This method then loads
        those.

        Args:
            step: Number of the step (unused).
            ballot: Sends the votes of this replica; the servers count them.

        Returns:
            An empty ``Updated``: the servers report the norm and the learning rate.
        """
        ballot()
        flats = [bucket.empty_weights() for bucket in self._buckets]
        groups = [self._groups[bucket.channel] for bucket in self._buckets]
        handles = [group.broadcast(flat, group.size - 1) for group, flat in zip(groups, flats, strict=True)]
        for handle in handles:
            handle.wait()
        for group in self._groups:
            group.synchronize()  # before any load: a server that died has sent no valid weights
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.load(flat)
        return Updated()

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Return an empty iterator: the servers report the state."""
        return iter(())

    def load(self, read: Read) -> None:
        """Do nothing: the servers load the state."""

    def use_averages(self, *, use: bool) -> None:
        """Do nothing: servers keep no averages."""


def buckets_of(plan: ActorPlan, part: ModelPart, parameters: Mapping[str, nn.Parameter]) -> list[Bucket]:
    """Group parameters into buckets, in the order in which a step completes their gradients.

    Args:
        plan: The actor's plan.
        part: The actor's part of the model.
        parameters: The parameters of the part to group, by logical name.
    """
    row, limit = plan.programs["train"].rows[plan.world.row(plan.rank)], _bucket_bytes(plan)
    buckets = []
    units = (unit for weights in part.weights.values() for unit in weights.units)
    strides = {name: stride for unit in units for name, stride in unit.strides.items()}
    for number in last_backwards(row):
        members = {name: parameters[name] for name in part.stages[number].parameters() if name in parameters}
        buckets += pack(number, members, part.owners.of, limit, strides, part.cuts)
    return buckets


def most_bytes_of(plan: ActorPlan, part: ModelPart, buckets: Sequence[Bucket]) -> dict[int, int]:
    """Return the most bytes of gradients that are in buckets at a time, by stage, where replicas cut tensors.

    Args:
        plan: The actor's plan.
        part: The actor's part of the model.
        buckets: The buckets of its parameters.
    """
    found = dict[int, int]()
    for number, stage in part.stages.items():
        cut = [one for one in buckets if one.stage == number and isinstance(one, CutBucket)]
        sizes: dict[Tensor, int] = {
            parameter: parameter.numel() * one.grad_dtype.itemsize
            for one in cut
            for parameter in one.parameters.values()
        }
        modules = dict(zip(stage.layers, stage.modules, strict=True))
        units = [
            sum(sizes.get(one, 0) for one in {one for index in unit for one in modules[index].parameters()})
            for unit in part.model.units(stage.layers, plan.run.zero_units)
        ]
        if cut:
            full = max(_bucket_bytes(plan) // one.dtype.itemsize * one.grad_dtype.itemsize for one in cut)
            found[number] = most_in_buckets(max(sizes.values()), median_high(units), full)
    return found


def _bucket_bytes(plan: ActorPlan) -> int:
    return int(plan.run.bucket_mb * _MIB)


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


def updater_of(context: RankContext, part: ModelPart, scaler: LossScaler) -> Updater:
    """Create the update of an actor's masters, which clips by the norm of all parameters of the model.

    Args:
        context: The actor's rank, device and groups.
        part: The actor's part of the model.
        scaler: The scale of the loss.
    """
    plan, groups, world = context.plan, context.groups, context.world
    run, names = plan.run, part.model.parameter_names()
    private = part.owners.experts if world.mesh.folds_experts else frozenset[str]()
    watched = isinstance(run.model, Layers)
    tensors = ShardedGradients(
        part.shards, part.partial, groups.get("tp"), watched=watched, private=private, device=context.device.device
    )
    reported = ReportedGradients(ballot=plan.rank in world.server_ranks or world.reports_ballot(plan.rank))
    if world.experts is not None:
        reports = world.is_first(plan.rank) and not (world.mesh.folds_experts and world.at(plan.rank)["tp"] > 0)
        reported = reported._replace(dense=reports, experts=world.is_first(plan.rank, expert=True))
    # In an asynchronous schedule stages update independently: there is no global norm, and no vote.
    train = plan.programs["train"]
    every = groups.get(world.updaters) if train.validated or not train.stream else None
    if world.mesh.is_uneven:  # all replicas and tensor ranks of all stages are in one group
        reports = every is None or reported.ballot
        reported = ReportedGradients(reports, reports, reports)
    reached = part.parameters.keys() - part.model.experts.keys() if watched else ()
    experts = part.owners.experts
    cuts = _cut_matrices(context, part) if isinstance(run.optim, Muon) else ()
    return Updater(part.masters, names, part.ties, every, tensors, reported, experts, run, scaler, reached, cuts)


def _cut_matrices(context: RankContext, part: ModelPart) -> list[CutMatrices]:
    """Return how replicas divide the elements of this actor's parameters, of experts and of others apart."""
    world, found = context.world, []
    for replicas, is_expert in ((world.dense, False), (world.experts, True)):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in part.parameters.items()
            if name in part.cuts and (name in part.owners.experts) == is_expert
        }
        if replicas is not None and shapes:
            spans = {name: part.cuts[name].holders(math.prod(shape)) for name, shape in shapes.items()}
            found.append(CutMatrices(context.groups[replicas.shard_key], shapes, spans))
    return found


def channels_of(context: RankContext) -> list[Channel]:
    """Create the channels that gradients are summed over, one for each parameter server, or for all replicas."""
    groups, world = context.groups, context.world
    if world.servers:
        servers = [groups[f"ps{index}"] for index in range(world.servers)]
        return [_channel_to(group, group.size - 1, partial(_empty, group.device)) for group in servers]
    allocate = _allocate_of(context)
    return [_channel_of(context.plan, one, groups, allocate) for one in _replicas(context)]


def shared_update(context: RankContext, part: ModelPart, buckets: list[Bucket], scaler: LossScaler) -> ParameterUpdate:
    """Create the update, for replicas or parameter servers.

    Args:
        context: The actor's rank, device and groups.
        part: The actor's part of the model.
        buckets: Buckets of the parameters whose gradients are summed, or moved off the device.
        scaler: The scale of the loss.
    """
    groups, world = context.groups, context.world
    if world.servers:
        return ServedUpdate(buckets, [groups[f"ps{index}"] for index in range(world.servers)])
    updater = updater_of(context, part, scaler)
    if not world.sharded:
        return updater
    weights = [] if world.gathers else _shared_weights(context, part, buckets)
    return ShardedUpdate(updater, weights, MOST_FLATS if world.unshards else None)


def _shared_weights(context: RankContext, part: ModelPart, buckets: list[Bucket]) -> list[SharedWeights]:
    """Return the weights that several replicas hold, in the order of their exchange after an update."""
    groups, world, replicas = context.groups, context.world, _replicas(context)
    if world.unshards:
        buckets = buckets_of(context.plan, part, part.layer_shards)
    cut = [(one, groups[replicas[one.channel].shard_key]) for one in buckets if isinstance(one, CutBucket)]
    if world.unshards:
        allocate = partial(flat_empty, device=context.device.device)
        return [StoredCutWeights(bucket, group, part.parts, part.storage, allocate) for bucket, group in cut]
    fixed = fixed_weights([module for stage in part.stages.values() for module in stage.modules], part.parameters)
    return [CutWeights(bucket, group, part.masters, fixed) for bucket, group in cut]


def _replicas(context: RankContext) -> list[ReplicaGroup]:
    """Return the replicas over which this actor sums gradients, or itself if it only moves them off its device."""
    world, groups = context.world, context.groups
    both = (world.dense, world.experts)
    return [one for one in both if one is not None and (one.key in groups or world.frees_buckets)]


def _allocate_of(context: RankContext) -> Empty | None:
    """Return what allocates flat tensors that are freed after use; None if they are kept for the whole run."""
    return partial(flat_empty, device=context.device.device) if context.world.frees_buckets else None


def _channel_of(
    plan: ActorPlan, replicas: ReplicaGroup, groups: Mapping[str, Group], allocate: Empty | None
) -> Channel:
    """Create the channel of replicas. Each gets the sums, or with ZeRO its part of all sums.

    Args:
        plan: The actor's plan.
        replicas: The replicas; if this actor is the only one, there is no group of them.
        groups: The actor's groups by key.
        allocate: Allocates flat tensors that are freed after use; None if they are kept for the whole run.
    """
    world = plan.world
    if replicas.key not in groups:
        assert allocate is not None
        return Channel(Complete, Complete, allocate, gets_sum=True)
    every = groups[replicas.key]
    if not world.sharded:
        return Channel(every.all_reduce, every.host.all_reduce, allocate or every.empty, gets_sum=True)
    shards = groups[replicas.shard_key]
    channel = _channel_to(shards, 0, allocate or shards.empty)
    channel = channel._replace(gets_sum=True, scatter=shards.reduce_scatter_cut)
    if world.hybrid:
        return channel._replace(sum_on_host=every.host.all_reduce, finish=groups["replicate"].all_reduce)
    return channel


def _channel_to(group: Group, root: int, empty: Empty) -> Channel:
    """Create a channel that sends the sums to one rank of a group."""
    return Channel(partial(group.reduce, root=root), partial(group.host.reduce, root=root), empty, root == group.rank)


def _empty(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)
