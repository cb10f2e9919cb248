"""A run with its ranks, its parameters and its schedule: what predictions of a step are made from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.tiles.tile_names import tile_patterns
from raypar.actors.optim.groups import is_matrix
from raypar.actors.sharding import block_of, first_ranks, num_blocks
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.planner.sizes.tensors import Stage, Weight, held_count, held_tensors, tensors_by_stage, user_tensors
from raypar.planner.sizes.units import Units
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class PartSize:
    """The parameters that an actor updates.

    Attributes:
        count: How many they are.
        matrices: How many of them Muon updates; 0 if the optimizer is another one.
    """

    count: int
    matrices: int


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


def largest_parts(
    model: Iterable[Weight], held: Sequence[Collection[Weight]], world: World, is_matrix: Callable[[Weight], bool]
) -> list[PartSize]:
    """Return the part of the replica whose optimizer keeps most, of each pipeline rank.

    Replicas cut each tensor, so it is the mean but for a few blocks. Of experts that actors divide, the replica that
    has most of them counts, which may be another actor.

    Args:
        model: The tensors of an actor of each stage, in the order of the stages. One may be there twice.
        held: By pipeline rank, the tensors of an actor before they are shared out.
        world: The ranks of the run.
        is_matrix: Whether Muon updates a tensor.
    """
    found, every = [PartSize(0, 0)] * len(held), [one for weight in model for one in weight.each()]
    for is_expert, ranks in ((False, world.owners), (True, world.experts.owners if world.experts else 1)):
        alike = {one.name: one for one in every if one.is_expert == is_expert}
        firsts = first_ranks({name: one.held for name, one in alike.items()}, ranks)
        for pp, weights in enumerate(held):
            own = [one for weight in weights for one in weight.each() if one.is_expert == is_expert]
            most = max(_parts(own, firsts, ranks, is_matrix), key=lambda part: 2 * part.count - part.matrices)
            found[pp] = PartSize(found[pp].count + most.count, found[pp].matrices + most.matrices)
    return found


def counts_by_rank(elements: Mapping[str, int], firsts: Mapping[str, int], ranks: int) -> list[int]:
    """Count the elements that each rank has of tensors that are cut by an ``ElementCut``.

    It takes time for each tensor and for each rank, but not for each rank of each tensor.

    Args:
        elements: Elements of each tensor.
        firsts: The rank at which each begins.
        ranks: Number of ranks.
    """
    every, changes = 0, [0] * (ranks + 1)  # what all have, and from each rank on, how many more or fewer than before it
    for name, count in elements.items():
        block, first = block_of(count), firsts[name]
        base, longer = divmod(num_blocks(count), ranks)
        every += base * block
        for start, stop in ((first, min(first + longer, ranks)), (0, max(0, first + longer - ranks))):
            changes[start] += block
            changes[stop] -= block
        last = (first + (ranks if base else longer) - 1) % ranks  # its last block may be short
        short = num_blocks(count) * block - count
        changes[last] -= short
        changes[last + 1] += short
    return [every + more for more in accumulate(changes[:ranks])]


def _parts(
    weights: Collection[Weight], firsts: Mapping[str, int], ranks: int, is_matrix: Callable[[Weight], bool]
) -> list[PartSize]:
    """Return the part of each rank."""
    counts = counts_by_rank({one.name: one.held for one in weights}, firsts, ranks)
    matrices = counts_by_rank({one.name: one.held for one in weights if is_matrix(one)}, firsts, ranks)
    return [PartSize(*both) for both in zip(counts, matrices, strict=True)]
