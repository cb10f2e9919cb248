"""Layouts ranked by the time of a step under the memory bound, and why each choice was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.search.fit import Need, need_of
from raypar.planner.search.space import Space, meshes, runs_on, sparing
from raypar.planner.timing.messages import LADDER, RACKS, RAYPAR, Order, Software
from raypar.planner.timing.simulated import simulated
from raypar.planner.timing.step import Paper, Step, predicted

ROOM = 0.94  # of a device's memory: the rest is lost between blocks of the allocator, and to the driver
_SIMULATED = 4  # layouts at the head of the ranking that are simulated
_MOST_SIMULATED = 40_000  # actions of a simulated step
_ROUNDS = 4


@dataclass(frozen=True)
class Candidate:
    """A layout with its price.

    Attributes:
        run: The run.
        step: Its step in closed form.
        need: The memory of its fullest actor.
        order: In what order ranks fill the cluster.
        simulated: Seconds of its step by simulation; None if it was not simulated.
    """

    run: Run
    step: Step
    need: Need
    order: Order = LADDER
    simulated: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step: by simulation, if there was one."""
        return self.step.seconds if self.simulated is None else self.simulated

    @property
    def choices(self) -> Mapping[str, object]:
        """What was chosen, by name."""
        run, mesh = self.run, self.run.mesh
        again = run.recompute if isinstance(run.recompute, str) else run.recompute[0]
        return {
            "dp": mesh.dp,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "cp": mesh.cp,
            "ep": mesh.ep,
            "schedule": run.schedule if run.chunks is None else f"{run.schedule} x {run.chunks}",
            "samples": run.micro_batch_size,
            "zero": run.zero,
            "recompute": again,
        }

    @property
    def family(self) -> tuple[object, ...]:
        """The axes: candidates that differ in other things only are one entry of the ranking."""
        mesh = self.run.mesh
        return mesh.tp, mesh.pp, mesh.cp, mesh.ep


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        best: The best candidate of each mesh, the fastest first.
        all: All candidates that fit.
        least: The candidate that needs least memory, whether it fits or not; None if no layout divides the model and
            the batch.
        room: Bytes that an actor may take.
        looked: Number of layouts that were looked at.
    """

    best: tuple[Candidate, ...]
    all: tuple[Candidate, ...]
    least: Candidate | None
    room: float
    looked: int


def ranked(run: Run, model: GPT | Llama, cluster: Cluster, space: Space, software: Software = RAYPAR) -> Ranking:
    """Search the layouts of a run on all devices of a cluster.

    Args:
        run: The run, whose mesh, schedule, microbatches, ZeRO level and recomputation are searched.
        model: Its model.
        cluster: The cluster.
        space: What to choose from.
        software: What the program does with its messages.
    """
    room, looked = ROOM * cluster.device.memory, 0
    fits, least = list[Candidate](), None
    for mesh in meshes(run, model, cluster.size, cluster.each_node, space):
        for plain in runs_on(run, model, mesh, space):
            fastest = float("inf")
            for spared in sparing(plain, model, space):
                looked += 1
                paper = Paper(spared, model, cluster, LADDER, software)
                need = need_of(paper)
                if least is None or need.bytes < least.need.bytes:
                    least = Candidate(spared, predicted(paper), need)
                if need.bytes > room:
                    continue
                found = Candidate(spared, predicted(paper), need)
                if found.seconds < fastest:
                    fits.append(found)
                    fastest = found.seconds
                if _is_plainest(spared, space):  # what spares more takes longer
                    break
    if cluster.num_racks > 1:
        fits = [_placed(one, model, cluster, software) for one in fits]
    fits.sort(key=lambda one: one.seconds)
    return Ranking(_best(fits, model, cluster, software), tuple(fits), least, room, looked)


def _is_plainest(run: Run, space: Space) -> bool:
    """Return whether a run recomputes as little as it may, and shares out no more than the optimizer."""
    word = run.recompute if isinstance(run.recompute, str) else run.recompute[0]
    return word == space.recompute[0] and run.zero == min(1, max(space.zero))


def _placed(one: Candidate, model: GPT | Llama, cluster: Cluster, software: Software) -> Candidate:
    """Return a candidate in the faster of the two orders in which ranks fill racks."""
    other = predicted(Paper(one.run, model, cluster, RACKS, software))
    return replace(one, step=other, order=RACKS) if other.seconds < one.step.seconds else one


def _best(fits: list[Candidate], model: GPT | Llama, cluster: Cluster, software: Software) -> tuple[Candidate, ...]:
    """Return the best candidate of each mesh; those at the head are ranked anew by simulation."""
    families = dict[tuple[object, ...], Candidate]()
    for one in fits:
        families.setdefault(one.family, one)
    best, head = [*families.values()], list[Candidate]()
    for one in best[:_SIMULATED]:
        rounds = min(one.run.microbatches, (_ROUNDS + 1) * one.run.mesh.pp)
        if rounds * one.run.mesh.pp * (one.run.chunks or 1) * 2 <= _MOST_SIMULATED:
            one = replace(one, simulated=simulated(Paper(one.run, model, cluster, one.order, software)))
        head.append(one)
    head.sort(key=lambda one: one.seconds)
    return (*head, *best[_SIMULATED:])


def smallest(run: Run, model: GPT | Llama, cluster: Cluster, space: Space, most: int = 1 << 16) -> Cluster | None:
    """Return the smallest cluster of such nodes on which some layout fits; None if none does with so many devices.

    Args:
        run: The run.
        model: Its model.
        cluster: A cluster on which nothing fits.
        space: What to choose from.
        most: The most devices.
    """
    for nodes in _counts(cluster, most):
        larger = replace(cluster, nodes=nodes)
        if any(_fits(run, model, larger, space)):
            return larger
    return None


def _counts(cluster: Cluster, most: int) -> Iterator[int]:
    """Yield numbers of nodes: each of the next ones, then every eighth part of a power of two."""
    nodes = cluster.nodes + 1
    while nodes * cluster.each_node <= most:
        yield nodes
        nodes += max(1, 1 << max(0, nodes.bit_length() - 4))


def _fits(run: Run, model: GPT | Llama, cluster: Cluster, space: Space) -> Iterator[bool]:
    """Yield whether layouts fit, of the smallest microbatches."""
    room = ROOM * cluster.device.memory
    for mesh in meshes(run, model, cluster.size, cluster.each_node, space):
        for plain in runs_on(run, model, mesh, replace(space, samples=1, schedules=("1f1b",))):
            sparest = [*sparing(plain, model, space)][-1]
            yield need_of(Paper(sparest, model, cluster)).bytes <= room
