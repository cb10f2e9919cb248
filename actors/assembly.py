"""From a plan to a worker's parts: its stages with their weights, its optimizer, its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raypar.actors.averaging import TokenMean
from raypar.actors.batches import BatchSource, batch_source
from raypar.actors.group import Group
from raypar.actors.part import Part, buckets_of, build_part
from raypar.actors.plan import Plan
from raypar.actors.reducer import Channel, Reducer
from raypar.actors.served import ServedUpdate
from raypar.actors.update import Update, Updater


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


def assemble(plan: Plan, groups: Mapping[str, Group]) -> Assembly:
    """Build this rank's part of the run. Only its own weights are made."""
    part = build_part(plan)
    m, num_dp = plan.programs["train"].num_microbatches, plan.mesh.dp
    source = batch_source(plan.data, plan.model, plan.micro_batch_size, m, num_dp, plan.seed)
    mean = TokenMean(part.model, source, m, num_dp)
    if not plan.world.reduces:
        return Assembly(part, _updater(plan, part, groups), source, mean, None)
    buckets = buckets_of(plan, part, part.parameters)
    if not plan.world.servers:
        reducer = Reducer(buckets, [Channel(groups["dp"].all_reduce, groups["dp"].empty)])
        return Assembly(part, _updater(plan, part, groups), source, mean, reducer)
    servers = [groups[f"ps{index}"] for index in range(plan.world.servers)]
    reducer = Reducer(buckets, [Channel(partial(group.reduce, root=group.size - 1), _empty) for group in servers])
    return Assembly(part, ServedUpdate(part.parameters, buckets, servers), source, mean, reducer)


def _updater(plan: Plan, part: Part, groups: Mapping[str, Group]) -> Updater:
    names = part.model.parameter_names()
    return Updater(part.parameters, names, part.ties, groups.get("pp"), plan.optim, plan.clip, plan.steps)


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)
