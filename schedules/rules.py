"""The dependency rules of pipeline parallelism.

``needs`` returns what an action of one microbatch depends on; lowering, the check, the simulation, the drawing, the
stepper and the trace all use it. ``stage_needs`` reads off a row what comes before and after the actions of whole
stages (UNSHARD, RESHARD, REDUCE_GRAD), which a row may have several times. No other file has a rule of dependency.

A full backward is its two halves, ``B = I + W``: ``needs`` names the halves, and ``provides`` returns the halves that
an action provides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from raypar.schedules.action import COMPUTE, RECVS, SENDS, WHOLE_STAGE, Action, Op
from raypar.schedules.schedule import Schedule

#: The change by an action of the number of activations that a rank holds on its device: W frees what F took, I frees
#: nothing, and in between they may be in host memory.
HOLDS = {Op.F: +1, Op.B: -1, Op.W: -1, Op.OFFLOAD: -1, Op.RELOAD: +1}

#: The ops that compute the gradients of a stage's inputs.
MAKES_INPUT_GRADIENTS = frozenset({Op.B, Op.I})

#: The ops that compute with a stage's weights, which must be whole for them. W only adds to their gradients.
USES_WEIGHTS = frozenset({Op.F, Op.B, Op.I})

#: The ops that compute gradients of a stage's weights, which REDUCE_GRAD sums over the replicas.
MAKES_GRADIENTS = frozenset({Op.B, Op.W})

#: An action, and the number of equal ones before it in its row. Only the actions of whole stages are repeated.
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
    """Return the change by an action of the bytes that a rank holds on its device for backwards.

    Args:
        op: The op of the action.
        kept: Bytes that an F of its stage saves.
        deferred: Bytes that an I saves for its W.
        inputs: Bytes of the stage's inputs, which an F saves too and which never go to host memory.
    """
    if op is Op.I:
        return deferred - kept
    if op is Op.OFFLOAD or op is Op.RELOAD:
        return HOLDS[op] * (kept - inputs)
    return -deferred if op is Op.W else HOLDS.get(op, 0) * kept


def why_none_moves(schedule: Schedule) -> str:
    """Return the kind of a schedule whose activations can't go to host memory; "" if they can."""
    if schedule.forward_only:
        return "an evaluation"
    return "in slices" if schedule.slices > 1 else "a stream of steps" if schedule.stream else ""


