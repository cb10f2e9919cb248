"""Who updates the parameters of a model: parameter servers, or replicas that divide each or update all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.data_parallel.owners import Owners, share_out
from raypar.actors.models.base import Model
from raypar.actors.models.tied_weights import Ends, Tie, ties_of
from raypar.actors.sharding import first_ranks
from raypar.actors.specs.types import Split
from raypar.actors.tensors import nbytes
from raypar.actors.worker.build.plan import ActorPlan
from raypar.schedules.schedule import Schedule


def owners_of(plan: ActorPlan, model: Model, server: int | None = None) -> Owners:
    """Return who updates the parameters of an actor's pipeline rank: each server some of them, or replicas together.

    Args:
        plan: The actor's plan.
        model: The model.
        server: The index of a parameter server among those of its pipeline rank; None for a worker.
    """
    world, found = plan.world, dict[str, int]()
    num_dense = world.servers or 1
    experts = frozenset(model.experts if world.experts is not None else ())
    for sizes in sizes_of(model, plan.run.split, plan.programs["train"]).values():
        found |= share_out({name: size for name, size in sizes.items() if name not in experts}, num_dense)
        found |= {name: num_dense for name in sizes if name in experts}
    kinds = {num_dense} if world.experts is not None else set[int]()
    return Owners(found, frozenset({server or 0} | kinds), num_dense, num_dense + len(kinds), experts)


def cuts_of(plan: ActorPlan, model: Model, groups: Mapping[str, Group]) -> dict[str, ReplicaCut]:
    """Return how replicas divide the elements of parameters among them, by logical name; {} if they do not.

    Parameters that only this actor holds are missing.

    Args:
        plan: The actor's plan.
        model: The model.
        groups: The actor's groups by key.
    """
    world = plan.world
    if not world.sharded or world.is_expert(plan.rank):
        return {}
    experts = frozenset(model.experts if world.experts is not None else ())
    originals = {copy: original for original, copy in model.ties}
    sizes = {
        f"{layer}.{inner}": parameter.numel()
        for layer, module in zip(model.names, model.skeleton, strict=True)
        for inner, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    found = dict[str, ReplicaCut]()
    for replicas, is_expert in ((world.dense, False), (world.experts, True)):
        if replicas is None or replicas.shard_key not in groups:
            continue
        group, copy = groups[replicas.shard_key], (world.copy_of(plan.rank), world.copies)
        names = [name for name in sizes if (name in experts) == is_expert]
        firsts = first_ranks({name: sizes[name] for name in names if name not in originals}, group.size * world.copies)
        found |= {name: ReplicaCut(firsts[originals.get(name, name)], group.rank, group.size, *copy) for name in names}
    return found


def between_updaters(tie: Tie, plan: ActorPlan, owner_of: Mapping[str, int], groups: Mapping[str, Group]) -> Ends:
    """Return a tie between pipeline ranks as one between the actors that update its ends, in the group of all updaters.

    Replicas that divide the elements of the weight hold the same spans of both ends, so each has a tie of its own.

    Args:
        tie: The tie.
        plan: The actor's plan.
        owner_of: The number of each parameter: see ``Owners``.
        groups: The actor's groups by key.
    """
    world, rank = plan.world, plan.rank
    if world.mesh.is_uneven:  # both ends have the same number of tensor ranks
        originals, copies = (world.mesh.ranks_of(pp) for pp in (tie.original_rank, tie.copy_rank))
        tp = world.mesh.tp_of(tie.original_rank)
        own = world.at(rank)["tp"] % tp
        return Ends(tie.original, tuple(originals[own::tp]), tie.copy, tuple(copies[own::tp]))
    first, second = owner_of[tie.original], owner_of[tie.copy]
    if world.sharded and world.dense.shard_key in groups:
        first = second = groups[world.dense.shard_key].rank
    original = world.owner_rank(tie.original_rank, first, rank)
    return Ends(tie.original, (original,), tie.copy, (world.owner_rank(tie.copy_rank, second, rank),))


def ranks_of_layers(model: Model, split: Split, schedule: Schedule) -> dict[int, int]:
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

    A tied weight with several uses on a rank is listed once. The arguments are those of ``ranks_of_layers``.
    """
    ranks = ranks_of_layers(model, split, schedule)
    _, same = ties_of(model, ranks)
    sizes: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for index, (layer, module) in enumerate(zip(model.names, model.skeleton, strict=True)):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            if parameter.requires_grad and name not in same:
                sizes[ranks[index]][name] = nbytes(parameter)
    return sizes
