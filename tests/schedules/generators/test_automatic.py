"""The automatic zero-bubble schedule: the figures of its paper, its bound of memory, and never longer than by hand."""

from dataclasses import replace
from random import Random

import pytest

from raypar.schedules import CATALOG, Costs, ScheduleError, automatic, build, check, lower, register, simulate
from raypar.schedules.action import Op

SMALL = Costs(f=18.522, b=27.423, i=18.086, w=9.337, link=0.601)
LARGE = Costs(f=11.347, b=19.38, i=11.248, w=8.132, link=0.377)


def kept(hidden, heads, seq=1024):
    """What W needs of a layer's activations: 32sbh of (34 + 5as/h)sbh. Qi et al. 2023, section 2.3 and Table 4."""
    return 32 / (34 + 5 * heads * seq / hidden)


def span(schedule, costs):
    """The longest time from the first start to the last end of a rank."""
    events = simulate(schedule, costs).events
    rows = [[event for event in events if event.rank == rank] for rank in range(schedule.num_ranks)]
    return max(row[-1].end - row[0].start for row in rows)


def most_kept(schedule, part):
    """The most that a rank holds, in activations of a microbatch."""
    most = 0.0
    for row in schedule.rows:
        held = 0.0
        for action in row:
            held += {Op.F: 1, Op.B: -1, Op.I: part - 1, Op.W: -part}[action.op]
            most = max(most, held)
    return most


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("costs", "ranks", "microbatches", "part", "rate_1p", "rate_2p"),
    [(SMALL, 8, 24, kept(2304, 24), 0.1585, 0.0433), (LARGE, 16, 48, kept(6144, 48), None, 0.0066)],
)
def test_idle_time_is_that_of_the_paper_or_less(costs, ranks, microbatches, part, rate_1p, rate_2p):
    """Qi et al. 2023, Table 5, ZB-1p and ZB-2p: every rank's own span counts, as without a flush."""
    work = microbatches * (costs.f + costs.i + costs.w)
    for most, rate in [(ranks, rate_1p)] * (rate_1p is not None) + [(2 * ranks, rate_2p)]:
        found = automatic(ranks, microbatches, costs, most, kept=part, flush=False)
        check(found)
        longest = span(found, costs)
        assert round((longest - work) / longest, 4) <= rate
        assert most_kept(found, part) <= most + 1e-6


def random_costs(draw, num_stages):
    """Costs in which stages differ, as the last one with its head does."""
    stages = {(stage, op): draw.uniform(0.5, 2) for stage in range(num_stages) for op in (Op.F, Op.I, Op.W)}
    whole = {(stage, Op.B): stages[stage, Op.I] + stages[stage, Op.W] for stage in range(num_stages)}
    return Costs(link=draw.choice([0.0, 0.1, 1.0]), of_stage=stages | whole)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_longer_than_what_is_made_by_hand(seed):
    draw = Random(seed)
    ranks, microbatches = draw.randint(1, 6), draw.randint(1, 12)
    costs = random_costs(draw, ranks)
    for name, others in (("zb-1p", ("1f1b", "zb-h1")), ("zb-2p", ("1f1b", "zb-h1", "zb-h2", "zb-1p"))):
        found = build(name, ranks, microbatches, costs=costs)
        check(lower(found), send_capacity=8, max_in_flight=ranks if name == "zb-1p" else 2 * ranks)
        shortest = min(simulate(build(other, ranks, microbatches, costs=costs), costs).makespan for other in others)
        assert simulate(found, costs).makespan <= shortest * (1 + 1e-6)
        assert found == build(name, ranks, microbatches, costs=costs), "the same costs give the same schedule"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_a_v_is_never_longer_than_what_is_made_by_hand(seed):
    draw = Random(seed)
    ranks, microbatches = draw.randint(1, 4), draw.randint(1, 8)
    costs = random_costs(draw, 2 * ranks)
    for most in (1, ranks, 2 * ranks):
        placement = build("zb-v", ranks, microbatches).placement
        found = automatic(ranks, microbatches, costs, most, placement=placement)
        assert found.placement == placement
        check(lower(found), send_capacity=8, max_in_flight=2 * most)
        for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
            other = simulate(build(name, ranks, microbatches), costs)
            if max(other.in_flight) <= 2 * most:
                assert simulate(found, costs).makespan <= other.makespan * (1 + 1e-6)


