"""Schedules that several test files need: random legal ones, and ones with split backwards."""

from __future__ import annotations

from hypothesis import strategies as st

from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import build
from raypar.schedules.rules import needs, provides
from raypar.schedules.schedule import Schedule


def halved(name, ranks, microbatches, draw=None):
    """A schedule with an I and a W for every B of another one: W behind I, or somewhere later; a stage's in order."""
    rows = []
    for row in build(name, ranks, microbatches).rows:
        full, owed = [], []
        for action in row:
            if action.op is not Op.B:
                full.append(action)
                continue
            full.append(action._replace(op=Op.I))
            owed.append(action._replace(op=Op.W))
            while owed and (draw is None or draw.random() < 0.4):
                full.append(owed.pop(0))
        rows.append(full + owed)
    return Schedule.of(f"{name} in halves", rows)


def spelled(schedule):
    return [" ".join(map(str, row)) for row in schedule.rows]


@st.composite
def legal_schedules(draw):
    """Any placement of stages, backwards whole or in halves, and any order that the dependencies allow."""
    num_stages = draw(st.integers(1, 5))
    num_ranks = draw(st.integers(1, num_stages))
    rng = draw(st.randoms(use_true_random=False))
    placement = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    rng.shuffle(placement)
    num_microbatches = draw(st.integers(1, 4))
    halves, evaluation = draw(st.booleans()), draw(st.booleans())
    open_actions = []
    for stage in range(num_stages):
        for mb in range(num_microbatches):
            backward = [] if evaluation else [Op.I, Op.W] if halves and rng.random() < 0.6 else [Op.B]
            open_actions += [Action(stage, op, mb) for op in (Op.F, *backward)]
    frame = Schedule("random", ((),) * num_ranks, tuple(placement), num_microbatches, False, evaluation)
    rows, done = [[] for _ in range(num_ranks)], set()
    while open_actions:
        action = rng.choice([a for a in open_actions if done.issuperset(needs(a, frame))])
        open_actions.remove(action)
        done.update(provides(action))
        rows[placement[action.stage]].append(action)
    return Schedule.of("random", rows)
