"""The check: everything that must hold before a schedule may run, said with the place where it does not."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from raypar.schedules.action import RECVS, SENDS, Action
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.checking.rows import RowCheck
from raypar.schedules.rules import partner, rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.sweep import Sweep, Wait


def check(schedule: Schedule, *, send_capacity: int | None = None, max_in_flight: int | None = None) -> None:
    """Prove that a schedule, lowered or not, computes the whole step and comes to its end, or raise CheckError.

    complete    each stage runs each microbatch once: one F, and one B or one I and one W unless it is an evaluation
    placement   every action is on the rank that holds its stage
    order       every action stands behind what it needs
    pairing     lowered: each value that crosses ranks has one SEND and one RECV, and there are no others
    edge order  lowered: a rank receives from another in the order in which that one sends (NCCL has no tags)
    reduce      REDUCE_GRAD for every stage once or for none, behind the last weight gradient of the stage
    step        lowered: STEP once a row, behind all weight gradients of the row and their REDUCE_GRAD; none in an
                evaluation
    in flight   no rank holds more than ``max_in_flight`` activations, if that is given
    deadlock    the ranks never wait for one another in a circle

    ``send_capacity`` says what a SEND waits for: None, nothing; 0, its RECV; k, until fewer than k values are under
    way to that rank. All faults of the rows are reported together; the rules between rows (edge order and deadlock)
    are looked at once each row is right in itself. Time is linear in the number of actions, and memory is that of
    one row and of the values under way.
    """
    if send_capacity is not None and send_capacity < 0:
        raise ValueError(f"send_capacity={send_capacity}: take 0 or more values, or None for no limit")
    if not schedule.rows:
        raise CheckError(f"schedule {schedule.name!r} has no rows: a pipeline has at least one rank")
    faults = list(_misplaced(schedule))
    reduced: set[int] = set()
    for rank in range(schedule.num_ranks):
        row = RowCheck(schedule, rank, max_in_flight).run()
        faults += row.faults
        reduced |= row.reduced
    if reduced:
        for stage in sorted(set(range(schedule.num_stages)) - reduced):
            sentence = f"stage {stage} has no REDUCE_GRAD, other stages have"
            faults.append(Fault(schedule.placement[stage], None, "reduce", sentence))
    if faults:
        raise CheckError.of(schedule, faults)
    _check_across(schedule, send_capacity)


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    last = schedule.num_ranks - 1
    for stage, home in enumerate(schedule.placement):
        if not 0 <= home <= last:
            sentence = f"stage {stage} is placed on rank {home}, and the schedule has ranks 0 to {last} only"
            yield Fault(min(max(home, 0), last), None, "placement", sentence)


def _check_across(schedule: Schedule, send_capacity: int | None) -> None:
    sweep = Sweep(schedule, send_capacity)
    faults: list[Fault] = []
    under_way: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, index, action in sweep:
        if action.op in SENDS:
            under_way[rank, rank_of(partner(action), schedule)].append(action)
        elif action.op in RECVS:
            send = partner(action)
            sender = rank_of(send, schedule)
            queue = under_way[sender, rank]
            if queue[0] != send:
                sentence = f"{action}, but rank {sender} sends {queue[0]} before {send}"
                faults.append(Fault(rank, index, "edge order", sentence))
            queue.remove(send)
    circle = _circle(sweep.waits())
    if circle:
        chain = "; ".join(f"rank {wait.rank} at {wait.action} waits for {wait.reason}" for wait in circle)
        faults.append(Fault(circle[0].rank, circle[0].index, "deadlock", chain))
    if faults:
        raise CheckError.of(schedule, faults, [(wait.rank, wait.index) for wait in circle])


def _circle(waits: list[Wait]) -> list[Wait]:
    """Those who wait for one another in a circle: follow who waits for whom until somebody comes up again."""
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
