"""What a run needs, in rows of a name and a figure: actors, parameters and memory, against what this machine has.

The size of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from raypar.actors.files import expanded
from raypar.actors.mesh.mesh import AXES, Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.tile_names import tile_patterns
from raypar.actors.optim.groups import is_matrix
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.planner.hardware.this_machine import computes_here, free_disk, free_memory, total_memory
from raypar.planner.memory.memory_of_all import actors_memory
from raypar.planner.memory.worker import ActorMemory, ParameterCounts, element_bytes, states_of
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.adapters import adapter_parameters, adapter_units
from raypar.planner.sizes.owner_shares import OwnerShare, largest_share
from raypar.planner.sizes.parameters import (
    Units,
    active_parameters,
    held_parameters,
    num_parameters,
    stage_parameters,
    unit_parameters,
)
from raypar.planner.sizes.tensors import Weight, held_tensors
from raypar.schedules.formatting import short_count, size
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline

Rows = list[tuple[str, str]]


TOO_MUCH = "TOO MUCH"


_MOST = 8  # pipeline ranks that have a row of their own


def checkpoint_bytes(run: Run, counts: ParameterCounts, parameters: int) -> int:
    """Return the bytes of a checkpoint's tensors: all weights and the optimizer's state of each, in the masters' dtype.

    Args:
        run: The run.
        counts: Its parameters by pipeline rank, which say how much state there is to a weight.
        parameters: The parameters of the whole model.
    """
    each = element_bytes(run).state
    return each * parameters + round(each * parameters * sum(states_of(run, counts)) / max(1, sum(counts.held)))


def actors_told(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """Say how many actors a run has, and by which axes: "4 = pp 2 (recipe gpt-small) x tp 2".

    Args:
        run: The run.
        origins: By axis, what set it if that was not the user.
    """
    world, told = world_of(run), []
    for axis in AXES:
        if world.mesh.ways(axis) > 1:
            told.append(
                f"{axis} {world.mesh.spelled(axis)}" + (f" ({origins[axis]})" if origins and axis in origins else "")
            )
    others = f" + {len(world.server_ranks)} servers" if world.servers else ""
    if world.mesh.expert_actors:
        others = f" + {world.mesh.actors - world.mesh.size} for experts"
    elif world.mesh.ep > 1:
        others = f"; experts in {world.mesh.ep} parts"
    return f"{world.size} = {' x '.join(told) or 1}{others}" if told or others else str(world.size)


def need_rows(
    run: Run,
    schedule: Schedule,
    skeleton: Skeleton | None,
    timeline: Timeline,
    step: int = 0,
    process: int | None = None,
) -> Rows:
    """Say what a run needs: parameters, and the memory of its actors against what is free here.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; needed for the user's own Layers and Muon only, and built if None.
        timeline: The predicted training step.
        step: The steps that the checkpoint has taken from which it goes on; 0 for a new run.
        process: Bytes of an actor's process without a run, if they were measured.
    """
    world, counts = world_of(run), counts_of(run, schedule, skeleton)
    found = actors_memory(run, world, counts, timeline, process)
    workers, others = found
    rows = [("parameters", _parameters(run, schedule, skeleton, counts.held))]
    most = max(range(len(workers)), key=lambda rank: workers[rank].peak)
    for rank in range(len(workers)) if len(workers) <= _MOST else [most]:
        rows.append((f"memory, pp={rank}", _kinds(workers[rank])))
    if others:
        kind = "a server" if world.servers else "an expert actor"
        rows.append((f"memory of {kind}", _kinds(max(others, key=lambda memory: memory.total))))
    total = _in_memory(run, lambda memory: memory.total)
    largest, needed = max(map(total, [*workers, *others])), found.in_all(world, total)
    rows.append(("memory in all", f"about {size(needed)} {_against(run, needed, largest, world.size)}"))
    if run.folder is not None:
        one = checkpoint_bytes(run, counts, _whole(run, skeleton))
        rows.append(("checkpoints", _checkpoints(run, run.folder, one, step)))
    return rows


def memory_faults(
    run: Run, schedule: Schedule, skeleton: Skeleton | None = None, *, replaces: bool = False
) -> Iterator[str]:
    """Yield what a run's weights, gradients and optimizer state alone take too much of: this machine's memory, or disk.

    What is offloaded counts where it is. Nothing is yielded of memory if the actors would run on GPUs, and nothing at
    all if they would run elsewhere.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; needed for the user's own Layers and Muon only, and built if None.
        replaces: Whether another run on this machine ends first. What it has on the disk is not known to be taken.
    """
    has = total_memory() if computes_here(run.device) else None
    room = None if run.offload_folder is None or replaces else free_disk(expanded(run.offload_folder))
    if has is None and room is None:
        return
    world, counts = world_of(run), counts_of(run, schedule, skeleton)
    timeline = from_flops(run, world, counts, schedule).timeline
    found = actors_memory(run, world, counts, timeline)
    offloaded = found.in_all(world, lambda memory: memory.offloaded)
    if room is not None and offloaded > room:
        yield (
            f"offload_folder {run.offload_folder!r}: what all {world.size} actors offload takes {size(offloaded)}, and "
            f"its disk has {size(room)} free: free some space, or give a folder of another disk"
        )
    needed = found.in_all(world, _in_memory(run, lambda memory: memory.state))
    if has is None or needed <= has:
        return
    copies = world.replicas if not world.gathers else world.replicas // world.mesh.shards
    fix = "use a smaller model, or set RAY_ADDRESS to a cluster"
    if run.offload != "none" and run.offload_folder is None:
        fix = f"set offload_folder to a folder of a fast disk, {fix}"
    if copies > 1 and not world.servers:
        fix = f"set zero to 3, or use fewer of the {copies} replicas that each have all weights, {fix}"
    yield (
        f"memory: weights, gradients and optimizer state of all {world.size} actors take {size(needed)}, and this "
        f"machine has {size(has)}: {fix}"
    )


def memory_in_all(run: Run, schedule: Schedule, skeleton: Skeleton | None, of: Callable[[ActorMemory], int]) -> int:
    """Add up a kind of memory over all actors of a run, in bytes. The first arguments are those of ``need_rows``."""
    world, counts = world_of(run), counts_of(run, schedule, skeleton)
    timeline = from_flops(run, world, counts, schedule).timeline
    return actors_memory(run, world, counts, timeline).in_all(world, of)


def counts_of(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> ParameterCounts:
    """Count the parameters of a run, by where they are. The arguments are those of ``need_rows``."""
    mesh = run.mesh
    if mesh.rank_tp:
        each = {tp: _counts(replace(run, mesh=Mesh(pp=mesh.pp, tp=tp)), schedule, skeleton) for tp in {*mesh.rank_tp}}
        held = [each[tp].held[pp] for pp, tp in enumerate(mesh.rank_tp)]
        matrices = [each[tp].matrices[pp] for pp, tp in enumerate(mesh.rank_tp) if each[tp].matrices]
        units = [each[mesh.tp_of(home)].units[stage] for stage, home in enumerate(schedule.placement)]
        return ParameterCounts(held, units, matrices, [0] * mesh.pp)
    counts = _counts(run, schedule, skeleton)
    if not mesh.expert_actors:
        return counts
    # A rank that held one part of the experts would have so many more than one that holds none.
    with_some = replace(run, mesh=Mesh(pp=mesh.pp, dp=mesh.expert_actors, ep=mesh.expert_actors))
    with_none = replace(run, mesh=Mesh(pp=mesh.pp, expert_actors=mesh.expert_actors))
    some, none = _counts(with_some, schedule, skeleton), _counts(with_none, schedule, skeleton)
    held = [one - other for one, other in zip(some.held, none.held, strict=True)]
    matrices = [one - other for one, other in zip(some.matrices, none.matrices, strict=True)]
    return replace(counts, apart=ParameterCounts(held, (), matrices))


def _counts(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> ParameterCounts:
    """Count the parameters of all actors but those of experts."""
    if not isinstance(run.model, Layers) and run.model.lora is not None:
        return _adapter_counts(run, run.model, schedule, skeleton)
    if not isinstance(run.model, Layers):
        held = held_parameters(run.model, run.split, schedule, run.mesh)
        patterns = tile_patterns(run.model, run.tile)
        units = unit_parameters(
            run.model,
            run.split,
            schedule.num_stages,
            run.mesh,
            run.zero_units,
            patterns,
            experts_stay=world_of(run).experts_stay,
        )
    else:
        skeleton = skeleton or Skeleton(run.model, run.seed)
        weights = skeleton.weights
        held = [sum(weights[name].numel() for name in names) for names in _held(run, schedule, skeleton)]
        units = _units(run, schedule.num_stages, skeleton)
    ranks = range(schedule.num_pipeline_ranks)
    experts = [sum(units[stage].experts for stage in schedule.stages_on(rank)) for rank in ranks]
    return ParameterCounts(
        held, units, muon_parameters(run, schedule, skeleton), experts, shares=_shares(run, schedule)
    )


def _shares(run: Run, schedule: Schedule) -> list[OwnerShare]:
    """Return what the replica that owns most has by pipeline rank; [] where that is about the N-th part, or unknown."""
    model, world = run.model, world_of(run)
    if isinstance(model, Layers) or run.tile != 1 or run.mesh.is_uneven or not world.sharded:
        return []
    held, of_muon = held_tensors(model, run.split, schedule, run.mesh), partial(_is_of_muon, run)
    return [largest_share(weights, world, of_muon) for weights in held]


def _is_of_muon(run: Run, weight: Weight) -> bool:
    return isinstance(run.optim, Muon) and is_matrix(run.optim, weight.name, weight.dims)


def _adapter_counts(run: Run, model: GPT | Llama, schedule: Schedule, skeleton: Skeleton | None) -> ParameterCounts:
    """Count the parameters of a run in which adapters learn, and all else is frozen."""
    units = adapter_units(model, run.split, schedule.num_stages, run.mesh.tensor_ranks, run.zero_units)
    ranks = range(schedule.num_pipeline_ranks)
    held = [sum(units[stage].whole for stage in schedule.stages_on(rank)) for rank in ranks]
    frozen = held_parameters(replace(model, lora=None), run.split, schedule, run.mesh)
    return ParameterCounts(held, units, muon_parameters(run, schedule, skeleton), [0] * len(held), frozen=frozen)


def _units(run: Run, num_stages: int, skeleton: Skeleton) -> list[Units]:
    """Count the parameters of each stage's units of the user's own Layers."""
    from raypar.actors.models.tiled import added_tensors, tile_sizes  # imports torch

    model, homes, weights = skeleton.model, skeleton.homes, skeleton.weights
    patterns = tile_patterns(run.model, run.tile)
    found = []
    for layers in model.stages(run.split, num_stages):
        groups = [layers[start : start + run.zero_units] for start in range(0, len(layers), run.zero_units)]
        names = [
            {homes.get(name, name) for index in group for name in _names(skeleton, index, run.mesh)} for group in groups
        ]
        stay = model.experts.keys() if world_of(run).experts_stay else set()
        sizes = [sum(weights[name].numel() for name in one - stay) for one in names]
        cut = [[tile_sizes(model.names[index], model.skeleton[index], patterns) for index in one] for one in groups]
        every = set[str]().union(*names)
        shared = sum(sizes) - sum(weights[name].numel() for name in every - stay)
        own = every & model.experts.keys() if run.mesh.divides_experts else set()
        experts = (sum(weights[name].numel() for name in own), len(own))
        rests = [size - sum(map(sum, tiles)) for size, tiles in zip(sizes, cut, strict=True)]
        tiles = [one for group in cut for layer in group for one in layer]
        whole = [weights[name].numel() for name in every] if not tiles else []
        of_stage = [(model.names[index], model.skeleton[index]) for index in layers]
        tensors = len(every) + sum(added_tensors(name, one, patterns) for name, one in of_stage)
        groups_of = list(zip(rests, cut, strict=True))
        found.append(Units.of(groups_of, [*whole, *tiles], tensors, shared, experts, experts[0] if stay else 0))
    return found


def _names(skeleton: Skeleton, index: int, mesh: Mesh) -> list[str]:
    """Return the logical names of a layer's trainable parameters on the first rank of a mesh."""
    layer, module = skeleton.model.names[index], skeleton.model.skeleton[index]
    names = [f"{layer}.{inner}" for inner, parameter in module.named_parameters() if parameter.requires_grad]
    return [name for name in names if _is_first(skeleton, name, mesh)]


