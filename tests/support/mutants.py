"""Random schedules, and random damage to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from raypar.schedules import CATALOG, Costs, Schedule, ScheduleError, build, lower
from raypar.schedules.action import RECVS, SENDS, STEP, Action, Op
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.replicate import replicate
from raypar.schedules.passes.skip_connections import with_skips
from raypar.schedules.passes.token_slices import with_slices

Rows = list[list[Action]]
SPLIT = "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "dualpipe"
LOOPED = "interleaved", "looped-bfs", "zb-interleaved"
ONE_MICROBATCH = [Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]
WHOLE_STAGE = [Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD]


def random_schedule(draw: Random) -> Schedule:
    """Of a generator or of nobody's, compute-only or lowered in one of the two orders."""
    name = draw.choice(["naive", "gpipe", "1f1b", *LOOPED, "forward", "zb-2p", *SPLIT, "at random", "at random"])
    ranks, microbatches, chunks = draw.randint(1, 6), draw.randint(1, 10), draw.randint(1, 3)
    if name in LOOPED:
        schedule = build(name, ranks, microbatches, max(2, chunks))
    elif name == "forward":
        schedule = build(name, ranks, microbatches, chunks)
    elif name == "at random":
        schedule = listed(draw)
    elif name == "zb-2p":
        f, i, w, link = (draw.uniform(0.1, 1) for _ in range(4))
        costs = Costs(f=f, b=i + w, i=i, w=w, link=link)
        schedule = build(name, min(4, ranks), min(6, microbatches), draw.randint(1, 2), costs=costs)
    else:
        schedule = build(name, ranks, microbatches * CATALOG[name].sizes.multiple)
    return lowered(sliced(replicated(schedule, draw), draw), draw)


def replicated(schedule: Schedule, draw: Random) -> Schedule:
    """Sometimes with replicas, most often of a number that divides its microbatches."""
    if draw.random() < 0.85 or schedule.replicas or schedule.forward_only:
        return schedule
    counts = [one for one in (1, 2, 3) if schedule.num_microbatches % one == 0 or draw.random() < 0.1]
    return replicate(schedule, [draw.choice(counts) for _ in range(schedule.num_ranks)])


def sliced(schedule: Schedule, draw: Random) -> Schedule:
    """Sometimes in slices, in an order that the pass makes or in the one that is there."""
    counts = [count for count in range(2, 5) if schedule.num_microbatches % count == 0]
    if not counts or schedule.replicas or draw.random() < 0.7:
        return schedule
    slices = draw.choice(counts)
    try:
        return with_slices(schedule, slices) if draw.random() < 0.8 else replace(schedule, slices=slices)
    except ScheduleError:  # of microbatches in any order
        return replace(schedule, slices=slices)


def lowered(schedule: Schedule, draw: Random) -> Schedule:
    """Sometimes lowered, reduced and gathered in any of the ways."""
    order = draw.choice([None, "just_in_time", "one_sweep"])
    if order is not None:
        schedule = lower(schedule, order, reduce_grad=draw.random() < 0.5)
    if draw.random() < 0.2:
        schedule = reduce_gradients(schedule, "microbatch")
    if draw.random() < 0.4:
        when = draw.choice(["step", "microbatch"])
        keep, resident = (
            draw.choice([True, False, "except_last"]),
            draw.choice([None, 1, 2]) if when == "step" else None,
        )
        schedule = gather_weights(schedule, when, reshard_after_forward=keep, resident=resident)
    return schedule