def most_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of activations that each rank holds at once, each from its F to its B or W.

    Those in host memory do not count. The order of each row determines the number; start times do not matter. An
    evaluation holds none.
    """
    if schedule.forward_only:
        return (0,) * schedule.num_ranks
    return tuple(map(most_held, schedule.rows))


def most_held(row: Iterable[Action]) -> int:
    """Return the largest number of activations that a rank holds on its device while it performs a row."""
    return max(accumulate((HOLDS.get(action.op, 0) for action in row), initial=0))


def gathers(schedule: Schedule) -> bool:
    """Return whether a schedule gathers weights. If not, every stage is whole all the time."""
    return any(action.op is _UNSHARD for row in schedule.rows for action in row)


def most_whole(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of stages of each rank whose weights are whole at once.

    The order of each row determines it. If the schedule has no UNSHARD, it is the number of the rank's stages.
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
    """Return the first and the last action that need a stage whole, of each time in which it is whole."""
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
    """Return the actions that are alone in a time in which their stage is whole: it may be gathered layer by layer."""
    found = (opens_and_closes(row) for row in schedule.rows)
    return frozenset(action for opens, closes in found for action in opens & closes)


def occurrences(row: Sequence[Action]) -> Iterator[Occurrence]:
    """Yield the actions of a row, each with the number of equal ones before it."""
    seen: Counter[Action] = Counter()
    for action in row:
        yield action, seen[action]
        seen[action] += 1


def stage_needs(row: Sequence[Action]) -> dict[Occurrence, list[Occurrence]]:
    """Return what each action of a row needs from the row because of the actions of whole stages in it.

    An F, B or I needs the UNSHARD before it. A RESHARD needs all actions that computed with the weights since then, and
    an UNSHARD needs the RESHARD before it. A REDUCE_GRAD needs the B and W since the one before it, and the next B or W
    needs it; the same holds for the STEP of one stage. An F needs the USE before it. A USE needs all F since the one
    before it, and the STEP that makes its version. A B or I needs the RELOAD before it, which needs the compute action
    before it. So in whatever order ready actions are performed, gathers, reductions, updates and versions serve the
    same actions as in the row, and nothing is reloaded from host memory earlier.

    Args:
        row: The row of one rank.

    Returns:
        For each action that needs something, the actions it needs.
    """
    found: dict[Occurrence, list[Occurrence]] = {}
    gathered: dict[int | None, Occurrence] = {}  # by stage: its last UNSHARD or RESHARD
    reduced: dict[int | None, Occurrence] = {}  # by stage: its last REDUCE_GRAD or STEP
    versions: dict[tuple[int | None, int], Occurrence] = {}  # by stage and version: the STEP that makes it
    used: defaultdict[int | None, list[Occurrence]] = defaultdict(list)  # by stage: its F, B, I since then
    made: defaultdict[int | None, list[Occurrence]] = defaultdict(list)  # by stage: its B, W since then
    reloads: dict[tuple[int | None, int | None], Occurrence] = {}  # by stage and microbatch
    computed: Occurrence | None = None  # the last compute action
    for one in occurrences(row):
        stage, op, number, _ = one[0]
        before: list[Occurrence | None] = []
        if op is _UNSHARD or op is _RESHARD or op is _USE:
            before += used.pop(stage, [gathered.get(stage)])  # these need the UNSHARD themselves
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
    """Return what exists once an action is done: the action itself, and for ``B`` both of its halves."""
    stage, op, microbatch, _ = action
    if op is _B:
        return (Action(stage, _I, microbatch), Action(stage, _W, microbatch))
    return (action,)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return what must exist before an action can start (in terms of ``provides``), besides its ``stage_needs``.

    In a lowered schedule an action needs the RECV of a value from another rank, and the RECV needs the SEND; before
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
    """Return the forward of the slice before, or the backward of the slice after, of the same microbatch and stage."""
    stage, op, number, _ = action
    if schedule.slices == 1 or number is None:
        return ()
    if op is _F:
        return (Action(stage, _F, number - 1),) if number % schedule.slices else ()
    return (Action(stage, _I, number + 1),) if (number + 1) % schedule.slices else ()


def taken(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the values of other stages that an F, B or I takes: the neighbour's first, then skips by their stage.

    A value has the name of the action that provides it: its RECV if the schedule is lowered and it comes from another
    rank, else the F or I that computes it. A skip's names both ends: ``0F3@2`` is what stage 2 takes of ``0F3``.
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
    """Return the values that an action takes from other ranks, in terms of ``leaving``.

    In a lowered schedule a RECV takes its SEND. Before, an action takes the values of other ranks in ``taken``. A
    VALIDATE always awaits the STEPs of all other stages: ``1STEP3@0`` is what that of stage 0 awaits of stage 1.
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
    """Return the values of an action that other ranks need, each for one action: the other end of ``awaited``.

    In a lowered schedule it is a SEND itself; before, the values of an F, or of a B or I, one for each stage.
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
    """Return the SEND of a value to the rank that needs it: ``0SEND_F3`` for ``0F3``, ``1SEND_B3`` for ``1I3``."""
    stage, op, microbatch, peer = value
    return Action(stage, _SEND_F if op is _F else _SEND_B, microbatch, peer)


def partner(action: Action) -> Action:
    """Return the other end of a message: ``1RECV_F0`` for ``0SEND_F0``, ``0RECV_B0`` for ``1SEND_B0``, and back."""
    stage, op, microbatch, peer = action
    assert stage is not None
    other, step = _PARTNER[op]
    if peer is not None:
        return Action(peer, other, microbatch, stage)
    return Action(stage + step, other, microbatch)


def rank_of(action: Action, schedule: Schedule) -> int:
    """Return the row that holds an action's stage; of several replicas, the one that has the action's microbatch."""
    stage, _, microbatch, _ = action
    assert stage is not None
    if schedule.replicas and microbatch is not None:
        return schedule.row_of(stage, microbatch)
    return schedule.placement[stage]


def crosses(stage: int, other: int, schedule: Schedule) -> bool:
    """Return whether a value between two stages has to travel between ranks."""
    placement = schedule.placement
    return placement[stage] != placement[other] or schedule.turn(stage) != schedule.turn(other)


def _value(op: Op, recv: Op, stage: int, source: int, microbatch: int | None, schedule: Schedule) -> Action:
    if schedule.lowered and crosses(stage, source, schedule):
        return Action(stage, recv, microbatch)
    return Action(source, op, microbatch)


def _skipped(op: Op, recv: Op, stage: int, other: int, microbatch: int | None, schedule: Schedule) -> Action:
    if schedule.lowered and crosses(stage, other, schedule):
        return Action(stage, recv, microbatch, other)
    return Action(other, op, microbatch, stage)


def _makers(values: tuple[Action, ...], schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions that provide values, each once: an F or I for all values taken of it, and RECVs themselves."""
    if not schedule.skips:
        return values
    return tuple(dict.fromkeys(one if one.op in RECVS else one._replace(peer=None) for one in values))


_PARTNER = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
