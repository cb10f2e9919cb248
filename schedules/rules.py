"""The dependency rules of pipeline parallelism.

Lowering, the check, the simulation, the drawing, the stepper and the trace all ask ``needs`` what an action of one
microbatch depends on. What stands before or behind an action of a whole stage (UNSHARD, RESHARD, REDUCE_GRAD), which a
row may have several times, ``stage_needs`` reads off the row. Nothing else in raypar knows what depends on what.

A full backward is its two halves, ``B = I + W``: ``needs`` speaks of the halves, and ``provides`` says which of
them an action brings about.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from raypar.schedules.action import COMPUTE, RECVS, SENDS, WHOLE_STAGE, Action, Op
from raypar.schedules.schedule import Schedule

#: What an action changes in the number of activations that a rank holds on its device: W gives back what F took, I
#: holds on to it, and in between they may be in host memory.
HOLDS = {Op.F: +1, Op.B: -1, Op.W: -1, Op.OFFLOAD: -1, Op.RELOAD: +1}

#: The ops that make the gradients of a stage's inputs.
MAKES_INPUT_GRADIENTS = frozenset({Op.B, Op.I})

#: The ops that compute with a stage's weights, so that these must be whole. W only adds to their gradients.
USES_WEIGHTS = frozenset({Op.F, Op.B, Op.I})

#: The ops that make gradients of a stage's weights, which REDUCE_GRAD sums over the replicas.
MAKES_GRADIENTS = frozenset({Op.B, Op.W})

#: An action, and how many equal ones stand before it in its row. Only the actions of whole stages are repeated.
Occurrence = tuple[Action, int]


# The members by name: looking one up in its class costs as much as the rest of a rule.
(
    _F,
    _B,
    _I,
    _W,
    _SEND_F,
    _RECV_F,
    _SEND_B,
    _RECV_B,
    _UNSHARD,
    _RESHARD,
    _REDUCE_GRAD,
    _STEP,
    _USE,
    _VALIDATE,
    _OFFLOAD,
    _RELOAD,
) = Op


def held_bytes(op: Op, kept: int, deferred: int, inputs: int = 0) -> int:
    """Return what an action changes in the bytes that a rank holds on its device for backwards.

    Args:
        op: The op of the action.
        kept: Bytes that an F of its stage keeps.
        deferred: Bytes that an I keeps for its W.
        inputs: Bytes of what an F keeps that never go to host memory: the stage's inputs.
    """
    if op is Op.I:
        return deferred - kept
    if op is Op.OFFLOAD or op is Op.RELOAD:
        return HOLDS[op] * (kept - inputs)
    return -deferred if op is Op.W else HOLDS.get(op, 0) * kept


def why_none_moves(schedule: Schedule) -> str:
    """Say what a schedule is whose activations can't go to host memory; "" if they can."""
    if schedule.forward_only:
        return "an evaluation"
    return "in slices" if schedule.slices > 1 else "a stream of steps" if schedule.stream else ""