def _is_first(skeleton: Skeleton, name: str, mesh: Mesh) -> bool:
    """Return whether a weight is on the first rank of a mesh, which has the first part of the experts, if any."""
    expert = skeleton.model.experts.get(name)
    return expert is None or (not mesh.expert_actors and expert.part(mesh.ep) == 0)


def _parameters(run: Run, schedule: Schedule, skeleton: Skeleton | None, held: Sequence[int]) -> str:
    """Say how many parameters the model, its stages and a worker of each pipeline rank have."""
    whole = _whole(run, skeleton)
    if isinstance(run.model, Layers):
        stages, divided = "", " before a plan divides them"
    else:
        divided = ""
        counts = stage_parameters(run.model, run.split, schedule.num_stages)
        active = active_parameters(run.model)
        used = f", of which a token uses {short_count(active)}" if active < whole else ""
        tied = " with tied weights at their home alone" if run.model.tied and schedule.num_stages > 1 else ""
        stages = f"{used}; a stage has {_range(counts)}{tied}"
        if run.model.lora is not None:
            learned = adapter_parameters(run.model, 1)[0] * run.model.layers
            frozen = num_parameters(replace(run.model, lora=None))
            return f"{frozen:,} frozen{stages}; adapters have {learned:,}, and those of an actor {_range(held)}"
    return f"{whole:,}{stages}; an actor holds {_range(held)}{divided if run.mesh.tensor_ranks > 1 else ''}"


