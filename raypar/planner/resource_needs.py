"""What a run needs, in rows of a name and a figure: actors, parameters, memory, checkpoints, and what is free here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from raypar.actors.machine.files import expanded
from raypar.actors.machine.this_machine import computes_here, free_disk, free_memory, lacks_device, total_memory
from raypar.actors.mesh.mesh import AXES
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.planner.memory.all_actors import actors_memory
from raypar.planner.memory.worker import ActorMemory, element_bytes, states_of
from raypar.planner.prediction import Prediction, from_flops
from raypar.planner.sizes.parameters import (
    active_parameters,
    adapter_parameters,
    num_parameters,
    stage_parameters,
)
from raypar.planner.sizes.sized_run import ParameterCounts, SizedRun
from raypar.schedules.formatting import short_count, size
from raypar.schedules.schedule import Schedule

Rows = list[tuple[str, str]]


TOO_MUCH = "TOO MUCH"
_OF_ALL_RUNS = frozenset(("weights", "gradients", "optimizer", "activations", "process"))  # kinds of memory
_BEFORE = ("weights", "gradients", "optimizer", "gathered", "versions", "buckets", "activations", "working")
_KINDS = (*_BEFORE, "shared", "process", "snapshots", "copies", "offloaded")
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


def actors_text(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """Say how many actors a run has, and by which axes: "4 = pp 2 (recipe gpt-small) x tp 2".

    Args:
        run: The run.
        origins: By axis, what set it if that was not the user.
    """
    factors, count = actor_factors(run, origins), world_of(run).size
    spares = f", and {run.spares} spare{'s' * (run.spares != 1)}" if run.spares else ""
    return (f"{count} = {factors}" if factors else str(count)) + spares


def actor_factors(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """Say by which axes a run has its actors, as ``actors_text``; "" if it has one."""
    world, axes = world_of(run), []
    for axis in AXES:
        if world.mesh.ways(axis) > 1:
            origin = f" ({origins[axis]})" if origins and axis in origins else ""
            axes.append(f"{axis} {world.mesh.spelled(axis)}{origin}")
    others = f" + {len(world.server_ranks)} servers" if world.servers else ""
    if world.mesh.expert_actors:
        others = f" + {world.mesh.actors - world.mesh.size} for experts"
    elif world.mesh.ep > 1:
        others = f"; experts in {world.mesh.ep} parts"
    return f"{' x '.join(axes) or 1}{others}" if axes or others else ""


def memory_needs(sized: SizedRun, skeleton: Skeleton | None, prediction: Prediction, step: int = 0) -> Rows:
    """Say what a run needs: parameters, and the memory of its actors against what is free here.

    Args:
        sized: The run.
        skeleton: The run's model without weights; needed for the user's own Layers and Muon only, and built if None.
        prediction: A training step.
        step: The steps that the checkpoint has taken from which it goes on; 0 for a new run.
    """
    run, world, counts, schedule = sized
    workers, others = found = actors_memory(sized, prediction.timeline, prediction.process)
    rows = [("parameters", _parameters(run, schedule, skeleton, counts.held))]
    most = max(range(len(workers)), key=lambda rank: workers[rank].peak)
    for rank in range(len(workers)) if len(workers) <= _MOST else [most]:
        rows.append((f"memory, pp={rank}", _kinds(workers[rank])))
    if others:
        kind = "a server" if world.servers else "an expert actor"
        rows.append((f"memory of {kind}", _kinds(max(others, key=lambda memory: memory.total))))
    total = _in_memory(run, lambda memory: memory.total)
    largest, needed = max(map(total, [*workers, *others])), found.in_all(world, total)
    needed += run.spares * workers[0].process
    rows.append(("memory in all", f"about {size(needed)} {_against(run, needed, largest, world.size + run.spares)}"))
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
    room = None if run.offload_folder is None or replaces else _free_disk(run, expanded(run.offload_folder))
    if has is None and room is None:
        return
    sized = SizedRun.of(run, schedule, skeleton)
    world, found = sized.world, actors_memory(sized, from_flops(sized).timeline)
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


def sum_over_actors(run: Run, schedule: Schedule, skeleton: Skeleton | None, of: Callable[[ActorMemory], int]) -> int:
    """Add up a kind of memory over all actors of a run, in bytes. The first arguments are those of ``SizedRun.of``."""
    sized = SizedRun.of(run, schedule, skeleton)
    return actors_memory(sized, from_flops(sized).timeline).in_all(sized.world, of)


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
            frozen = num_parameters(run.model)
            return f"{frozen:,} frozen{stages}; adapters have {whole:,}, and those of an actor {_range(held)}"
    own = f"{_range(held)}{divided if run.mesh.tensor_ranks > 1 else ''}"
    if world_of(run).gathers:
        return f"{whole:,}{stages}; an actor computes with {own}, of which it holds its replica's part"
    return f"{whole:,}{stages}; an actor holds {own}"


def _whole(run: Run, skeleton: Skeleton | None) -> int:
    """Count the parameters of the whole model that a checkpoint has: with adapters these alone."""
    if not isinstance(run.model, Layers):
        return num_parameters(run.model) if run.model.lora is None else adapter_parameters(run.model)
    skeleton = skeleton or Skeleton(run.model, run.seed)
    return sum(weight.numel() for weight in skeleton.weights.values())


def _checkpoints(run: Run, folder: str, one: int, step: int) -> str:
    """Say how many checkpoints of so many bytes a run saves after a step, against what its disk has free."""
    saved = -(-run.steps // run.save_every) - step // run.save_every if run.save_every else 1
    keep = run.keep_last or saved
    kept, there = min(saved, keep), min(saved, keep + 1)  # one is removed when a newer one is whole
    existing = next(path for path in (expanded(folder), *expanded(folder).absolute().parents) if path.exists())
    free = _free_disk(run, existing)
    count = "1" if there == 1 else f"{kept:,} of about {size(one)} each"
    beside = ", and the one that is written" if there > kept else ""
    text = f"about {size(there * one)}: {count}{beside}" + ("" if free is None else f"; the disk has {size(free)} free")
    if free is not None and there * one > free:
        most = free // one - 1
        fix = f"set keep_last to {most} at most" if most > 0 else f"free about {size(min(saved, 2) * one - free)} more"
        return f"{text}: {TOO_MUCH}: {fix}, or give a folder of another disk"
    return text


def _free_disk(run: Run, folder: Path) -> int | None:
    """Return the bytes that are free on a folder's disk; None if unknown, or if the run can only start elsewhere."""
    return None if lacks_device(run.device) else free_disk(folder)


