"""Lowering: from rows of compute actions to rows that actors can run, in small passes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import Literal

from raypar.schedules.action import COMPUTE, STEP, Action, Op
from raypar.schedules.known_rules import KnownEdges, KnownRule
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.without_flush import outside_validation
from raypar.schedules.rules import USES_WEIGHTS, awaited, crosses, leaving, partner, send_of
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.sweep import Sweep

Order = Literal["just_in_time", "one_sweep"]
Rows = list[list[Action]]


def lower(
    schedule: Schedule, order: Order = "just_in_time", *, reduce_grad: bool = False, step: bool = True
) -> Schedule:
    """Complete a schedule: SEND and RECV, then REDUCE_GRAD once a step if asked for, then the closing STEP.

    ``order`` selects the positions of the communication; see ``just_in_time`` and ``one_sweep``. Existing actions are
    left as they are: lowering twice changes nothing, and a file of torch with its communication gets its STEP.
    An evaluation gets neither REDUCE_GRAD nor STEP, and an asynchronous schedule has its STEPs already.

    Raises ScheduleError if no action computes a value that is needed.
    """
    passes = {"just_in_time": just_in_time, "one_sweep": one_sweep}
    if order not in passes:
        raise ScheduleError(f"there is no order {order!r}: take 'just_in_time' or 'one_sweep'")
    rows = [list(row) for row in schedule.rows] if schedule.lowered else passes[order](schedule)
    if schedule.validated and not schedule.lowered:
        rows = outside_validation(rows)
    if step and not schedule.forward_only and not schedule.stream:
        for row in rows:
            row += () if STEP in row else (STEP,)
    rows.reverse()  # for millions of actions, each list is freed when its tuple exists
    frozen = tuple(tuple(rows.pop()) for _ in range(len(rows)))
    lowered = replace(schedule, rows=frozen, lowered=True)
    return reduce_gradients(lowered) if reduce_grad else lowered


def just_in_time(schedule: Schedule) -> Rows:
    """SEND right after the compute that makes the value, RECV right before the compute that needs it.

    Nothing is received earlier than needed, with two exceptions. NCCL has no tags, so between two ranks values must
    be received in the order in which they are sent; where they are used in another order, the RECVs of values sent
    before are pulled forward. And a skip is received when its rank first computes a stage after the skip's source, not
    the stage that takes it: else the source would wait for a free send with many microbatches under way.

    Safe if sends do not block. Proof: take any order of all compute actions that the dependencies allow, put each
    SEND after its compute and let each rank receive before the compute that needs it. The value of a RECV was
    computed before, since its consumer is allowed now, and so was its SEND; a RECV that was pulled forward belongs
    to an earlier SEND of the same row, and a stage after a skip's source needs that one too. So no RECV waits for a
    SEND that comes later in that order, and no rank waits for itself around a cycle. With sends that block the SEND
    waits for its RECV too, and the proof breaks: 1F1B then has neighbours that both send. Take ``one_sweep`` there.
    """
    rows: Rows = []
    sent: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    sends_of, edge = KnownRule(_sends, schedule), KnownEdges(schedule)
    for rank, computes in enumerate(schedule.rows):
        row: list[Action] = []
        for action in computes:
            row.append(action)
            for send in sends_of(action):
                row.append(send)
                sent[rank, edge(send)[1]].append(partner(send))
        rows.append(row)
    recvs_of = KnownRule(_recvs, schedule)
    return [_with_recvs(rank, row, sent, recvs_of, edge, schedule) for rank, row in enumerate(rows)]


def one_sweep(schedule: Schedule) -> Rows:
    """SEND and its RECV are written to the two rows at one instant of one sweep over all ranks.

    Safe even if every send blocks until it is received. Proof: all rows are parts of one sequence, in which each
    RECV comes right after its SEND. Go through the sequence: its next action is also the next one of its rank, as all
    earlier actions are done, and for a SEND so is its RECV on the other rank. The same argument holds for any
    capacity, so the order is deadlock free on every transport; the price is that a rank receives, and may wait,
    before it needs the value.
    """
    rows: Rows = [[] for _ in schedule.rows]
    sweep, sends_of, edge = Sweep(schedule), KnownRule(_sends, schedule), KnownEdges(schedule)
    for rank, _, action in sweep:
        rows[rank].append(action)
        for send in sends_of(action):
            rows[rank].append(send)
            rows[edge(send)[1]].append(partner(send))
    for wait in sweep.waits():
        raise ScheduleError(
            f"schedule {schedule.name!r}: {schedule.label(wait.rank)} at {wait.action} waits for {wait.reason}"
        )
    return rows


def _sends(action: Action, schedule: Schedule) -> list[Action]:
    """Return the SENDs that come right after a compute action."""
    return [send_of(value) for value in leaving(action, schedule)] if action.op in COMPUTE else []


def _recvs(action: Action, schedule: Schedule) -> list[Action]:
    """Return the RECVs that come right before a compute action."""
    return [partner(send_of(value)) for value in _received(action, schedule)]


def _received(action: Action, schedule: Schedule) -> list[Action]:
    """Return the values of other ranks that are received right before a compute action."""
    stage, op, microbatch, _ = action
    values = [value for value in awaited(action, schedule) if value.peer is None]
    if stage is None or op not in USES_WEIGHTS:
        return values
    for source, target in schedule.skips:
        begin, end, step = (source, target, 1) if op is Op.F else (target, source, -1)
        if crosses(source, target, schedule):
            first = next(one for one in range(begin + step, end + step, step) if not crosses(one, end, schedule))
            if first == stage:
                values.append(Action(begin, Op.F if op is Op.F else Op.I, microbatch, end))
    return values


def _with_recvs(
    rank: int,
    row: list[Action],
    sent: defaultdict[tuple[int, int], deque[Action]],
    recvs_of: KnownRule,
    edge: KnownEdges,
    schedule: Schedule,
) -> list[Action]:
    """Return a row with its RECVs.

    Args:
        rank: A rank.
        row: Its row, with its SENDs.
        sent: By sender and receiver, the RECVs of all messages, in the order of their SENDs. They are taken out.
        recvs_of: Returns the RECVs that come right before an action.
        edge: Returns the sender and the receiver of a message.
        schedule: The schedule.
    """
    full: list[Action] = []
    pulled_forward: set[Action] = set()
    for action in row:
        for wanted in recvs_of(action):
            if wanted in pulled_forward:
                pulled_forward.remove(wanted)
            else:
                queue = sent[edge(wanted)[0], rank]
                while queue and queue[0] != wanted:
                    pulled_forward.add(queue[0])
                    full.append(queue.popleft())
                if not queue:
                    need = next(one for one in _received(action, schedule) if partner(send_of(one)) == wanted)
                    raise ScheduleError(f"schedule {schedule.name!r}: {action} needs {need}, which nobody computes")
                full.append(queue.popleft())
        full.append(action)
    return full
