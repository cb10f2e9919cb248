"""How much memory the actors of a run need, by kind and pipeline rank, estimated before it starts.

With W bytes of weights on a pipeline rank, as many of gradients, and S of the optimizer's state, N replicas hold:

======  =======  =========  =========  ========  ===========================================================
level   weights  gradients  optimizer  gathered  buckets
======  =======  =========  =========  ========  ===========================================================
0       W        W          S          0         0
1       W        W          S / N      0         0
2       W        W / N      S / N      0         gradients between their backward and the end of their reduction
3       W / N    W / N      S / N      units     the same
======  =======  =========  =========  ========  ===========================================================

With ``offload`` gradients have buckets at every level. Their sums, masters and the optimizer's state are offloaded, and
with "parameters" also the weights, of which units are gathered at every level.

Where actors divide experts, N is the number of those that hold the same ones for these, and that of all replicas for
other weights.

The replica with most, whose memory is estimated, has what ``largest_parts`` counts: the N-th part and a few blocks,
because replicas cut each tensor. UNSHARD and RESHARD show which units are gathered at a time. The kinds have their
peaks at different times, so the sum of these is more than an actor holds.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.actors.machine.this_machine import device_kind, torch_has_cuda
from raypar.actors.mesh.world import World
from raypar.actors.sharding import NORM_SCRATCH
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.planner.memory.activations import ELEMENT_BYTES, most_kept, uneven_load
from raypar.planner.memory.buckets import BucketBytes
from raypar.planner.memory.snapshots import snapshot_counts
from raypar.planner.sizes.sized_run import ParameterCounts, SizedRun
from raypar.schedules.rules import USES_WEIGHTS, streamed
from raypar.schedules.simulation.memory import peaks
from raypar.schedules.timeline import Timeline
from raypar.schedules.versions import most_versions

# Bytes without a run: of an actor's process, with Python, torch, Ray and kernels (gpt-tiny, 2026-11-25); of a GPU, as
# torch counts, 32 MiB of cuBLAS for each of two threads (an H200, 8 layers of hidden 256 and 1024, 2026-11-26).
_PROCESS_OF: Mapping[DeviceKind, int] = {"cpu": 336 << 20, "cuda": 64 << 20}
# The same for a process on CPUs whose torch is built with CUDA, for its libraries (gpt-tiny, 2.13.0+cu130 on a machine
# without a GPU, 2026-11-27: a peak of 661 MiB, of which 5 are weights, optimizer and activations; 321 with 2.13.0+cpu).
_PROCESS_WITH_CUDA = 656 << 20
# Temporary tensors within an action, as a part of activations (gpt-small and hidden 512, 2026-11-24; as above).
WORKING_OF: Mapping[DeviceKind, float] = {"cpu": 0.4, "cuda": 0.05}
# Bytes of shared memory that a member of a group on one node fills for the others at the most: 16 segments of 1 MiB,
# and 8 of the operation that exceeds them (actors/collective/shm/mailbox.py). What was filled once stays.
_FILLED = 24 << 20


def process_bytes(device: DeviceKind) -> int:
    """Return the bytes that an actor takes without a run: its process on CPUs, what libraries take on a GPU.

    Nodes have the torch that is installed here.

    Args:
        device: The kind of device.
    """
    return _PROCESS_WITH_CUDA if device == "cpu" and torch_has_cuda() else _PROCESS_OF[device]


def process_and_snapshots(run: Run, saved: int, process: int | None) -> dict[str, int]:
    """Return the bytes of an actor's process, and of its snapshots and their copies, by the fields of ``ActorMemory``.

    Args:
        run: The run.
        saved: Bytes of a snapshot.
        process: Bytes of the process without a run, if they were measured.
    """
    (snapshots, copies), usual = snapshot_counts(run), process_bytes(device_kind(run.device))
    return {"process": usual if process is None else process, "snapshots": snapshots * saved, "copies": copies * saved}


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element by what it is.

    Attributes:
        weight: A weight.
        gradient: Its gradient.
        state: A value that the optimizer keeps for it.
        master: Its master, which the optimizer updates; 0 if that is the weight itself.
    """

    weight: int
    gradient: int
    state: int
    master: int