def test_a_v_with_more_memory_has_only_the_bubble_before_the_first_microbatch():
    costs = Costs(i=1.2, w=0.8, link=0.1)
    work, first = 2 * 8 * (1 + 1.2 + 0.8), 3 * (1 + 0.1)
    assert simulate(build("zb-2p", 4, 8, 2, costs=costs), costs).makespan == pytest.approx(work + first)
    assert simulate(build("zb-v", 4, 8), costs).makespan > work + first + 1


@pytest.mark.sampled
@pytest.mark.parametrize("placement", [(0, 1, 2, 0, 1, 2), (0, 1, 2, 1), (2, 0, 0, 1, 2, 1, 0), (1, 1, 1, 0, 2)])
def test_any_placement_of_stages(placement):
    """Dealt out in turn, or ranks with different numbers of stages."""
    costs = Costs(link=0.25)
    spans = []
    for most in (1, 2, 4):
        found = automatic(3, 7, costs, most, placement=placement)
        assert found.placement == placement
        assert all(held <= most * placement.count(rank) for rank, held in enumerate(simulate(found).in_flight))
        check(lower(found), send_capacity=8)
        spans.append(simulate(found, costs).makespan)
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]
    if placement == (0, 1, 2) * 2:
        assert spans[-1] <= simulate(build("zb-interleaved", 3, 7), costs).makespan


def test_backwards_that_leave_nothing_for_w_are_1f1b():
    costs = Costs(i=2.0, w=0.0)
    assert simulate(build("zb-2p", 3, 6, costs=costs), costs).makespan == simulate(build("1f1b", 3, 6), costs).makespan


def test_each_looser_bound_gives_a_shorter_step():
    costs = Costs(b=1.5, w=0.5, link=0.25)
    spans = [simulate(automatic(4, 12, costs, most), costs).makespan for most in (1, 2, 3, 4, 6, 8)]
    assert spans == sorted(set(spans), reverse=True)
    assert spans[-1] < simulate(build("zb-h2", 4, 12), costs).makespan


def test_a_generator_of_the_user_is_told_the_costs(monkeypatch):
    monkeypatch.setattr("raypar.schedules.catalog._TABLE", dict(CATALOG))
    told = []

    @register("mine")
    def mine(num_ranks, num_microbatches, *, costs=None):
        told.append(costs)
        return build("gpipe", num_ranks, num_microbatches).rows

    import raypar.schedules.catalog as catalog

    build("mine", 2, 2, costs=SMALL, catalog=catalog._TABLE)
    build("mine", 2, 2, catalog=catalog._TABLE)
    assert told == [SMALL, None]


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"most": 0.5}, "set most to 1 or more"),
        ({"kept": 1.5}, "set it from 0 to 1"),
        ({"placement": (0, 2, 0)}, "name each of the ranks 0 to 1 once or more, and no other"),
        ({"costs": replace(SMALL, f=float("nan"))}, "F of stage 0 last for no finite time: correct the costs"),
        ({"costs": replace(SMALL, w=float("inf"))}, "W of stage 0 last for no finite time: correct the costs"),
        ({"costs": replace(SMALL, i=0, w=0)}, "I of stage 0 take no time: measure a schedule with split backwards"),
    ],
)
def test_what_the_search_can_not_use_is_refused_with_the_fix(change, fix):
    with pytest.raises(ScheduleError, match=fix):
        automatic(**{"num_ranks": 2, "num_microbatches": 4, "costs": SMALL, "most": 2} | change)


def test_a_refused_search_is_told_once():
    with pytest.raises(ScheduleError, match=r"^schedule 'zb-1p' cannot be made: costs say that F of stage 0 take no"):
        build("zb-1p", 2, 4, costs=Costs(f=0.0))