def listed(draw: Random) -> Schedule:
    """Any placement of few stages; whatever is ready may come next, on whatever rank."""
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 6)
    ranks = draw.randint(1, stages)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    evaluation, halves = draw.random() < 0.2, draw.random() < 0.5
    done: set[Action] = set()
    left = [
        Action(stage, op, mb)
        for stage in range(stages)
        for mb in range(microbatches)
        for op in (Op.F, *(() if evaluation else (Op.I, Op.W) if halves and draw.random() < 0.6 else (Op.B,)))
    ]

    def is_ready(action: Action) -> bool:
        stage, op, mb, _ = action
        if op is Op.F:
            return stage == 0 or Action(stage - 1, Op.F, mb) in done
        if op is Op.W:
            return Action(stage, Op.I, mb) in done
        after = stage + 1 == stages or not done.isdisjoint(Action(stage + 1, o, mb) for o in (Op.B, Op.I))
        return after and Action(stage, Op.F, mb) in done

    rows: Rows = [[] for _ in range(ranks)]
    while left:
        action = draw.choice([action for action in left if is_ready(action)])
        left.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    schedule = Schedule.of("at random", rows)
    pairs = [(one, two) for two in range(stages) for one in range(two)]
    return with_skips(schedule, draw.sample(pairs, draw.randint(0, len(pairs)) // 2) if draw.random() < 0.4 else [])


def mutated(schedule: Schedule, draw: Random) -> tuple[str, Schedule]:
    """One thing is another than it was; returns what was done too."""
    kind = draw.choice(list(KINDS))
    return kind, KINDS[kind](schedule, draw)


def _of_row(change: Callable[[list[Action], Random], None]) -> Callable[[Schedule, Random], Schedule]:
    def change_a_row(schedule: Schedule, draw: Random) -> Schedule:
        rows = [list(row) for row in schedule.rows]
        row = draw.choice(rows)
        if row:
            change(row, draw)
        return _with(schedule, rows)

    return change_a_row


def _with(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _swap(row: list[Action], draw: Random) -> None:
    i, j = draw.randrange(len(row)), draw.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def _swap_neighbours(row: list[Action], draw: Random) -> None:
    i = draw.randrange(len(row))
    row[i - 1], row[i] = row[i], row[i - 1]


def _move(row: list[Action], draw: Random) -> None:
    action = row.pop(draw.randrange(len(row)))
    row.insert(draw.randint(0, len(row)), action)


def _drop(row: list[Action], draw: Random) -> None:
    del row[draw.randrange(len(row))]


def _duplicate(row: list[Action], draw: Random) -> None:
    row.insert(draw.randint(0, len(row)), draw.choice(row))


def _insert(schedule: Schedule, draw: Random) -> Schedule:
    """Any action, mostly one of a whole stage or rank, which may do no harm."""
    stage, mb = draw.randint(0, schedule.num_stages), draw.randint(0, schedule.num_microbatches)
    rows = [list(row) for row in schedule.rows]
    home = schedule.placement[stage] if stage < schedule.num_stages else 0
    row = rows[home if home < len(rows) and draw.random() < 0.8 else draw.randrange(len(rows))]
    some = Action(stage, draw.choice(ONE_MICROBATCH), mb)
    action = draw.choice([STEP, Action(stage, draw.choice(WHOLE_STAGE), None), some])
    row.insert(draw.randint(0, len(row)), action)
    return _with(schedule, rows)


def _change_op(row: list[Action], draw: Random) -> None:
    i = draw.randrange(len(row))
    if row[i] != STEP:
        op = draw.choice(WHOLE_STAGE if row[i].microbatch is None else ONE_MICROBATCH)
        row[i] = row[i]._replace(op=op, peer=row[i].peer if op in SENDS or op in RECVS else None)


def _change_stage(schedule: Schedule, draw: Random) -> Schedule:
    def change(row: list[Action], draw: Random) -> None:
        i = draw.randrange(len(row))
        if row[i] != STEP:
            row[i] = row[i]._replace(stage=draw.randint(0, schedule.num_stages))

    return _of_row(change)(schedule, draw)


def _change_peer(schedule: Schedule, draw: Random) -> Schedule:
    def change(row: list[Action], draw: Random) -> None:
        ends = [at for at, action in enumerate(row) if action.op in SENDS or action.op in RECVS]
        if ends:
            at, peer = draw.choice(ends), draw.choice([None, draw.randint(0, schedule.num_stages)])
            row[at] = row[at]._replace(peer=peer)

    return _of_row(change)(schedule, draw)


def _change_microbatch(schedule: Schedule, draw: Random) -> Schedule:
    def change(row: list[Action], draw: Random) -> None:
        i = draw.randrange(len(row))
        if row[i].microbatch is not None:
            row[i] = row[i]._replace(microbatch=draw.randint(0, schedule.num_microbatches))

    return _of_row(change)(schedule, draw)


def _move_to_another_rank(schedule: Schedule, draw: Random) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    row, other = draw.choice(rows), draw.choice(rows)
    if row:
        action = row.pop(draw.randrange(len(row)))
        other.insert(draw.randint(0, len(other)), action)
    return _with(schedule, rows)


def _swap_microbatches(schedule: Schedule, draw: Random) -> Schedule:
    """Everywhere, or of some ops only: a different order that is mostly as good."""
    one, other = draw.randrange(schedule.num_microbatches), draw.randrange(schedule.num_microbatches)
    ops = draw.sample(ONE_MICROBATCH, draw.randint(1, 8))
    ranks = draw.sample(range(schedule.num_ranks), draw.randint(1, schedule.num_ranks))
    swap = {one: other, other: one}
    rows = [
        [a._replace(microbatch=swap.get(a.microbatch, a.microbatch)) if a.op in ops and r in ranks else a for a in row]
        for r, row in enumerate(schedule.rows)
    ]
    return _with(schedule, rows)


def _drop_everywhere(schedule: Schedule, draw: Random) -> Schedule:
    """A kind of action of one microbatch, or of all."""
    op = draw.choice([*ONE_MICROBATCH, Op.REDUCE_GRAD, STEP.op])
    mb = draw.choice([None, draw.randrange(schedule.num_microbatches)])
    gone = [Op.SEND_F, Op.RECV_F] if op is Op.SEND_F else [Op.SEND_B, Op.RECV_B] if op is Op.SEND_B else [op]
    rows = [[a for a in row if a.op not in gone or (mb is not None and a.microbatch != mb)] for row in schedule.rows]
    return _with(schedule, rows)


def _change_placement(schedule: Schedule, draw: Random) -> Schedule:
    """What is said of a stage only, or its actions too."""
    stage, home = draw.randrange(schedule.num_stages), draw.randrange(schedule.num_ranks)
    if draw.random() < 0.1:
        return replace(schedule, placement=(*schedule.placement, draw.choice([home, schedule.num_ranks])))
    placement = tuple(home if s == stage else old for s, old in enumerate(schedule.placement))
    if draw.random() < 0.5:
        return replace(schedule, placement=placement)
    rows = [[action for action in row if action.stage != stage] for row in schedule.rows]
    rows[home] = _merged(rows[home], [action for row in schedule.rows for action in row if action.stage == stage], draw)
    return replace(_with(schedule, rows), placement=placement)


def _merged(one: list[Action], other: list[Action], draw: Random) -> list[Action]:
    """Both in their order; the STEP stays at the end."""
    end = [STEP] if one[-1:] == [STEP] else []
    rests = [one[: len(one) - len(end)][::-1], other[::-1]]
    merged = []
    while any(rests):
        rest = draw.choices(rests, [len(rest) for rest in rests])[0]
        merged.append(rest.pop())
    return merged + end


def _renumber(schedule: Schedule, draw: Random) -> Schedule:
    """The rows stay, what is said of their number of microbatches or of their kind does not."""
    if draw.random() < 0.5:
        return replace(schedule, num_microbatches=max(1, schedule.num_microbatches + draw.choice([-1, 1])))
    try:
        return Schedule.of(schedule.name, schedule.rows)
    except ScheduleError:
        return schedule


KINDS: dict[str, Callable[[Schedule, Random], Schedule]] = {
    "swap": _of_row(_swap),
    "swap neighbours": _of_row(_swap_neighbours),
    "move": _of_row(_move),
    "drop": _of_row(_drop),
    "duplicate": _of_row(_duplicate),
    "insert": _insert,
    "change op": _of_row(_change_op),
    "change stage": _change_stage,
    "change peer": _change_peer,
    "change microbatch": _change_microbatch,
    "other rank": _move_to_another_rank,
    "swap microbatches": _swap_microbatches,
    "drop everywhere": _drop_everywhere,
    "placement": _change_placement,
    "renumber": _renumber,
}
