"""Memory and traffic of a schedule: bytes of whole weights and activations on each rank, and bytes of gathers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from raypar.schedules.action import Action, Op
from raypar.schedules.rules import USES_WEIGHTS, gathers, held_bytes, streamed
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak memory of one rank.

    Attributes:
        bytes: Bytes of whole weights and activations together.
        weights: The peak of whole weights alone, in bytes.
        activations: The peak of activations alone, in bytes.
    """

    bytes: int
    weights: int
    activations: int


def peaks(
    timeline: Timeline,
    weights: Sequence[int],
    activations: Sequence[int],
    *,
    units: int = 1,
    deferred: Sequence[int] | None = None,
    inputs: Sequence[int] | None = None,
) -> tuple[Peak, ...]:
    """Compute the most memory that each rank holds in whole weights and activations.

    A stage's weights take memory from the start of their gather to their RESHARD, or all the time if the schedule
    gathers none. An activation takes it from the start of its F to the end of its B or I, but not while it is in host
    memory, between the end of its OFFLOAD and the start of its RELOAD; an evaluation keeps none after its F. The
    tensors that an I saves take memory from its end to the end of its W. Shards, gradients and the optimizer's state
    are not counted.

    Args:
        timeline: The timeline, simulated or measured.
        weights: By stage: bytes of its whole weights.
        activations: By stage: bytes that a forward of one microbatch saves.
        units: Number of equal units in which a stage is gathered. If an action is alone in the time in which its stage
            is whole, only two units are there at a time: one in use, and the next.
        deferred: By stage: bytes that an I saves for its W; None: as many as an F saves.
        inputs: By stage: bytes of its inputs, which an F saves and an OFFLOAD leaves on the device; None: none.

    Returns:
        The peak of each rank.
    """
    schedule, sharded = timeline.schedule, gathers(timeline.schedule)
    deferred = activations if deferred is None else deferred
    inputs = [0] * schedule.num_stages if inputs is None else inputs
    changes: list[list[tuple[float, int, int]]] = [[] for _ in range(schedule.num_ranks)]
    windows = {stage: iter(found) for stage, found in _window_bytes(schedule, weights, units).items()}
    whole: dict[int, int] = {}  # by stage that is whole: its bytes
    for event in timeline.events:
        stage, op, _, _ = event.action
        if stage is None or (timeline.measured and event.bucket is not None):
            continue  # a unit of weights: the window of its stage counts it
        found = changes[event.rank]
        if op is Op.UNSHARD and stage not in whole:
            whole[stage] = next(windows[stage])
            found.append((event.start, whole[stage], 0))
        elif op is Op.RESHARD and stage in whole:
            found.append((event.end, -whole.pop(stage), 0))
        elif held := held_bytes(op, activations[stage], deferred[stage], inputs[stage]):
            found.append((event.start if held > 0 else event.end, 0, held))
            if schedule.forward_only:
                found.append((event.end, 0, -held))
    peaks = []
    for rank, found in enumerate(changes):
        held = 0 if sharded else sum(weights[stage] for stage in schedule.stages_of(rank))
        peaks.append(_peak(held, sorted(found, key=lambda change: change[0])))
    return tuple(peaks)


def _window_bytes(schedule: Schedule, weights: Sequence[int], units: int) -> dict[int, list[int]]:
    """Return the bytes of each stage in each time in which it is whole."""
    alone, found = streamed(schedule), defaultdict[int, list[int]](list)
    for row in schedule.rows:
        used: dict[int, Action | None] = {}  # by stage that is whole: the last action that used it
        for action in row:
            stage, op, _, _ = action
            if stage is None:
                continue
            if op is Op.UNSHARD and stage not in used:
                found[stage].append(weights[stage])
                used[stage] = None
            elif op in USES_WEIGHTS:
                used[stage] = action
            elif op is Op.RESHARD and used.pop(stage, None) in alone:
                found[stage][-1] = weights[stage] * min(2, units) // units
    return found


def _peak(weights: int, changes: Sequence[tuple[float, int, int]]) -> Peak:
    """Return the peak of changes ``(time, bytes of weights, bytes of activations)``, from ``weights`` bytes on."""
    activations = 0
    most = [weights, weights, 0]
    for _, of_weights, of_activations in changes:
        weights += of_weights
        activations += of_activations
        most = list(map(max, most, (weights + activations, weights, activations)))
    return Peak(*most)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The gathers and reductions of one stage in a step, and their bytes.

    Attributes:
        gathers: Number of gathers of its weights.
        reductions: Number of reductions of its gradients.
        gathered_bytes: Bytes of weights that arrive at each replica.
        reduced_bytes: Bytes of gradients that leave each replica for those that get the sums.
    """

    gathers: int
    reductions: int
    gathered_bytes: int
    reduced_bytes: int


def traffic(schedule: Schedule, weights: Sequence[int], gradients: Sequence[int], shards: int) -> tuple[Traffic, ...]:
    """Count the gathers and reductions between the replicas of each stage in a step.

    Args:
        schedule: The schedule.
        weights: By stage: bytes of its whole weights as they are gathered.
        gradients: By stage: bytes of its weights' gradients as they are reduced.
        shards: Number n of replicas over which weights and gradients are sharded; each has the n-th part already.

    Returns:
        The traffic of each stage. An UNSHARD of a whole stage moves nothing.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.
    """
    gathered, reduced = Counter[int | None](), Counter[int | None]()
    whole: set[int | None] = set()
    for rank in range(schedule.num_pipeline_ranks):
        for stage, op, _, _ in schedule.rows[schedule.rows_of(rank)[0]]:  # its replicas do the same
            if op is Op.UNSHARD and stage not in whole:
                whole.add(stage)
                gathered[stage] += 1
            elif op is Op.RESHARD:
                whole.discard(stage)
            elif op is Op.REDUCE_GRAD:
                reduced[stage] += 1
    return tuple(
        Traffic(
            gathered[stage],
            reduced[stage],
            gathered[stage] * weights[stage] * (shards - 1) // shards,
            reduced[stage] * gradients[stage] * (shards - 1) // shards,
        )
        for stage in range(schedule.num_stages)
    )
