"""The one dependency rule of pipeline parallelism.

Lowering, the check, the simulation, the drawing, the stepper and the trace all ask ``needs``; nothing else in
raypar knows what depends on what.

A full backward is its two halves, ``B = I + W``: ``needs`` speaks of the halves, and ``provides`` says which of
them an action brings about.
"""

from __future__ import annotations

from itertools import accumulate

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.schedule import Schedule

#: What an action changes in the number of activations a rank holds: W gives back what F took, I holds on to it.
HOLDS = {Op.F: +1, Op.B: -1, Op.W: -1}


# The members by name: looking one up in its class costs as much as the rest of a rule.
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _UNSHARD, _RESHARD, _REDUCE_GRAD, _STEP = Op


def most_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of activations that each rank holds at once: those of forwards before their B or W.

    It follows from the order of each row, whenever its actions start. An evaluation holds none.
    """
    if schedule.forward_only:
        return (0,) * schedule.num_ranks
    return tuple(max(accumulate(HOLDS.get(action.op, 0) for action in row), default=0) for row in schedule.rows)


def provides(action: Action) -> tuple[Action, ...]:
    """What is there once the action is done: the action itself, and for ``B`` both of its halves."""
    stage, op, microbatch = action
    if op is _B:
        return (Action(stage, _I, microbatch), Action(stage, _W, microbatch))
    return (action,)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be there before the action can start (in terms of ``provides``).

    In a lowered schedule a value from another rank is needed as its RECV, and the RECV needs the SEND; before
    lowering the compute actions need one another directly.
    """
    stage, op, microbatch = action
    if stage is None or op is _UNSHARD or op is _RESHARD:
        return ()
    if op is _F:
        return (_value(_F, _RECV_F, stage, stage - 1, microbatch, schedule),) if stage > 0 else ()
    if op is _B or op is _I:
        forward = Action(stage, _F, microbatch)
        if stage == schedule.num_stages - 1:
            return (forward,)
        return (forward, _value(_I, _RECV_B, stage, stage + 1, microbatch, schedule))
    if op is _W or op is _SEND_B:
        return (Action(stage, _I, microbatch),)
    if op is _SEND_F:
        return (Action(stage, _F, microbatch),)
    if op is _REDUCE_GRAD:
        return tuple(Action(stage, _W, mb) for mb in range(schedule.num_microbatches))
    return (partner(action),)


def awaited(action: Action, schedule: Schedule) -> Action | None:
    """The one of its ``needs`` that another rank provides, if there is one. There is never more than one, and
    in a lowered schedule only a RECV has one.
    """
    if schedule.lowered:
        return partner(action) if action.op in RECVS else None
    for need in needs(action, schedule):
        if need.stage != action.stage and rank_of(need, schedule) != rank_of(action, schedule):
            return need
    return None


def travels(value: Action, schedule: Schedule) -> bool:
    """Whether another rank needs the value: the other end of ``awaited``. Never more than one rank does."""
    stage, op, _ = value
    if op in SENDS:
        return True
    if schedule.lowered or stage is None:
        return False
    if op is _F:
        return stage + 1 < schedule.num_stages and crosses(stage, stage + 1, schedule)
    return op is _I and stage > 0 and crosses(stage, stage - 1, schedule)


def send_of(value: Action) -> Action:
    """The SEND that carries a value to the rank that needs it: ``0SEND_F3`` for ``0F3``, ``1SEND_B3`` for ``1I3``."""
    stage, op, microbatch = value
    return Action(stage, _SEND_F if op is _F else _SEND_B, microbatch)


def partner(action: Action) -> Action:
    """The other end of a communication: ``1RECV_F0`` for ``0SEND_F0``, ``0RECV_B0`` for ``1SEND_B0``, and back."""
    stage, op, microbatch = action
    assert stage is not None
    other, step = _PARTNER[op]
    return Action(stage + step, other, microbatch)


def rank_of(action: Action, schedule: Schedule) -> int:
    """The rank that holds the action's stage."""
    assert action.stage is not None
    return schedule.placement[action.stage]


def crosses(stage: int, other: int, schedule: Schedule) -> bool:
    """Whether a value between the two stages has to travel between ranks."""
    return schedule.placement[stage] != schedule.placement[other]


def _value(op: Op, recv: Op, stage: int, source: int, microbatch: int | None, schedule: Schedule) -> Action:
    if schedule.lowered and crosses(stage, source, schedule):
        return Action(stage, recv, microbatch)
    return Action(source, op, microbatch)


_PARTNER = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
