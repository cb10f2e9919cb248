"""The check: every rule that a schedule must keep before it may run, and where a schedule breaks one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from raypar.schedules.action import RECVS, SENDS, Action
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.checking.replica_rules import replica_faults
from raypar.schedules.checking.rows import RowCheck
from raypar.schedules.checking.validation_rules import validation_faults
from raypar.schedules.checking.version_rules import version_rule_faults
from raypar.schedules.known_rules import KnownEdges
from raypar.schedules.rules import gathers, partner
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.sweep import Sweep, Wait


def check(
    schedule: Schedule,
    *,
    send_capacity: int | None = None,
    max_in_flight: int | None = None,
    max_versions: int | None = None,
) -> None:
    """Check that a schedule, lowered or not, computes the whole step and never deadlocks.

    The rules:

    - complete: Each stage runs each microbatch once: one F, and one B or one I and one W. An evaluation has only the F.
    - placement: Every action is on the rank that holds its stage, in the row of the replica whose turn it is.
    - replicas: The replicas of a rank have equal shares of a step, and reduce and update in one order.
    - order: Every action comes after the actions that it needs.
    - pairing: In a lowered schedule each value that crosses ranks has one SEND and one RECV, and there are no others.
    - edge order: In a lowered schedule a rank receives from another rank in the order in which that rank sends (NCCL
      has no tags).
    - reduce: Every stage has a REDUCE_GRAD or none has. Each one comes after a weight gradient that the one before did
      not reduce, and the last one of a stage after its last weight gradient; so does one before each STEP of a stage.
    - weights: If the schedule gathers weights, those of a stage are whole for each of its F, B and I. RESHARD comes
      only where they are whole, and at the STEP and at the end they are not. UNSHARD of what is whole does nothing.
    - step: In a lowered schedule each row has one STEP, after all weight gradients of the row and their REDUCE_GRAD. An
      evaluation has none.
    - versions: Asynchronous steps are equally long. A stage has every STEP once, between the weight gradients of its
      step and of the next, uses only versions that were made, keeps at most ``max_versions``. Others have none.
    - validate: If updates are validated, then each one, once, and before the stage's next backward. In between are only
      forwards, whose messages are received in between too, so that they can be performed again.
    - in flight: No rank holds more than ``max_in_flight`` activations.
    - deadlock: The ranks never wait for one another in a circle.

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
    if faults := [*_misplaced(schedule)]:  # of a stage that is nowhere no other rule can be asked
        raise CheckError.of(schedule, faults)
    faults, reduced, sharded = [*replica_faults(schedule)], list[set[int]](), gathers(schedule)
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
    """Yield a fault for each stage without a REDUCE_GRAD, if others have one, by what each row reduces."""
    for stage, home in enumerate(schedule.placement if any(reduced) else ()):
        for row in schedule.rows_of(home):
            if stage not in reduced[row]:
                yield Fault(row, None, "reduce", f"stage {stage} has no REDUCE_GRAD, other stages have")


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    """Yield a fault for each stage that is placed on a rank that does not exist, and each skip of no stage."""
    last = schedule.num_pipeline_ranks - 1
    for source, target in schedule.skips:
        if not 0 <= source < target < schedule.num_stages:
            sentence = f"a skip goes from stage {source} to stage {target}, and the schedule has {schedule.num_stages}"
            yield Fault(0, None, "placement", f"{sentence} stages: name a later one, counted from 0")
    for stage, home in enumerate(schedule.placement):
        if not 0 <= home <= last:
            sentence = f"stage {stage} is placed on rank {home}, and the schedule has ranks 0 to {last} only"
            yield Fault(min(max(home, 0), last), None, "placement", sentence)


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
