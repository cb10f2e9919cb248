"""Every generator, at every size of a grid, against the check and against its closed forms."""

from itertools import pairwise

import pytest

from raypar.schedules import CATALOG, Costs, Entry, Schedule, ScheduleError, build, check, lower, names, simulate
from raypar.schedules.action import COMPUTE, Action, Op
from tests.support.thinned import thinned

RANKS = thinned(range(1, 9), lambda ranks: ranks <= 4)
TF, TB = 3.0, 5.0
COSTS = Costs(f=TF, b=TB)
SEARCHED = "zb-1p", "zb-2p"
SPLIT = *SEARCHED, "zb-h1", "zb-h2", "zb-interleaved", "zb-v", "v-half", "v-min"
V = "zb-v", "v-half", "v-min", "dualpipe-v"
LOOPED = "interleaved", "looped-bfs", "zb-interleaved"


def sizes(name, ranks):
    """All (microbatches, chunks) of the grid that the generator takes."""
    if name in LOOPED:
        return [(m, 2 + m % 3) for m in (*range(1, 9), 11, 16)]
    if name in SEARCHED:
        return [(m, 1) for m in (1, 3, 2 * ranks)]
    chunks = (1, 2, 3, 4) if name == "forward" else (2,) if name in V else (1,)
    return [(m, v) for m in range(1, 17) for v in chunks]


OTHERS = ("dualpipe",)  # whose ranks have replicas: test_dual_pipe.py
SYNCHRONOUS = [
    name for name in names() if not CATALOG[name].is_stream and name not in OTHERS
]  # streams: test_versions.py
TRAINING = [name for name in SYNCHRONOUS if name != "forward"]
WHOLE = [name for name in TRAINING if name not in ("dualpipe-v", *SPLIT)]