def _range(counts: Sequence[int]) -> str:
    low, high = short_count(min(counts)), short_count(max(counts))
    return low if low == high else f"{low} to {high}"


def _kinds(memory: ActorMemory) -> str:
    return f"about {size(memory.peak)}: {', '.join(f'{kind} {figure}' for kind, figure in kinds_of(memory).items())}"


def kinds_of(memory: ActorMemory) -> dict[str, str]:
    """Return the memory of an actor by kind, in words; kinds that only some runs have are left out if they are 0."""
    held = {kind: getattr(memory, kind) for kind in _KINDS if kind in _OF_ALL_RUNS or getattr(memory, kind)}
    words = {"copies": "copies of snapshots (on several nodes only)"}
    return {words.get(kind, kind): "unknown" if count is None else size(count) for kind, count in held.items()}


def _in_memory(run: Run, of: Callable[[ActorMemory], int]) -> Callable[[ActorMemory], int]:
    """Return a function like ``of`` that also counts what is offloaded to this machine's memory."""
    return of if run.offload_folder is not None else lambda memory: of(memory) + memory.offloaded


def _against(run: Run, needed: int, largest: int, actors: int) -> str:
    """Return the free memory here in words, if the actors would run here and on CPUs."""
    free = free_memory() if computes_here(run.device) else None
    if free is None:
        return "on CPUs and GPUs that are not known before the launch"
    text = f"of {size(free)} free here, {size(free // actors)} for each of {actors}"
    if needed > free:
        return f"{text}: {TOO_MUCH}: use a smaller model or microbatch, recompute='full', or more machines"
    return text if largest * actors <= free else f"{text}; the largest takes {size(largest)}"
