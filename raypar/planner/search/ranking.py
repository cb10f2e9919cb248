"""Layouts ranked by the time of a step under the memory bound, and why each choice was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.recompute import Word
from raypar.actors.specs.run import Run
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.search.fit import Need, need_of
from raypar.planner.search.space import Space, context_ranks, meshes, runs_on, sparing
from raypar.planner.timing.messages import LADDER, RACKS, RAYPAR, Order, Software
from raypar.planner.timing.stages import stage_layers
from raypar.planner.timing.step import PredictedStep, StepModel, most_simulated, predicted, simulated

ROOM = 0.94  # of a device's memory: the rest is lost between blocks of the allocator, and to the driver
ALIKE = 0.005  # of a step: layouts that differ by less take as long, as nothing is predicted better than that
_SIMULATED = 4  # layouts at the head of the ranking that are simulated at least
_MOST_HEAD = 12  # and at the most, while others may be faster
_MOST_SIMULATED = 24_000  # actions of a simulated step
_MOST_TRIED = 2_000  # smaller clusters, where no layout divides one
_PRICED = 3  # candidates of a mesh whose steps are predicted from a calibration

#: Returns the seconds of a step of a run; None if nothing is known of it.
Price = Callable[[Run], float | None]

MICRO_BATCH = "micro batch"  # what a plan calls the samples of a microbatch


@dataclass(frozen=True)
class Candidate:
    """A layout with its price.

    Attributes:
        run: The run.
        step: Its step in closed form.
        need: The memory of its fullest actor.
        order: In what order ranks fill the cluster.
        simulated: Seconds of its step by simulation; None if it was not simulated.
        calibrated: Whether these are from a calibration.
    """

    run: Run
    step: PredictedStep
    need: Need
    order: Order = LADDER
    simulated: float | None = None
    calibrated: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step: by simulation, if there was one."""
        return self.step.seconds if self.simulated is None else self.simulated

    @property
    def choices(self) -> Mapping[str, object]:
        """What was chosen, by name."""
        run, mesh = self.run, self.run.mesh
        again: object = run.recompute
        if not isinstance(run.recompute, str):
            full = run.recompute.count("full")
            again = "full" if full == len(run.recompute) else f"full of {full}"
        return {
            "dp": mesh.dp,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "cp": mesh.cp,
            "ep": mesh.ep,
            "schedule": run.schedule if run.chunks is None else f"{run.schedule} x {run.chunks}",
            MICRO_BATCH: run.micro_batch_size,
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
        near: The best one with other levels of ZeRO and other recomputation, if that fits.
        least: The candidate that needs least memory, whether it fits or not; None if no layout divides the model and
            the batch.
        room: Bytes that an actor may take.
        looked: Number of layouts that were looked at.
    """

    best: tuple[Candidate, ...]
    all: tuple[Candidate, ...]
    near: tuple[Candidate, ...]
    least: Candidate | None
    room: float
    looked: int


def ranked(
    run: Run,
    model: GPT | Llama,
    cluster: Cluster,
    space: Space,
    software: Software = RAYPAR,
    price: Price | None = None,
) -> Ranking:
    """Search the layouts of a run on all devices of a cluster.

    Args:
        run: The run, whose mesh, schedule, microbatches, ZeRO level and recomputation are searched.
        model: Its model.
        cluster: The cluster.
        space: What to choose from.
        software: What the program does with its messages.
        price: Predicts a step on the devices themselves, which were calibrated; None: data sheets predict all.
    """
    search = _Search(model, cluster, space, software)
    for mesh in meshes(run, model, cluster.size, cluster.each_node, space):
        for plain in runs_on(run, model, mesh, space):
            search.look_at(plain)
    fits = search.fits
    if cluster.num_racks > 1:
        fits = [*map(search.on_racks, fits)]
    fits.sort(key=lambda one: one.seconds)
    known = [] if price is None else _priced(fits, price)
    best = tuple(known) or search.best(fits)
    near = [*search.near(best[0])] if best else []
    known = [one for one in near if one.simulated is not None and one.seconds < (1 - ALIKE) * best[0].seconds]
    if known:  # faster with more sparing, as ZeRO 3 is where its gathers hide better than an update's
        fastest = min(known, key=lambda one: one.seconds)
        best, near = (fastest, *best[1:]), [one for one in (best[0], *near) if one is not fastest]
    return Ranking(best, tuple(fits), tuple(near), search.least, search.room, search.looked)


def _priced(fits: Sequence[Candidate], price: Price) -> list[Candidate]:
    """Return the best candidate of each mesh by the prices of some of each; none if one has no price.

    Args:
        fits: All candidates, the fastest first.
        price: Predicts the step of a run.
    """
    families = dict[tuple[object, ...], list[Candidate]]()
    for one in fits:
        families.setdefault(one.family, []).append(one)
    best = list[Candidate]()
    for family in families.values():
        seconds = [(price(one.run), one) for one in family[:_PRICED]]
        known = [replace(one, simulated=each, calibrated=True) for each, one in seconds if each is not None]
        if not known:
            return []
        best.append(min(known, key=lambda one: one.seconds))
    return sorted(best, key=lambda one: one.seconds)


@dataclass
class _Search:
    """The layouts that fit, of those that were looked at.

    Attributes:
        model: The model.
        cluster: The cluster.
        space: What to choose from.
        software: What the program does with its messages.
        fits: The candidates that fit.
        least: The candidate that needs least memory.
        looked: Number of layouts that were looked at.
    """

    model: GPT | Llama
    cluster: Cluster
    space: Space
    software: Software = RAYPAR
    fits: list[Candidate] = field(default_factory=list)
    least: Candidate | None = None
    looked: int = 0

    @property
    def room(self) -> float:
        """Bytes that an actor may take."""
        return ROOM * self.cluster.device.memory

    def look_at(self, plain: Run) -> None:
        """Add a run with the ways of sparing memory that fit, each faster than those that spare less."""
        ways = [*sparing(plain, self.model, self.space)]
        if not self._fits(ways[-1]):
            return
        fastest = float("inf")
        for spared in ways:
            paper = self.paper(spared)
            self.looked += 1
            need = need_of(paper)
            if need.bytes > self.room:
                continue
            found = Candidate(spared, predicted(paper), need)
            if found.seconds < fastest:
                self.fits.append(found)
                fastest = found.seconds
            if spared is ways[0]:  # what spares more takes longer
                return

    def near(self, one: Candidate) -> Iterator[Candidate]:
        """Yield a candidate with every other way of sparing memory that fits."""
        for spared in sparing(one.run, self.model, self.space):
            paper = self.paper(spared, one.order)
            if spared != one.run and (need := need_of(paper)).bytes <= self.room:
                seconds = None if one.simulated is None or one.calibrated else simulated(paper)
                yield Candidate(spared, predicted(paper), need, one.order, seconds)

    def _fits(self, run: Run) -> bool:
        """Return whether a run fits; remember it if none needed less."""
        self.looked += 1
        paper = self.paper(run)
        need = need_of(paper)
        if self.least is None or need.bytes < self.least.need.bytes:
            self.least = Candidate(run, predicted(paper), need)
        return need.bytes <= self.room

    def paper(self, run: Run, order: Order = LADDER) -> StepModel:
        """Return a run on the cluster on paper."""
        return StepModel(run, self.model, self.cluster, order, self.software)

    def on_racks(self, one: Candidate) -> Candidate:
        """Return a candidate in the faster of the two orders in which ranks fill racks."""
        other = predicted(self.paper(one.run, RACKS))
        return replace(one, step=other, order=RACKS) if other.seconds < one.step.seconds else one

    def best(self, fits: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return the best candidate of each mesh, the fastest first; those at the head are simulated.

        Args:
            fits: All candidates, the fastest first.
        """
        families = dict[tuple[object, ...], Candidate]()
        for one in fits:
            families.setdefault(one.family, one)
        best = [*families.values()]
        if "none" in self.space.recompute:
            best = [*map(self._keeping_more, best)]
        best.sort(key=lambda one: one.seconds)
        known = list[Candidate]()
        for one in best[:_MOST_HEAD]:
            if len(known) >= _SIMULATED and one.seconds >= min(each.seconds for each in known):
                break  # in closed form it is no faster than the fastest one of those that were simulated
            if most_simulated(one.run) > _MOST_SIMULATED:
                break
            known.append(replace(one, simulated=simulated(self.paper(one.run, one.order))))
        if len(known) < min(_SIMULATED, len(best)):
            return tuple(best)  # simulated ones are compared with simulated ones
        return tuple(sorted((*known, *best[len(known) :]), key=lambda one: one.seconds))

    def _keeping_more(self, one: Candidate) -> Candidate:
        """Return a candidate that recomputes all layers with fewer of them recomputed: as few as fit.

        The first layers of every stage are recomputed, as many in each.
        """
        if one.run.recompute != ("full",) * self.model.layers:
            return one
        stages = stage_layers(self.model, one.run.split, one.run.mesh.pp * (one.run.chunks or 1))
        few, many = 0, max(map(len, stages))  # all of ``many`` fit
        best = one
        while few < many:
            middle = (few + many) // 2
            words: tuple[Word, ...] = tuple(
                "full" if at < middle else "none" for each in stages for at in range(len(each))
            )
            run = replace(one.run, recompute=words)
            paper = self.paper(run, one.order)
            need = need_of(paper)
            if need.bytes <= self.room:
                best, many = replace(one, run=run, step=predicted(paper), need=need), middle
            else:
                few = middle + 1
        return best


def smallest(
    run: Run, model: GPT | Llama, cluster: Cluster, space: Space, most: int = 1 << 16, *, fills: bool = False
) -> Cluster | None:
    """Return the smallest cluster of such nodes on which some layout fits; None if none does with so many devices.

    Args:
        run: The run.
        model: Its model.
        cluster: A cluster on which nothing fits.
        space: What to choose from.
        most: The most devices.
        fills: Whether a single node may have as many devices as usual before there is a second one.
    """
    for larger in _larger(cluster, most, fills=fills):
        if any(_fits(run, model, larger, space)):
            return larger
    return None


def largest_divided(run: Run, model: GPT | Llama, cluster: Cluster, space: Space) -> Cluster | None:
    """Return the largest smaller cluster of such nodes that some layout divides, whether it fits or not.

    Args:
        run: The run.
        model: Its model.
        cluster: A cluster that no layout divides.
        space: What to choose from.
    """
    parts = min(model.heads, cluster.each_node) * max(context_ranks(model, 32))  # of a layer, at the most
    start = min(cluster.nodes - 1, space.batch * model.layers * parts // cluster.each_node)
    for nodes in range(start, max(0, start - _MOST_TRIED), -1):
        fewer = replace(cluster, nodes=nodes)
        if _is_divided(run, model, fewer, space):
            return fewer
    return None


def _is_divided(run: Run, model: GPT | Llama, cluster: Cluster, space: Space) -> bool:
    """Return whether some layout divides a cluster."""
    each = meshes(run, model, cluster.size, cluster.each_node, space)
    return any(True for mesh in each for _ in runs_on(run, model, mesh, space))


def _larger(cluster: Cluster, most: int, *, fills: bool) -> Iterator[Cluster]:
    """Yield larger clusters: with more devices on the only node, then each next number of nodes, then every eighth part
    of a power of two."""
    each, usual = cluster.each_node, cluster.device.each_node
    if fills and cluster.nodes == 1 and each < usual:
        shared = cluster.adapters != each
        for more in range(each + 1, usual + 1):
            yield replace(cluster, each_node=more, adapters=cluster.adapters if shared else more)
        cluster = replace(cluster, each_node=usual, adapters=cluster.adapters if shared else usual)
    nodes = cluster.nodes + 1
    while nodes * cluster.each_node <= most:
        yield replace(cluster, nodes=nodes)
        nodes += max(1, 1 << max(0, nodes.bit_length() - 4))


def _fits(run: Run, model: GPT | Llama, cluster: Cluster, space: Space) -> Iterator[bool]:
    """Yield whether layouts fit, of the smallest microbatches."""
    room = ROOM * cluster.device.memory
    for mesh in meshes(run, model, cluster.size, cluster.each_node, space):
        for plain in runs_on(run, model, mesh, replace(space, samples=1, schedules=("1f1b",))):
            smallest = [*sparing(plain, model, space)][-1]
            yield need_of(StepModel(smallest, model, cluster)).bytes <= room