def _whole(run: Run, skeleton: Skeleton | None) -> int:
    """Count the parameters of the whole model that a checkpoint has: with adapters these alone."""
    if not isinstance(run.model, Layers):
        has_adapters = run.model.lora is not None
        return run.model.layers * adapter_parameters(run.model, 1)[0] if has_adapters else num_parameters(run.model)
    skeleton = skeleton or Skeleton(run.model, run.seed)
    return sum(weight.numel() for weight in skeleton.weights.values())


def _checkpoints(run: Run, folder: str, one: int, step: int) -> str:
    """Say how many checkpoints of so many bytes a run saves after a step, against what its disk has free."""
    saved = -(-run.steps // run.save_every) - step // run.save_every if run.save_every else 1
    keep = run.keep_last or saved
    kept, there = min(saved, keep), min(saved, keep + 1)  # one is removed when a newer one is whole
    place = next(path for path in (expanded(folder), *expanded(folder).absolute().parents) if path.exists())
    free = free_disk(place)
    count = "1" if there == 1 else f"{kept:,} of about {size(one)} each"
    beside = ", and the one that is written" if there > kept else ""
    told = f"about {size(there * one)}: {count}{beside}" + ("" if free is None else f"; the disk has {size(free)} free")
    if free is not None and there * one > free:
        most = free // one - 1
        fix = f"set keep_last to {most} at most" if most > 0 else f"free about {size(min(saved, 2) * one - free)} more"
        return f"{told}: {TOO_MUCH}: {fix}, or give a folder of another disk"
    return told


def muon_parameters(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> list[int]:
    """Count the parameters of each pipeline rank that Muon updates; [] if the optimizer is another one.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; built if None and needed.
    """
    if not isinstance(run.optim, Muon):
        return []
    if not isinstance(run.model, Layers) and run.model.lora is None:
        tensors = held_tensors(run.model, run.split, schedule, run.mesh)
        return [sum(one.held for one in held if _is_of_muon(run, one)) for held in tensors]
    skeleton, optim = skeleton or Skeleton(run.model, run.seed), run.optim
    weights = skeleton.weights
    sizes = {name: weight.numel() for name, weight in weights.items() if is_matrix(optim, name, weight.dim())}
    ranks = 1 if isinstance(run.model, Layers) else run.mesh.tensor_ranks  # of Layers no parameter counts as divided
    return [sum(sizes.get(name, 0) // ranks for name in names) for names in _held(run, schedule, skeleton)]


def _held(run: Run, schedule: Schedule, skeleton: Skeleton) -> list[list[str]]:
    """Return the weights of an actor of each pipeline rank, a tied one by the name of its home."""
    from raypar.actors.worker.build.weight_owners import sizes_of  # imports torch

    sizes, homes = sizes_of(skeleton.model, run.split, schedule), skeleton.homes
    return [
        [homes.get(name, name) for name in sizes.get(rank, {}) if _is_first(skeleton, name, run.mesh)]
        for rank in range(schedule.num_pipeline_ranks)
    ]


def _range(counts: Sequence[int]) -> str:
    low, high = short_count(min(counts)), short_count(max(counts))
    return low if low == high else f"{low} to {high}"


def _kinds(memory: ActorMemory) -> str:
    return f"about {size(memory.peak)}: {', '.join(f'{kind} {told}' for kind, told in kinds_of(memory).items())}"


def kinds_of(memory: ActorMemory) -> dict[str, str]:
    """Say the memory of an actor by kind; of what only some runs have, what it has."""
    known = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        **{kind: held for kind in ("gathered", "versions", "buckets") if (held := getattr(memory, kind))},
    }
    told = {kind: size(held) for kind, held in known.items()}
    told["activations"] = "unknown" if memory.activations is None else size(memory.activations)
    others = {"working": memory.working, "shared": memory.shared}
    told |= {kind: size(held) for kind, held in others.items() if held} | {"process": size(memory.process)}
    away = "copies of snapshots, on several nodes"
    others = {"snapshots": memory.snapshots, away: memory.copies, "offloaded": memory.offloaded}
    return told | {kind: size(count) for kind, count in others.items() if count}


def _in_memory(run: Run, of: Callable[[ActorMemory], int]) -> Callable[[ActorMemory], int]:
    """Return a function like ``of`` that also counts what is offloaded to this machine's memory."""
    return of if run.offload_folder is not None else lambda memory: of(memory) + memory.offloaded


def _against(run: Run, needed: int, largest: int, actors: int) -> str:
    """Say what is free here, if the actors would run here and on CPUs."""
    free = free_memory() if computes_here(run.device) else None
    if free is None:
        return "on CPUs and GPUs that are not known before the launch"
    told = f"of {size(free)} free here, {size(free // actors)} for each of {actors}"
    if needed > free:
        return f"{told}: {TOO_MUCH}: use a smaller model or microbatch, recompute='full', or more machines"
    return told if largest * actors <= free else f"{told}; the largest takes {size(largest)}"
