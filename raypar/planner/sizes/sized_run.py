"""A run with its ranks, its parameters and its schedule: what predictions of a step are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.tiles.tile_names import tile_patterns
from raypar.actors.optim.groups import is_matrix
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.planner.sizes.part_sizes import PartSize, largest_parts
from raypar.planner.sizes.tensors import Stage, Weight, held_count, held_tensors, tensors_by_stage, user_tensors
from raypar.planner.sizes.units import Units
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a run has, by where they are.

    Attributes:
        held: By pipeline rank, those of a worker, before ZeRO shards them.
        units: By stage, those that are gathered together.
        matrices: By pipeline rank, those that Muon updates; empty if the optimizer is another one.
        experts: By pipeline rank, those of ``held`` that are of experts which actors divide; empty if they do not.
        apart: Those of an expert actor; None if experts have no actors of their own.
        frozen: By pipeline rank, weights beside ``held`` that nothing updates; empty if there are none.
        expert_matrices: By pipeline rank, those of ``matrices`` that are of experts which actors divide.
        largest_matrix: By pipeline rank, those of the largest whole matrix that Muon updates.
        shares: By pipeline rank, what the replica that updates most does of ``held``; empty if that is not known.
    """

    held: Sequence[int]
    units: Sequence[Units]
    matrices: Sequence[int] = ()
    experts: Sequence[int] = ()
    apart: ParameterCounts | None = None
    frozen: Sequence[int] = ()
    expert_matrices: Sequence[int] = ()
    largest_matrix: Sequence[int] = ()
    shares: Sequence[PartSize] = ()


class SizedRun(NamedTuple):
    """A run with what predictions of its step are made from.

    Attributes:
        run: The run.
        world: Its ranks.
        counts: Its parameters.
        schedule: The lowered schedule of a training step.
    """

    run: Run
    world: World
    counts: ParameterCounts
    schedule: Schedule

    @classmethod
    def of(cls, run: Run, schedule: Schedule, skeleton: Skeleton | None = None) -> SizedRun:
        """Find the ranks of a run, and count its parameters.

        Args:
            run: The run.
            schedule: The lowered schedule of a training step.
            skeleton: The run's model without weights; needed for the user's own Layers and Muon only, and built if
                None.
        """
        return cls(run, world_of(run), counts_of(run, schedule, skeleton), schedule)


def counts_of(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> ParameterCounts:
    """Count the parameters of a run, by where they are. The arguments are those of ``SizedRun.of``."""
    world, model, mesh = world_of(run), run.model, run.mesh
    stages = _stages(run, schedule, skeleton)
    weights = held_tensors(stages, schedule)
    counts = ParameterCounts(
        held=[*map(held_count, weights)],
        units=[Units.of(stage, tile_patterns(model, run.tile), experts_stay=world.experts_stay) for stage in stages],
        matrices=_matrices(run, weights),
        experts=[held_count(one for one in held if one.is_expert) for held in weights],
        expert_matrices=_matrices(run, [[one for one in held if one.is_expert] for held in weights]),
        largest_matrix=[max((one.whole for one in held if _is_of_muon(run, one)), default=0) for held in weights],
    )
    if mesh.expert_actors:
        with_some = replace(run, mesh=Mesh(pp=mesh.pp, dp=mesh.expert_actors, ep=mesh.expert_actors))
        every = held_tensors(_stages(with_some, schedule, skeleton), schedule)
        own = [[one for one in held if one.is_expert] for held in every]
        counts = replace(counts, apart=ParameterCounts([*map(held_count, own)], (), _matrices(run, own)))
    if world.sharded and not mesh.is_uneven:
        tensors = (weight for stage in stages for unit in stage for layer in unit for weight in layer)
        counts = replace(counts, shares=largest_parts(tensors, weights, world, partial(_is_of_muon, run)))
    if not isinstance(model, Layers) and model.lora is not None:
        whole = _stages(replace(run, model=replace(model, lora=None)), schedule, skeleton)
        return replace(counts, frozen=[*map(held_count, held_tensors(whole, schedule))])
    return counts


def _stages(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> Sequence[Stage]:
    """Return the tensors of an actor of each stage."""
    if isinstance(run.model, Layers):
        return user_tensors(run, schedule.num_stages, skeleton or Skeleton(run.model, run.seed))
    placement, mesh = schedule.placement, run.mesh
    if mesh.rank_tp:
        each = {tp: _stages(replace(run, mesh=Mesh(pp=mesh.pp, tp=tp)), schedule, skeleton) for tp in {*mesh.rank_tp}}
        return [each[mesh.tp_of(rank)][stage] for stage, rank in enumerate(placement)]
    ties = placement[0] == placement[-1]
    return tensors_by_stage(run.model, run.split, schedule.num_stages, mesh, run.zero_units, ties=ties)


def _matrices(run: Run, weights: Sequence[Sequence[Weight]]) -> list[int]:
    """Count the parameters of each pipeline rank that Muon updates; [] if the optimizer is another one."""
    if not isinstance(run.optim, Muon):
        return []
    each = [[one for weight in held for one in weight.each()] for held in weights]
    return [held_count(one for one in held if _is_of_muon(run, one)) for held in each]


def _is_of_muon(run: Run, weight: Weight) -> bool:
    return isinstance(run.optim, Muon) and is_matrix(run.optim, weight.name, weight.dims)
