"""The check of a schedule before it may run: all rules, and those between rows (replicas, edge order, deadlock)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from math import gcd, lcm
from typing import TypedDict

from raypar.schedules.action import RECVS, SENDS, WHOLE_STAGE, Action, Op
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.checking.rows import RowCheck
from raypar.schedules.checking.version_rules import validation_faults, version_rule_faults
from raypar.schedules.known_rules import KnownEdges
from raypar.schedules.rules import gathers, partner
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.sweep import Sweep, Wait


class CheckBounds(TypedDict, total=False):
    """The bounds of a check, which are described there."""

    send_capacity: int | None
    max_in_flight: int | None
    max_versions: int | None


def check(
    schedule: Schedule,
    *,
    send_capacity: int | None = None,
    max_in_flight: int | None = None,
    max_versions: int | None = None,
) -> None:
    """Check that a schedule, lowered or not, computes the whole step and can't deadlock.

    The rules:

    - complete: Each stage runs each microbatch once: one F, and one B or one I and one W. An evaluation has only the F.
    - placement: Every action is on the rank that holds its stage, in the row of the replica whose turn it is.
    - replicas: The replicas of a rank have equal shares of a step, and reduce and update in one order.
    - order: Every action comes after the actions that it needs.
    - pairing: In a lowered schedule each value that crosses ranks has one SEND and one RECV, and there are no others.
    - edge order: In a lowered schedule a rank receives from another rank in the order in which that rank sends (NCCL
      has no tags).
    - reduce: Every stage has a REDUCE_GRAD or none has. Each one comes after a weight gradient that is not reduced yet,
      and the last one of a stage after its last weight gradient; so does one before each STEP of a stage.
    - weights: If the schedule gathers weights, those of a stage are whole for each of its F, B and I. RESHARD comes
      only where they are whole, and at the STEP and at the end they are not. UNSHARD of a whole stage does nothing.
    - step: In a lowered schedule each row has one STEP, after all weight gradients of the row and their REDUCE_GRAD. An
      evaluation has none.
    - versions: Asynchronous steps are equally long. A stage has every STEP once, between the weight gradients of its
      step and of the next, uses only versions that exist, keeps at most ``max_versions``. Other schedules have none.
    - validate: If updates are validated, each one is, once, before the stage's next backward. Between STEP and VALIDATE
      are only forwards, whose messages are received there too, so that they can be performed again.
    - in flight: No rank holds more than ``max_in_flight`` activations.
    - deadlock: No ranks wait for one another in a circle.

    The rules between rows (edge order, deadlock) are checked only if no row has a fault. Time is linear in the number
    of actions; memory is that of one row and of the values under way.

    Args:
        schedule: The schedule.
        send_capacity: When a SEND blocks. None: never; 0: until its RECV; k: while k values are under way to that rank.
        max_in_flight: The most activations that a rank may hold, or None for no limit.
        max_versions: The most versions of its weights that a stage may keep, or None for no limit.

    Raises:
        CheckError: The schedule breaks a rule; it carries all faults and shows the first ones.
        ValueError: ``send_capacity`` is negative.
    """
    if send_capacity is not None and send_capacity < 0:
        raise ValueError(f"send_capacity={send_capacity}: take 0 or more values, or None for no limit")
    if not schedule.rows:
        raise CheckError(f"schedule {schedule.name!r} has no rows: a pipeline has at least one rank")
    if faults := [*_misplaced(schedule)]:  # the other rules need the placement of every stage
        raise CheckError.of(schedule, faults)
    faults, reduced, sharded = [*_replica_faults(schedule)], list[set[int]](), gathers(schedule)
    for rank in range(schedule.num_ranks):
        row = RowCheck(schedule, rank, max_in_flight, sharded=sharded).run()
        faults += row.faults
        reduced.append(row.reduced)
        faults += version_rule_faults(schedule, rank, max_versions)
    faults += [*validation_faults(schedule), *_unreduced(schedule, reduced)]
    if faults:
        raise CheckError.of(schedule, faults)
    _check_across(schedule, send_capacity)


def _unreduced(schedule: Schedule, reduced: Sequence[set[int]]) -> Iterator[Fault]:
    """Yield a fault for each stage without a REDUCE_GRAD, if others have one. ``reduced``: the stages by row."""
    for stage, rank in enumerate(schedule.placement if any(reduced) else ()):
        for row in schedule.rows_of(rank):
            if stage not in reduced[row]:
                yield Fault(row, None, "reduce", f"stage {stage} has no REDUCE_GRAD, other stages have")


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    """Yield a fault for each stage on a rank that does not exist, and for each skip to or from no stage."""
    last = schedule.num_pipeline_ranks - 1
    for source, target in schedule.skips:
        if not 0 <= source < target < schedule.num_stages:
            sentence = f"a skip goes from stage {source} to stage {target}, and the schedule has {schedule.num_stages}"
            yield Fault(0, None, "placement", f"{sentence} stages: name a later one, counted from 0")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank <= last:
            sentence = f"stage {stage} is placed on rank {rank}, and the schedule has ranks 0 to {last} only"
            yield Fault(min(max(rank, 0), last), None, "placement", sentence)


def _replica_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield the faults of replicas of a pipeline rank: unequal shares, and collectives in different orders.

    Replicas sum gradients together, so that each must have the same reductions and updates in the same order.

    Args:
        schedule: The schedule.
    """
    length = schedule.microbatches_a_step
    for rank, count in enumerate(schedule.replicas):
        first, *others = schedule.rows_of(rank)
        if length % count:
            fewer = gcd(length, count)
            sentence = (
                f"{count} replicas of rank {rank} do not divide the {length} microbatches of a step: take a multiple "
                f"of {lcm(*schedule.replicas)} microbatches, or {fewer} replica{'s' * (fewer > 1)}"
            )
            yield Fault(first, None, "replicas", sentence)
            continue
        wanted = _together(schedule, first)
        for row in others:
            for (_, before), (index, action) in zip(wanted, found := _together(schedule, row), strict=False):
                if before != action:
                    sentence = f"{action}, where {schedule.label(first)} has {before}: replicas meet in one order"
                    yield Fault(row, index, "replicas", sentence)
                    break
            else:
                if len(wanted) != len(found):
                    sentence = f"{len(found)} reductions and updates, {schedule.label(first)} has {len(wanted)}"
                    yield Fault(row, None, "replicas", f"{sentence}: replicas make all of them together")