def element_bytes(run: Run) -> ElementBytes:
    """Return the bytes of the elements of a run, which its precision says."""
    precision = run.precision
    master = ELEMENT_BYTES[precision.master]
    gradient = ELEMENT_BYTES[precision.reduce] if precision.is_half else master
    return ElementBytes(ELEMENT_BYTES[precision.layers], gradient, master, master if precision.is_mixed else 0)


@dataclass(frozen=True)
class ActorMemory:
    """Bytes of an actor by kind, each at its most within a step.

    Attributes:
        weights: Its weights; if they are sharded, those of its shards.
        gradients: The gradients that it keeps until the update.
        optimizer: The state of the optimizer for the weights that it updates.
        activations: The most that its forwards keep for their backwards at a time; None if that is unknown.
        gathered: Sharded weights that are whole for a while.
        versions: Older weights that microbatches under way compute with, in an asynchronous schedule.
        buckets: Gradients that another actor gets, or that wait for those of other actors.
        process: What its process takes without a run; on a GPU, what libraries take there.
        working: Temporary tensors within an action.
        twice: Bytes of gradients that are counted in buckets as well.
        shared: Memory of other actors that it reads. It counts in the size of each process; the machine has it once.
        offloaded: What it keeps in host memory or in files. It does not count in the size of its process.
        snapshots: Copies of what it updates, which a run that survives failures goes back to.
        copies: Further snapshots if actors are on several nodes; see ``snapshot_counts``.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    gathered: int = 0
    versions: int = 0
    buckets: int = 0
    process: int = field(kw_only=True)
    working: int = 0
    twice: int = 0
    shared: int = 0
    offloaded: int = 0
    snapshots: int = 0
    copies: int = 0

    @property
    def state(self) -> int:
        """Its bytes during the whole step: weights, gradients and the state of the optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def passing(self) -> int:
        """Its bytes during a part of the step: activations, temporary tensors, shared memory that it reads."""
        return (self.activations or 0) + self.working + self.shared

    @property
    def total(self) -> int:
        """Private bytes of the process, as predicted."""
        passing = self.gathered + self.versions + self.buckets + (self.activations or 0) + self.working
        return self.state + passing + self.process + self.snapshots - self.twice

    @property
    def peak(self) -> int:
        """Those and shared memory: the resident size."""
        return self.total + self.shared