def most_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of activations that each rank holds at once: those of forwards before their B or W.

    Those in host memory do not count. It follows from the order of each row, whenever its actions start. An evaluation
    holds none.
    """
    if schedule.forward_only:
        return (0,) * schedule.num_ranks
    return tuple(max(accumulate(HOLDS.get(action.op, 0) for action in row), default=0) for row in schedule.rows)


def gathers(schedule: Schedule) -> bool:
    """Return whether a schedule gathers weights. If not, every stage is whole all the time."""
    return any(action.op is _UNSHARD for row in schedule.rows for action in row)


def most_whole(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of stages of each rank whose weights are whole at once.

    It follows from the order of each row. If the schedule has no UNSHARD, it is the number of the rank's stages.
    """
    if not gathers(schedule):
        return tuple(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    return tuple(max(map(len, _whole(row)), default=0) for row in schedule.rows)


def _whole(row: Sequence[Action]) -> Iterator[frozenset[int | None]]:
    """Yield the stages that are whole after each UNSHARD and RESHARD of a row."""
    whole: frozenset[int | None] = frozenset()
    for stage, op, _, _ in row:
        if op is _UNSHARD or op is _RESHARD:
            whole = whole | {stage} if op is _UNSHARD else whole - {stage}
            yield whole


def opens_and_closes(row: Sequence[Action]) -> tuple[set[Action], set[Action]]:
    """Return the first and the last action of every time in which a stage is whole, of those that need it so."""
    opens, closes = set[Action](), set[Action]()
    opened = set[int | None]()
    last: dict[int | None, Action] = {}
    for action in row:
        stage, op, _, _ = action
        if op is _UNSHARD and stage not in last:
            opened.add(stage)
        elif op is _RESHARD and stage in last:
            closes.add(last.pop(stage))
        elif op in USES_WEIGHTS:
            if stage in opened:
                opens.add(action)
                opened.discard(stage)
            last[stage] = action
    return opens, closes


def streamed(schedule: Schedule) -> frozenset[Action]:
    """Return the actions for which alone a stage is whole: its weights may come and go by layers while they run."""
    found = (opens_and_closes(row) for row in schedule.rows)
    return frozenset(action for opens, closes in found for action in opens & closes)


def occurrences(row: Sequence[Action]) -> Iterator[Occurrence]:
    """Yield the actions of a row, each with the number of equal ones before it."""
    seen: Counter[Action] = Counter()
    for action in row:
        yield action, seen[action]
        seen[action] += 1


def stage_needs(row: Sequence[Action]) -> dict[Occurrence, list[Occurrence]]:
    """What each action of a row needs from the row because of the actions of whole stages in it.

    An F, B or I needs the UNSHARD before it, a RESHARD all that computed with the weights since then, and an UNSHARD
    the RESHARD before it. REDUCE_GRAD needs the B and W since the one before, and the next B or W needs it; so does the
    STEP of one stage. An F needs the USE before it, and a USE all F since then, and the STEP that makes its version. A
    B or I needs the RELOAD before it, which needs the compute action before it. So whatever the order in which ready
    actions are performed, each gather serves, each reduction and update takes, and each forward computes with, what the
    row says, and nothing comes back from host memory earlier.

    Args:
        row: The row of one rank.

    Returns:
        For each action that needs something, the actions it needs.
    """
    found: dict[Occurrence, list[Occurrence]] = {}
    gathered: dict[int | None, Occurrence] = {}  # by stage: its last UNSHARD or RESHARD
    reduced: dict[int | None, Occurrence] = {}  # by stage: its last REDUCE_GRAD or STEP
    versions: dict[tuple[int | None, int], Occurrence] = {}  # by stage and version: the STEP that makes it
    used: defaultdict[int | None, list[Occurrence]] = defaultdict(list)  # since then, what it waits for
    made: defaultdict[int | None, list[Occurrence]] = defaultdict(list)
    reloads: dict[tuple[int | None, int | None], Occurrence] = {}  # by stage and microbatch
    computed: Occurrence | None = None  # the last compute action
    for one in occurrences(row):
        stage, op, number, _ = one[0]
        before: list[Occurrence | None] = []
        if op is _UNSHARD or op is _RESHARD or op is _USE:
            before += used.pop(stage, [gathered.get(stage)])  # what used the weights needs the UNSHARD itself
            gathered[stage] = one
            if op is _USE and number is not None:
                before.append(versions.get((stage, number)))
        elif op is _REDUCE_GRAD or (op is _STEP and stage is not None):
            before += made.pop(stage, [reduced.get(stage)])
            reduced[stage] = one
            if op is _STEP and number is not None:
                versions[stage, number + 1] = one
        elif op is _RELOAD:
            before.append(computed)
            reloads[stage, number] = one
        if op in USES_WEIGHTS:
            before.append(gathered.get(stage))
            used[stage].append(one)
            if reloads and op is not _F:
                before.append(reloads.pop((stage, number), None))
        if op in MAKES_GRADIENTS:
            before.append(reduced.get(stage))
            made[stage].append(one)
        if op in COMPUTE:
            computed = one
        wanted = [other for other in before if other is not None]
        if wanted:
            found[one] = wanted
    return found


def provides(action: Action) -> tuple[Action, ...]:
    """What is there once the action is done: the action itself, and for ``B`` both of its halves."""
    stage, op, microbatch, _ = action
    if op is _B:
        return (Action(stage, _I, microbatch), Action(stage, _W, microbatch))
    return (action,)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be there before the action can start (in terms of ``provides``), apart from ``stage_needs``.

    In a lowered schedule a value from another rank is needed as its RECV, and the RECV needs the SEND; before
    lowering the compute actions need one another directly.
    """
    stage, op, microbatch, _ = action
    if stage is None or op in WHOLE_STAGE or op is _STEP or op is _USE or op is _VALIDATE:
        return ()
    if op is _F:
        return (*_makers(taken(action, schedule), schedule), *_of_slices(action, schedule))
    if op is _B or op is _I:
        makers = _makers(taken(action, schedule), schedule)
        return (Action(stage, _F, microbatch), *makers, *_of_slices(action, schedule))
    if op is _W or op is _SEND_B:
        return (Action(stage, _I, microbatch),)
    if op is _SEND_F or op is _OFFLOAD:
        return (Action(stage, _F, microbatch),)
    if op is _RELOAD:
        return (Action(stage, _OFFLOAD, microbatch),)
    return (partner(action),)


def _of_slices(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The forward of the slice before, or the backward of the slice behind, of the same microbatch and stage."""
    stage, op, number, _ = action
    if schedule.slices == 1 or number is None:
        return ()
    if op is _F:
        return (Action(stage, _F, number - 1),) if number % schedule.slices else ()
    return (Action(stage, _I, number + 1),) if (number + 1) % schedule.slices else ()


def taken(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The values of other stages that an F, B or I takes, the neighbour's first, then those of skips by their stage.

    A value has the name of what brings it about: of its RECV if the schedule is lowered and it comes from another rank,
    else of the F or I that makes it. That of a skip names both ends: ``0F3@2`` is what stage 2 takes of ``0F3``.
    """
    stage, op, microbatch, _ = action
    if stage is None or op not in USES_WEIGHTS:
        return ()
    found: tuple[Action, ...] = ()
    value, recv, other = (_F, _RECV_F, stage - 1) if op is _F else (_I, _RECV_B, stage + 1)
    if 0 <= other < schedule.num_stages:
        found = (_value(value, recv, stage, other, microbatch, schedule),)
    for source, target in schedule.skips:
        here, there = (target, source) if op is _F else (source, target)
        if here == stage:
            found += (_skipped(value, recv, stage, there, microbatch, schedule),)
    return found


def awaited(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What another rank provides of what an action takes, in terms of ``leaving``.

    In a lowered schedule a RECV has its SEND. Before, it is what the action has ``taken`` from other ranks. A VALIDATE
    always awaits the STEPs of all other stages: ``1STEP3@0`` is what that of stage 0 awaits of stage 1.
    """
    stage, op, microbatch, _ = action
    if op is _VALIDATE:
        others = (one for one in range(schedule.num_stages) if one != stage)
        return tuple([Action(one, _STEP, microbatch, stage) for one in others])
    if schedule.lowered:
        return (partner(action),) if op in RECVS else ()
    if op not in USES_WEIGHTS:
        return ()
    own = rank_of(action, schedule)
    return tuple([value for value in taken(action, schedule) if rank_of(value, schedule) != own])


def leaving(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What an action provides that another rank needs, the other end of ``awaited``: each value for one action there.

    In a lowered schedule that is a SEND itself; before, the values of an F, or of a B or I, one for each stage.
    """
    stage, op, microbatch, _ = action
    if op in SENDS:
        return (action,)
    if op is _STEP and schedule.validated:
        others = (one for one in range(schedule.num_stages) if one != stage)
        return tuple([Action(stage, _STEP, microbatch, one) for one in others])
    if schedule.lowered or stage is None or op not in USES_WEIGHTS:
        return ()
    value, other = (_F, stage + 1) if op is _F else (_I, stage - 1)
    found: tuple[Action, ...] = ()
    if 0 <= other < schedule.num_stages and crosses(stage, other, schedule):
        found = (Action(stage, value, microbatch),)
    for source, target in schedule.skips:
        here, there = (source, target) if op is _F else (target, source)
        if here == stage and crosses(source, target, schedule):
            found += (Action(stage, value, microbatch, there),)
    return found


def send_of(value: Action) -> Action:
    """The SEND that carries a value to the rank that needs it: ``0SEND_F3`` for ``0F3``, ``1SEND_B3`` for ``1I3``."""
    stage, op, microbatch, peer = value
    return Action(stage, _SEND_F if op is _F else _SEND_B, microbatch, peer)


def partner(action: Action) -> Action:
    """The other end of a communication: ``1RECV_F0`` for ``0SEND_F0``, ``0RECV_B0`` for ``1SEND_B0``, and back."""
    stage, op, microbatch, peer = action
    assert stage is not None
    other, step = _PARTNER[op]
    if peer is not None:
        return Action(peer, other, microbatch, stage)
    return Action(stage + step, other, microbatch)


def rank_of(action: Action, schedule: Schedule) -> int:
    """The row that holds the action's stage, and of several replicas has the action's microbatch."""
    stage, _, microbatch, _ = action
    assert stage is not None
    if schedule.replicas and microbatch is not None:
        return schedule.row_of(stage, microbatch)
    return schedule.placement[stage]


def crosses(stage: int, other: int, schedule: Schedule) -> bool:
    """Whether a value between the two stages has to travel between ranks."""
    homes = schedule.placement
    return homes[stage] != homes[other] or schedule.turn(stage) != schedule.turn(other)


def _value(op: Op, recv: Op, stage: int, source: int, microbatch: int | None, schedule: Schedule) -> Action:
    if schedule.lowered and crosses(stage, source, schedule):
        return Action(stage, recv, microbatch)
    return Action(source, op, microbatch)


def _skipped(op: Op, recv: Op, stage: int, other: int, microbatch: int | None, schedule: Schedule) -> Action:
    if schedule.lowered and crosses(stage, other, schedule):
        return Action(stage, recv, microbatch, other)
    return Action(other, op, microbatch, stage)


def _makers(values: tuple[Action, ...], schedule: Schedule) -> tuple[Action, ...]:
    """Return what brings values about, each once: an F or I for all that is taken of it, and RECVs themselves."""
    if not schedule.skips:
        return values
    return tuple(dict.fromkeys(one if one.op in RECVS else one._replace(peer=None) for one in values))


_PARTNER = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
