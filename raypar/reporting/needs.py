"""What a run needs, in rows of a name and a figure: actors, parameters and memory, against what this machine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.actors.mesh.mesh import AXES
from raypar.actors.optim.groups import is_matrix
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.config.run import world_of
from raypar.config.skeleton import Skeleton
from raypar.planner.host import free_memory, starts_own_ray
from raypar.planner.memory import Memory, server_memory, worker_memory
from raypar.planner.parameters import held_parameters, num_parameters, short_count, stage_parameters
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline

Rows = list[tuple[str, str]]

_MOST = 8  # pipeline ranks that have a row of their own


def actors_told(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """Say how many actors a run has, and by which axes: "4 = pp 2 (recipe gpt-small) x tp 2".

    Args:
        run: The run.
        origins: By axis, what set it if that was not the user.
    """
    world, told = world_of(run), []
    for axis in AXES:
        if (ways := world.mesh.ways(axis)) > 1:
            spelled = run.mesh.tp if axis == "tp" else ways
            told.append(f"{axis} {spelled}" + (f" ({origins[axis]})" if origins and axis in origins else ""))
    servers = f" + {len(world.server_ranks)} servers" if world.servers else ""
    return f"{world.size} = {' x '.join(told)}{servers}" if told or servers else str(world.size)


def need_rows(run: Run, schedule: Schedule, skeleton: Skeleton | None, timeline: Timeline) -> Rows:
    """Say what a run needs: parameters, and the memory of its actors against what is free here.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; needed for the user's own Layers and Muon only, and built if None.
        timeline: The predicted training step.
    """
    world = world_of(run)
    held, told = _parameters(run, schedule, skeleton)
    matrices = muon_parameters(run, schedule, skeleton)
    workers = worker_memory(run, world, held, timeline, matrices)
    servers = server_memory(run, world, held, matrices)
    rows = [("parameters", told)]
    most = max(range(len(workers)), key=lambda rank: workers[rank].total)
    for rank in range(len(workers)) if len(workers) <= _MOST else [most]:
        rows.append((f"memory, pp={rank}", _kinds(workers[rank])))
    if servers:
        rows.append(("memory of a server", _kinds(max(servers, key=lambda memory: memory.total))))
    inner = world.mesh.size // world.mesh.pp
    needed = sum(memory.total for memory in workers) * inner + sum(memory.total for memory in servers) * run.servers
    return [*rows, ("memory in all", f"{_size(needed)} {_against(run, needed, [*workers, *servers], world.size)}")]


def _parameters(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> tuple[list[int], str]:
    """Count the parameters that a worker of each pipeline rank holds, and say all counts."""
    if isinstance(run.model, Layers):
        skeleton = skeleton or Skeleton(run.model, run.seed)
        weights = skeleton.weights
        held = [sum(weights[name].numel() for name in names) for names in _held(run, schedule, skeleton)]
        whole, divided = sum(weight.numel() for weight in weights.values()), " before a plan divides them"
        stages = ""
    else:
        held = held_parameters(run.model, run.split, schedule, run.mesh.grid or run.mesh.tensor_ranks)
        whole, divided = num_parameters(run.model), ""
        counts = stage_parameters(run.model, run.split, schedule.num_stages)
        stages = f"; a stage has {_range(counts)}"
    return held, f"{whole:,}{stages}; an actor holds {_range(held)}{divided if run.mesh.tensor_ranks > 1 else ''}"


def muon_parameters(run: Run, schedule: Schedule, skeleton: Skeleton | None) -> list[int]:
    """Count the parameters of each pipeline rank that Muon updates; [] if the optimizer is another one.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; built if None and needed.
    """
    if not isinstance(run.optim, Muon):
        return []
    skeleton, optim = skeleton or Skeleton(run.model, run.seed), run.optim
    weights = skeleton.weights
    sizes = {name: weight.numel() for name, weight in weights.items() if is_matrix(optim, name, weight.dim())}
    parts = 1 if isinstance(run.model, Layers) else run.mesh.tensor_ranks  # of Layers no parameter counts as divided
    return [sum(sizes.get(name, 0) for name in names) // parts for names in _held(run, schedule, skeleton)]


def _held(run: Run, schedule: Schedule, skeleton: Skeleton) -> list[list[str]]:
    """Return the weights of each pipeline rank, a tied one by the name of its home."""
    from raypar.actors.worker.build import sizes_of  # imports torch

    sizes, homes = sizes_of(skeleton.model, run.split, schedule), skeleton.homes
    return [[homes.get(name, name) for name in sizes.get(rank, {})] for rank in range(schedule.num_ranks)]


def _range(counts: Sequence[int]) -> str:
    low, high = short_count(min(counts)), short_count(max(counts))
    return low if low == high else f"{low} to {high}"


def _kinds(memory: Memory) -> str:
    activations = "unknown" if memory.activations is None else _size(memory.activations)
    return (
        f"about {_size(memory.total)}: weights {_size(memory.weights)}, gradients {_size(memory.gradients)}, "
        f"optimizer {_size(memory.optimizer)}, activations {activations}, process {_size(memory.process)}"
    )


def _against(run: Run, needed: int, each: Sequence[Memory], actors: int) -> str:
    """Say what is free here, if the actors would run here and on CPUs."""
    free = free_memory() if starts_own_ray() and run.device != "cuda" else None
    if free is None:
        return "on CPUs and GPUs that are not known before the launch"
    told = f"of {_size(free)} free here, {_size(free // actors)} for each of {actors}"
    largest = max(memory.total for memory in each)
    if needed > free:
        return f"{told}: TOO MUCH: use a smaller model or microbatch, recompute='full', or more machines"
    return told if largest * actors <= free else f"{told}; the largest takes {_size(largest)}"


def _size(count: int) -> str:
    """Format bytes: 80 B, 40 KiB, 12 MiB, 1.5 GiB."""
    if count >= 2**30:
        return f"{count / 2**30:,.1f} GiB"
    factor, unit = (2**20, "MiB") if count >= 2**20 else (2**10, "KiB") if count >= 2**10 else (1, "B")
    return f"{count / factor:,.0f} {unit}"
