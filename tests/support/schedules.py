"""Schedules that several test files need: random legal ones, and ones with split backwards."""

from __future__ import annotations

from hypothesis import strategies as st

from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import CATALOG, build
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.skip_connections import with_skips
from raypar.schedules.rules import needs, provides
from raypar.schedules.schedule import Schedule

SYNCHRONOUS = [name for name, one in CATALOG.items() if not (one.forward_only or one.is_stream)]
ONE_ROW_A_RANK = [name for name in SYNCHRONOUS if name != "dualpipe"]  # whose ranks have two replicas each


def halved(name, ranks, microbatches, draw=None):
    """A schedule with an I and a W for every B of another one: W behind I, or somewhere later; a stage's in order."""
    rows = []
    for row in build(name, ranks, microbatches).rows:
        full, deferred = [], []
        for action in row:
            if action.op is not Op.B:
                full.append(action)
                continue
            full.append(action._replace(op=Op.I))
            deferred.append(action._replace(op=Op.W))
            while deferred and (draw is None or draw.random() < 0.4):
                full.append(deferred.pop(0))
        rows.append(full + deferred)
    return Schedule.of(f"{name} in halves", rows)


def spelled(schedule):
    return [" ".join(map(str, row)) for row in schedule.rows]


@st.composite
def catalog_schedules(draw):
    """One of the catalog: 1 to 4 ranks, 1 to 8 microbatches, 1 to 3 stages a rank; sometimes in halves, or forwards."""
    looped = ["interleaved", "looped-bfs", "zb-interleaved"]
    others = ["gpipe", "1f1b", "forward", "halves", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"]
    name = draw(st.sampled_from([*others, *looped]))
    ranks, microbatches, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 3))
    if name in looped:
        return build(name, ranks, microbatches, max(2, chunks))
    if name == "halves":
        return halved("1f1b", ranks, microbatches, draw(st.randoms(use_true_random=False)))
    return build(name, ranks, microbatches, chunks if name == "forward" else None)


def skipping(draw, schedule):
    """A schedule with some skips, most often with none."""
    pairs = [(one, two) for two in range(schedule.num_stages) for one in range(two)]
    if not pairs or draw(st.booleans()):
        return schedule
    return with_skips(schedule, draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)))


def gathered(draw, schedule):
    """A schedule with its gathers, in any of the placements."""
    when = draw(st.sampled_from(["step", "microbatch"]))
    if when == "step":
        return gather_weights(schedule, when, resident=draw(st.none() | st.integers(1, 4)))
    return gather_weights(schedule, when, reshard_after_forward=draw(st.sampled_from([True, False, "except_last"])))


@st.composite
def lowered_schedules(draw):
    """A training schedule of the catalog, lowered, perhaps with reductions and gathers."""
    schedule = lower(skipping(draw, draw(catalog_schedules().filter(lambda one: not one.forward_only))))
    if draw(st.booleans()):
        schedule = reduce_gradients(schedule, draw(st.sampled_from(["step", "microbatch"])))
    return gathered(draw, schedule) if draw(st.booleans()) else schedule


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
    return skipping(draw, Schedule.of("random", rows))