def _together(schedule: Schedule, row: int) -> list[tuple[int, Action]]:
    """Return the actions of a row that all replicas perform together, each with its position."""
    ops = WHOLE_STAGE | {Op.STEP}
    return [(index, action) for index, action in enumerate(schedule.rows[row]) if action.op in ops]


def _check_across(schedule: Schedule, send_capacity: int | None) -> None:
    """Check the rules between rows: edge order and deadlock."""
    sweep, edge = Sweep(schedule, send_capacity), KnownEdges(schedule)
    faults: list[Fault] = []
    under_way: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, index, action in sweep:
        if action.op in SENDS:
            under_way[edge(action)].append(action)
        elif action.op in RECVS:
            queue, send = under_way[edge(action)], partner(action)
            if queue[0] != send:
                sender, _ = edge(action)
                sentence = f"{action}, but {schedule.label(sender)} sends {queue[0]} before {send}"
                faults.append(Fault(rank, index, "edge order", sentence))
            queue.remove(send)
    circle = _circle(sweep.waits())
    if circle:
        chain = "; ".join(f"{schedule.label(wait.rank)} at {wait.action} waits for {wait.reason}" for wait in circle)
        faults.append(Fault(circle[0].rank, circle[0].index, "deadlock", chain))
    if faults:
        raise CheckError.of(schedule, faults, [(wait.rank, wait.index) for wait in circle])


def _circle(waits: list[Wait]) -> list[Wait]:
    """Find the waits that form a circle: follow each rank's peer until a rank comes up again. Empty without waits."""
    if not waits:
        return []
    by_rank = {wait.rank: wait for wait in waits}
    path: dict[int, Wait] = {}
    wait = waits[0]
    while wait.rank not in path:
        path[wait.rank] = wait
        wait = by_rank[wait.peer]
    ranks = list(path)
    return [path[rank] for rank in ranks[ranks.index(wait.rank) :]]
