"""A program of a run, as one rank performs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from raypar.actors.data_parallel.stage_weights import StageWeights, WeightWindows
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.specs.data import Batches
from raypar.actors.worker.build.boundaries import peers_of
from raypar.actors.worker.build.rank_context import RankContext
from raypar.schedules.action import Action
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """A program as this rank performs it.

    Attributes:
        schedule: The lowered schedule.
        row: This rank's row of it.
        courier: Sends and receives its messages.
        windows: When sharded weights are whole.
    """

    schedule: Schedule
    row: tuple[Action, ...]
    courier: Courier
    windows: WeightWindows


def program_of(
    context: RankContext, weights: Mapping[int, StageWeights], first_learning: int, schedule: Schedule
) -> Program:
    """Return a schedule as one rank performs it.

    Args:
        context: The rank, its device and its groups.
        weights: The sharded weights of its stages, by stage.
        first_learning: The first stage whose backwards compute gradients; see ``Courier``.
        schedule: The lowered schedule.
    """
    row = schedule.rows[context.row]
    data = context.plan.run.data
    courier = Courier(
        context.groups.get("pp"),
        partial(peers_of, context.world, context.plan.rank, schedule=schedule),
        schedule.num_microbatches,
        varies=isinstance(data, Batches) and data.varying,
        first_learning=first_learning,
        num_stages=schedule.num_stages,
        skips=schedule.skips,
    )
    return Program(schedule, row, courier, WeightWindows(weights, row, context.plan.run.recompute))