def worker_memory(sized: SizedRun, timeline: Timeline, process: int | None = None) -> list[ActorMemory]:
    """Estimate the memory of a worker of each pipeline rank.

    Args:
        sized: The run.
        timeline: The predicted training step, which says how many activations and weights are held at a time.
        process: Bytes of an actor's process without a run, if they were measured.

    Returns:
        The memory by pipeline rank.
    """
    run, world, counts, _ = sized
    each, device, schedule = element_bytes(run), device_kind(run.device), timeline.schedule
    # Of replicas the first one holds most.
    rows = [schedule.rows_of(pp)[0] for pp in range(schedule.num_pipeline_ranks)]
    activations = [None] * len(schedule.rows) if isinstance(run.model, Layers) else most_kept(run, run.model, timeline)
    uneven = _uneven(run, timeline)
    whole = peaks(timeline, [each.weight * count for count in _gathered(timeline, counts)], [0] * len(counts.units))
    versions = most_versions(schedule)  # of a stage, the only one of its rank if it has more than one
    sizes = {"gradient": each.gradient, "weight": each.weight, "bucket": int(run.bucket_mb * 2**20)}
    buckets_of = [BucketBytes(world, counts.units, schedule.rows[row], **sizes) for row in rows]
    found = []
    for rank, (count, state) in enumerate(zip(counts.held, states_of(run, counts), strict=True)):
        experts = counts.experts[rank] if counts.experts else 0
        in_buckets = buckets_of[rank].has_buckets
        own, own_state = _updated(sized, rank, state)
        apart = own if world.hybrid else 0  # the sums that copies of the shards add up
        summed = own if world.sharded and in_buckets else count + apart
        gradients = each.gradient * summed if world.offload == "none" else 0
        kept = each.weight * (own if world.gathers else count)
        optimizer = 0 if world.servers else each.state * own_state + each.master * own
        gathered = whole[rows[rank]].weights if world.unshards else 0
        buckets = buckets_of[rank].peak() if in_buckets else 0
        waits = buckets >= each.gradient * count > 0 and buckets_of[rank].waits
        saved = 0 if world.servers else -(-saved_bytes(each, own, optimizer) // world.copies)
        read = _read(world, each.weight, count, experts, in_buckets=in_buckets) if world.replicas_at(rank) > 1 else 0
        shared = _filled(world, buckets, gathered) + read
        found.append(
            ActorMemory(
                weights=(0 if world.offload == "parameters" else kept)
                + each.weight * sum(counts.frozen[rank : rank + 1]),
                gradients=gradients,
                optimizer=optimizer if world.offload == "none" else 0,
                activations=activations[rows[rank]],
                gathered=gathered,
                versions=(versions[rank] - 1) * each.weight * count,
                buckets=buckets,
                working=max(
                    _working(device, activations[rows[rank]] or 0, uneven[rows[rank]]),
                    _of_matrices(sized, counts.largest_matrix[rank] if counts.largest_matrix else 0),
                )
                + (0 if device == "cpu" or world.servers else min(NORM_SCRATCH, each.gradient * own)),
                twice=gradients if waits else 0,
                shared=shared if device == "cpu" else 0,
                offloaded=offloaded_bytes(world, each, own, kept, optimizer),
                **process_and_snapshots(run, saved, process),
            )
        )
    return found


def _uneven(run: Run, timeline: Timeline) -> list[int]:
    """Return by row of a schedule the bytes of activations that an uneven load of experts adds."""
    if isinstance(run.model, Layers) or (load := uneven_load(run, run.model)) == 1.0:
        return [0] * len(timeline.schedule.rows)
    return [round((load - 1) * even) for even in most_kept(run, run.model, timeline, apart=True)]


def _working(device: DeviceKind, activations: int, uneven: int) -> int:
    """Return the bytes of temporary tensors within an action.

    Where the load of experts is uneven, sizes differ from one microbatch to the next. The C library keeps freed blocks,
    but they do not fit: on a CPU the process has the memory of activations once more.

    Args:
        device: The kind of device.
        activations: Bytes of activations at an even load.
        uneven: Bytes that an uneven load adds to them.
    """
    working = round(WORKING_OF[device] * (activations + uneven))
    return working + uneven + (activations + uneven + working if uneven and device == "cpu" else 0)


def _of_matrices(sized: SizedRun, largest: int) -> int:
    """Return the bytes of whole matrices during an update by Muon of tensors that replicas cut.

    An actor has a matrix, its normalized copy, the product that replaces it and two Gram matrices, while parts of the
    next one come and of the last result go: what it sends of the matrices of a round, and what it gets.

    Args:
        sized: The run.
        largest: The elements of its largest matrix.
    """
    optim = sized.run.optim
    return 9 * ELEMENT_BYTES[optim.precision] * largest if sized.world.sharded and isinstance(optim, Muon) else 0


def _updated(sized: SizedRun, rank: int, state: int) -> tuple[int, int]:
    """Return what the worker that updates most of a pipeline rank updates: parameters, and elements of their state.

    Args:
        sized: The run.
        rank: The pipeline rank.
        state: The elements of state of all its parameters.
    """
    run, world, counts, _ = sized
    if counts.shares:
        share = counts.shares[rank]
        return share.count, states_of(run, ParameterCounts([share.count], (), [share.matrices]))[0]
    count, experts = counts.held[rank], counts.experts[rank] if counts.experts else 0
    return _nth_part(world, count, experts), _nth_part(world, state, state * experts // max(count, 1))


def _nth_part(world: World, count: int, experts: int) -> int:
    """Return the part of each actor among which the update is divided, if all have as much.

    Args:
        world: The ranks of the run.
        count: What all have together.
        experts: How much of it is of experts that actors divide.
    """
    return -(-(count - experts) // world.owners) + (-(-experts // world.experts.owners) if world.experts else 0)


def saved_bytes(each: ElementBytes, own: int, optimizer: int) -> int:
    """Return the bytes that an actor saves in a checkpoint or a snapshot.

    Args:
        each: The bytes of elements.
        own: The number of parameters that it updates.
        optimizer: The bytes of masters in another dtype, and of the optimizer's state.
    """
    return optimizer + (0 if each.master else own * each.weight)


def offloaded_bytes(world: World, each: ElementBytes, own: int, weights: int, optimizer: int) -> int:
    """Return the bytes that an actor keeps in host memory or in files.

    Args:
        world: The ranks of the run.
        each: The bytes of elements.
        own: The number of parameters that the worker updates.
        weights: The bytes of the layers' weights that it keeps.
        optimizer: The bytes of masters in another dtype, and of the optimizer's state.
    """
    if world.offload == "none":
        return 0
    sums = own * (each.gradient + (each.state if each.gradient != each.state else 0))
    masters = own * each.weight if world.offload == "optimizer" and not each.master else 0
    return optimizer + sums + masters + (weights if world.offload == "parameters" else 0)


def _filled(world: World, buckets: int, gathered: int) -> int:
    """Return the bytes of shared memory through which a worker's copies go: its own, and those of the other replicas.

    Args:
        world: The ranks of the run.
        buckets: The most bytes of its gradients in buckets.
        gathered: The most bytes of its weights that are whole for a while.
    """
    group = world.owners if world.sharded else world.replicas
    return group * min(_FILLED, buckets + (gathered if world.gathers else 0)) if group > 1 else 0


def _read(world: World, weight: int, count: int, experts: int, *, in_buckets: bool) -> int:
    """Return the bytes of weights and gradients that a worker reads in memory that it shares with other replicas.

    An all_reduce, or the reductions to all replicas and the gathers of new weights, read every replica's part of all
    tensors twice. Buckets and gathered weights are copied into shared memory instead.

    Args:
        world: The ranks of the run.
        weight: The bytes of a weight.
        count: The number of the worker's parameters.
        experts: How many of them are of experts that actors divide.
        in_buckets: Whether gradients are in buckets.
    """
    if world.gathers or world.servers or world.replicas == 1:
        return 0
    group = world.owners if world.sharded else world.replicas
    others = (count - experts) * (group - 1) // group
    others += experts * (world.expert_replicas - 1) // world.expert_replicas if experts else 0
    return (1 if in_buckets else 2) * weight * others


def states_of(run: Run, counts: ParameterCounts) -> list[int]:
    """Return the elements of optimizer state of each pipeline rank of a run.

    For a parameter these are the momentum with SGD, if it has one, and with Muon, and two means with AdamW; and its
    average if the run keeps one.
    """
    average = int(run.ema is not None)
    singles, states = counts.matrices or [0] * len(counts.held), run.optim.states + average
    return [states * count - min(count, single) for count, single in zip(counts.held, singles, strict=True)]


def _gathered(timeline: Timeline, counts: ParameterCounts) -> list[int]:
    """Return by stage the most parameters that are whole at a time in a window of its weights.

    A window for one pass over the layers has a unit and the next one, a window for more has all units.
    """
    alone = streamed(timeline.schedule)
    held = {
        action.stage
        for row in timeline.schedule.rows
        for action in row
        if action.op in USES_WEIGHTS and action not in alone
    }
    return [units.gathered if stage in held else units.two for stage, units in enumerate(counts.units)]
