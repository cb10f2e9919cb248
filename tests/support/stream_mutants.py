"""Random asynchronous schedules, and random damage to their updates and versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from raypar.schedules import Schedule, build, lower
from raypar.schedules.action import Action, Op
from tests.support.mutants import mutated

NAMES = "pipedream", "pipedream-vertical", "pipedream-2bw"
Rows = list[list[Action]]


def random_stream(draw: Random) -> Schedule:
    """Of any of the three generators, sometimes with backwards in halves, lowered and reduced."""
    name, ranks = draw.choice(NAMES), draw.randint(1, 5)
    fewest = ranks if name == "pipedream-2bw" else 1
    schedule = build(name, ranks, draw.randint(fewest, fewest + 3), steps=draw.randint(1, 6))
    if draw.random() < 0.3:
        schedule = _with(schedule, [_halved(row, draw) for row in schedule.rows])
    order = draw.choice([None, "just_in_time", "one_sweep"])
    return schedule if order is None else lower(schedule, order, reduce_grad=draw.random() < 0.5)


def _halved(row: tuple[Action, ...], draw: Random) -> list[Action]:
    """Some backwards in two halves; the second one comes before the next update, at the latest."""
    new: list[Action] = []
    late: list[Action] = []
    for action in row:
        if action.op is Op.STEP or draw.random() < 0.4:
            new += late
            late = []
        if action.op is Op.B and draw.random() < 0.5:
            late.append(action._replace(op=Op.W))
            new.append(action._replace(op=Op.I))
        else:
            new.append(action)
    return new + late


def mutated_stream(schedule: Schedule, draw: Random) -> tuple[str, Schedule]:
    """One thing is another than it was, mostly an update or a version; returns what was done too."""
    kind = draw.choice([*KINDS, None])
    return mutated(schedule, draw) if kind is None else (kind, KINDS[kind](schedule, draw))


def _with(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _of(*ops: Op) -> Callable[[Callable[[list[Action], int, Random], None]], Callable[[Schedule, Random], Schedule]]:
    """Make a change of one action of these ops a change of a schedule, which stays as it is if it has none."""

    def of_one(change: Callable[[list[Action], int, Random], None]) -> Callable[[Schedule, Random], Schedule]:
        def changed(schedule: Schedule, draw: Random) -> Schedule:
            rows = [list(row) for row in schedule.rows]
            places = [(row, i) for row in rows for i, action in enumerate(row) if action.op in ops]
            if places:
                change(*draw.choice(places), draw)
            return _with(schedule, rows)

        return changed

    return of_one


def _move(row: list[Action], i: int, draw: Random) -> None:
    action = row.pop(i)
    row.insert(draw.choice([draw.randint(0, len(row)), min(len(row), i + 1), max(0, i - 1)]), action)


def _drop(row: list[Action], i: int, draw: Random) -> None:
    del row[i]


def _double(row: list[Action], i: int, draw: Random) -> None:
    row.insert(draw.choice([i, draw.randint(0, len(row))]), row[i])


def _change(row: list[Action], i: int, draw: Random) -> None:
    number = row[i].microbatch
    if number is not None:  # a STEP of all stages has none
        row[i] = row[i]._replace(microbatch=max(0, number + draw.choice([-2, -1, 1, 2])))


def _insert_use(schedule: Schedule, draw: Random) -> Schedule:
    """A stage computes with any version from then on: one that is not made yet, or an old one."""
    stage, rows = draw.randrange(schedule.num_stages), [list(row) for row in schedule.rows]
    row = rows[schedule.placement[stage] % len(rows)]
    row.insert(draw.randint(0, len(row)), Action(stage, Op.USE, draw.randint(0, schedule.num_steps)))
    return _with(schedule, rows)


def _other_steps(schedule: Schedule, draw: Random) -> Schedule:
    """The rows stay, what is said of their number of steps does not."""
    return replace(schedule, stream=max(0, schedule.stream + draw.choice([-1, 1])))


KINDS: dict[str, Callable[[Schedule, Random], Schedule]] = {
    "move STEP": _of(Op.STEP)(_move),
    "drop STEP": _of(Op.STEP)(_drop),
    "double STEP": _of(Op.STEP)(_double),
    "change STEP": _of(Op.STEP)(_change),
    "move USE": _of(Op.USE)(_move),
    "drop USE": _of(Op.USE)(_drop),
    "double USE": _of(Op.USE)(_double),
    "change USE": _of(Op.USE)(_change),
    "insert USE": _insert_use,
    "move backward": _of(Op.B, Op.W)(_move),
    "move REDUCE_GRAD": _of(Op.REDUCE_GRAD)(_move),
    "drop REDUCE_GRAD": _of(Op.REDUCE_GRAD)(_drop),
    "other steps": _other_steps,
}
