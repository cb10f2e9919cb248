"""From a plan to a worker's parts: its stages with their weights, its optimizer, its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from raypar.actors.averaging import TokenMean
from raypar.actors.batches import BatchSource, ContextSource, batch_source
from raypar.actors.buckets import Bucket
from raypar.actors.context import tokens_of
from raypar.actors.divided import Divided
from raypar.actors.group import Group
from raypar.actors.overlap import fixed_weights
from raypar.actors.part import Part, buckets_of, build_part
from raypar.actors.place import Place
from raypar.actors.plan import Plan
from raypar.actors.reducer import Channel, Reducer
from raypar.actors.served import ServedUpdate
from raypar.actors.specs import Layers
from raypar.actors.update import Update, Updater
from raypar.actors.zero import ShardedUpdate


@dataclass(frozen=True)
class Assembly:
    """What one worker works with.

    mean     what its microbatches weigh
    reducer  None with neither replicas nor servers
    """

    part: Part
    update: Update
    source: BatchSource
    mean: TokenMean
    reducer: Reducer | None


def assemble(plan: Plan, groups: Mapping[str, Group], place: Place) -> Assembly:
    """Build this rank's part of the run. Only its own weights are made."""
    part = build_part(plan, place, groups)
    m, num_dp = plan.programs["train"].num_microbatches, plan.mesh.dp
    source = batch_source(plan.data, plan.model, plan.micro_batch_size, m, num_dp, plan.seed)
    mean = TokenMean(part.model, source, m, num_dp)
    if plan.mesh.cp > 1:
        source = ContextSource(source, tokens_of(plan.context, plan.mesh.cp)[plan.mesh.coordinate(plan.rank)["cp"]])
    if not plan.world.reduces:
        return Assembly(part, updater_of(plan, part, part.parameters, groups), source, mean, None)
    buckets = buckets_of(plan, part, part.parameters)
    channels, update = _shared(plan, part, buckets, groups)
    reducer = Reducer(buckets, channels, place)
    for number, stage in part.stages.items():
        stage.make_gradients_in(reducer.places(number))
    return Assembly(part, update, source, mean, reducer)


def updater_of(plan: Plan, part: Part, parameters: Mapping[str, nn.Parameter], groups: Mapping[str, Group]) -> Updater:
    """The update of these parameters of a part, in step with everybody else's."""
    names, group = part.model.parameter_names(), groups.get(plan.world.updaters)
    tensors = Divided(part.cuts, part.partial, groups.get("tp"), watched=isinstance(plan.model, Layers))
    return Updater(parameters, names, part.ties, group, tensors, plan.optim, plan.clip, plan.steps)


def _shared(plan: Plan, part: Part, buckets: list[Bucket], groups: Mapping[str, Group]) -> tuple[list[Channel], Update]:
    """Where gradients are summed, and how a step ends, with replicas or servers."""
    if plan.world.servers:
        servers = [groups[f"ps{index}"] for index in range(plan.world.servers)]
        channels = [_channel_to(group, group.size - 1, partial(_empty, group.device)) for group in servers]
        return channels, ServedUpdate(buckets, servers)
    dp = groups["dp"]
    if not plan.world.sharded:
        channels = [Channel(dp.all_reduce, dp.host.all_reduce, dp.empty, here=True)]
        return channels, updater_of(plan, part, part.parameters, groups)
    channels = [_channel_to(dp, owner, dp.empty) for owner in range(dp.size)]
    updater = updater_of(plan, part, part.share(dp.rank), groups)
    return channels, ShardedUpdate(updater, buckets, dp, fixed_weights(part))


def _channel_to(group: Group, root: int, empty: Callable[[int, torch.dtype], Tensor]) -> Channel:
    """The sums are at one member."""
    return Channel(partial(group.reduce, root=root), partial(group.host.reduce, root=root), empty, root == group.rank)


def _empty(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)