def ranks_of(ranks, chunks, name):
    """The rank of each stage."""
    return (*range(ranks), *reversed(range(ranks))) if name in V else tuple(range(ranks)) * chunks


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_size_passes_the_check_before_and_after_lowering(name, ranks):
    for microbatches, chunks in sizes(name, ranks):
        schedule = build(name, ranks, microbatches, chunks)
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)
        assert schedule.placement == ranks_of(ranks, chunks, name)
        assert {action.op for row in schedule for action in row} <= COMPUTE
        assert schedule.forward_only == CATALOG[name].forward_only
        check(schedule)
        just_in_time = lower(schedule)
        check(just_in_time)
        check(just_in_time, send_capacity=8)
        check(lower(schedule, "one_sweep", reduce_grad=True), send_capacity=0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", TRAINING)
def test_backwards_of_every_stage_run_in_the_order_of_microbatches(name, ranks):
    for microbatches, chunks in sizes(name, ranks):
        schedule = build(name, ranks, microbatches, chunks)
        for stage in range(schedule.num_stages):
            row = schedule.rows[schedule.placement[stage]]
            for half in (Op.I, Op.W):
                order = [action.microbatch for action in row if action.stage == stage and action.op in (half, Op.B)]
                assert order == list(range(microbatches))


def makespan(name, p, m, v):
    return {
        "naive": m * p * (TF + TB),
        "gpipe": (m + p - 1) * (TF + TB),
        "1f1b": (m + p - 1) * (TF + TB),
        "interleaved": (max(m, p) * v + min(m, p) - 1) * (TF + TB),
        "looped-bfs": (max(m, p) * v + min(m, p) - 1) * (TF + TB),
    }[name]


def first_round(p, m):
    """Microbatches are dealt to as many rounds as have one for each rank."""
    return -(-m // max(1, m // p))


def in_flight(name, p, m, v):
    return {
        "naive": lambda s: 1,
        "gpipe": lambda s: m,
        "1f1b": lambda s: min(p - s, m),
        "interleaved": lambda s: min(2 * (p - s - 1) + (v - 1) * first_round(p, m) + 1, m * v),
        "looped-bfs": lambda s: m * v,
    }[name]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", WHOLE)
def test_makespan_bubble_and_memory_equal_the_closed_forms(name, ranks):
    for microbatches, chunks in sizes(name, ranks):
        schedule = build(name, ranks, microbatches, chunks)
        for timeline in (simulate(schedule, COSTS), simulate(lower(schedule), COSTS)):
            expected = makespan(name, ranks, microbatches, chunks)
            assert timeline.makespan == expected, timeline
            assert timeline.bubble == pytest.approx(1 - microbatches * chunks * (TF + TB) / expected)
            held = tuple(map(in_flight(name, ranks, microbatches, chunks), range(ranks)))
            assert timeline.in_flight == held
        check(schedule, max_in_flight=max(held))
        with pytest.raises(ScheduleError, match="in flight"):
            check(schedule, max_in_flight=max(held) - 1)


def idle(schedule, costs):
    """The share of idle time of the rank that takes longest, from its first action to its last."""
    rows = [
        [event for event in simulate(schedule, costs).events if event.rank == rank]
        for rank in range(schedule.num_ranks)
    ]
    longest = max(row[-1].end - row[0].start for row in rows)
    stages = schedule.num_stages // schedule.num_ranks
    return 1 - schedule.num_microbatches * stages * (costs.f + costs.i + costs.w) / longest


@pytest.mark.parametrize(
    ("costs", "ranks", "microbatches", "rates"),
    [
        (Costs(f=18.522, b=27.423, i=18.086, w=9.337, link=0.601), 8, 24, (0.2431, 0.1585, 0.1083)),
        (Costs(f=11.347, b=19.38, i=11.248, w=8.132, link=0.377), 16, 48, (0.2552, 0.1397, 0.0672)),
    ],
)
def test_idle_time_is_that_of_the_paper(costs, ranks, microbatches, rates):
    """Qi et al. 2023, Table 5."""
    found = [idle(build(name, ranks, microbatches), costs) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(rate, 4) for rate in found] == list(rates)


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_schedules_where_all_halves_last_equally_long(ranks):
    def held(name):
        return set(simulate(build(name, ranks, microbatches)).in_flight)

    microbatches = 2 * ranks + 3
    h1 = simulate(build("zb-h1", ranks, microbatches))
    assert h1.makespan == 3 * microbatches + ranks - 1
    assert held("zb-h1") == {ranks}
    assert held("zb-h2") == {2 * ranks - 1}
    assert held("zb-v") == {2 * ranks}
    assert idle(build("zb-h2", ranks, microbatches), Costs()) == 0
    assert idle(build("zb-v", ranks, microbatches), Costs()) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_interleaved_zero_bubble_where_all_halves_last_equally_long(ranks):
    for microbatches, chunks in sizes("zb-interleaved", ranks):
        found = simulate(build("zb-interleaved", ranks, microbatches, chunks))
        held = (chunks - 1) * first_round(ranks, microbatches) + ranks
        assert set(found.in_flight) == {min(held, microbatches * chunks)}
        if microbatches >= ranks:
            assert found.makespan == 3 * microbatches * chunks + ranks - 1


def overlapped(schedule, f, half, both):
    """Costs with which a pair of F and B is one action: its values leave at its end, ``both`` after its start."""
    pairs = {}
    for row in schedule.rows:
        for action, behind in pairwise(row):
            if action.op is Op.F and behind.op is Op.B and (action not in pairs) and is_overlapped(behind, schedule):
                pairs |= {action: both, behind: 0.0}
    return Costs(f=f, b=2 * half, i=half, w=half, of_action=pairs)


def is_overlapped(behind, schedule):
    """The last rank's first backward of a whole V does not wait for a forward."""
    return behind != Action(schedule.num_ranks, Op.B, 0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("both", "half"), [(3, 1), (2.5, 1), (2, 1), (7, 3)])
def test_the_bubble_of_dualpipe_is_that_of_its_authors(ranks, both, half):
    """(PP/2 - 1)(F&B + B - 3W), PP being the stages, where F, I and W last equally long."""
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks):
        schedule = build("dualpipe-v", ranks, microbatches)
        found = simulate(schedule, overlapped(schedule, half, half, both))
        busy = [0.0] * ranks
        for event in found.events:
            busy[event.rank] += event.end - event.start
        assert found.makespan - min(busy) == (ranks - 1) * (both + 2 * half - 3 * half)
        assert set(simulate(schedule).in_flight) == {2 * ranks + 1}
        assert simulate(schedule).makespan == 6 * microbatches + ranks - 1, "as two actions"


@pytest.mark.parametrize("ranks", thinned([4, 6, 8, 9, 16, 32], lambda ranks: ranks <= 9))
def test_vs_with_less_memory(ranks):
    microbatches = 3 * ranks
    whole = 6 * microbatches
    bubble = 6 * (ranks - 1)  # of 1F1B, in slots of a chunk
    half, least = (simulate(build(name, ranks, microbatches)) for name in ("v-half", "v-min"))
    assert max(half.in_flight) <= ranks + 3
    assert max(least.in_flight) <= 2 * ranks / 3 + 3
    assert half.makespan - whole <= bubble / 2 + 3
    assert least.makespan - whole <= bubble * 2 / 3 + 3


@pytest.mark.parametrize("ranks", RANKS)
def test_forward_is_a_full_pipeline_when_its_rounds_are_full(ranks):
    for microbatches, chunks in sizes("forward", ranks):
        timeline = simulate(build("forward", ranks, microbatches, chunks), COSTS)
        assert timeline.in_flight == (0,) * ranks
        if microbatches % ranks == 0:
            assert timeline.makespan == (microbatches * chunks + ranks - 1) * TF


def test_chunks_left_out_are_the_default_of_the_generator():
    assert build("1f1b", 2, 4).num_stages == 2
    assert build("interleaved", 2, 4).num_stages == 4
    assert build("forward", 2, 4).num_stages == 2


def test_an_unknown_name_is_answered_with_names_that_come_close():
    with pytest.raises(ScheduleError, match=r"no schedule 'interleave': did you mean 'interleaved' or"):
        build("interleave", 2, 4)
    with pytest.raises(ScheduleError, match=r"did you mean 'gpipe'"):
        build("GPipe", 2, 4)


def test_bad_sizes_are_all_named_at_once():
    with pytest.raises(ScheduleError) as raised:
        build("gpipe", 0, -1, 2)
    for fault in ("ranks=0", "microbatches=-1", "chunks=2", "set ranks to 1", "use 'interleaved'"):
        assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (("interleaved", 4, 8, 1), "use '1f1b'"),
        (("dualpipe-v", 4, 8, 3), "a V has two stages a rank"),
        (("forward", 4, 2, 0), "set chunks to 1 or more"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_fix(arguments, fix):
    with pytest.raises(ScheduleError, match=fix):
        build(*arguments)


def test_generators_called_directly_refuse_what_the_catalog_refuses():
    with pytest.raises(ScheduleError, match="chunks=1"):
        CATALOG["interleaved"].generate(4, 6, 1)
    with pytest.raises(ScheduleError, match="ranks=0"):
        CATALOG["naive"].generate(0, 6)


def test_a_catalog_of_the_users_own_can_hold_more():
    def serial(num_ranks, num_microbatches):
        return Schedule.of("serial", [[Action(0, Op.F, mb) for mb in range(num_microbatches)]])

    mine = {**CATALOG, "serial": Entry(serial, "one rank", CATALOG["naive"].sizes, forward_only=True)}
    assert build("serial", 1, 3, catalog=mine).num_actions == 3
    assert names(mine)[-1] == "serial"
    with pytest.raises(ScheduleError):
        build("serial", 1, 3)
