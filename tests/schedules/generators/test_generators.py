"""Every generator, at every size of a grid, against the check and against its closed forms."""

import pytest

from raypar.schedules import CATALOG, Costs, Entry, Schedule, ScheduleError, build, check, lower, names, simulate
from raypar.schedules.action import COMPUTE, Action, Op

RANKS = range(1, 9)
TF, TB = 3.0, 5.0
COSTS = Costs(f=TF, b=TB)
SPLIT = "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"
V = SPLIT[2:]


def sizes(name, ranks):
    """All (microbatches, chunks) of the grid that the generator takes."""
    chunks = {"interleaved": (2, 3, 4), "forward": (1, 2, 3, 4)}.get(name, (2,) if name in V else (1,))
    return [(m, v) for m in range(1, 17) for v in chunks if name != "interleaved" or m % ranks == 0]


GRID = [(name, ranks) for name in names() for ranks in RANKS]
WHOLE = [(name, ranks) for name, ranks in GRID if name not in ("forward", *SPLIT)]


def ranks_of(ranks, chunks, name):
    """The rank of each stage."""
    return (*range(ranks), *reversed(range(ranks))) if name in V else tuple(range(ranks)) * chunks


@pytest.mark.parametrize(("name", "ranks"), GRID)
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


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, ranks in GRID if name != "forward"])
def test_backwards_of_every_stage_run_in_the_order_of_microbatches(name, ranks):
    for microbatches, chunks in sizes(name, ranks):
        schedule = build(name, ranks, microbatches, chunks)
        for stage in range(schedule.num_stages):
            row = schedule.rows[schedule.placement[stage]]
            for op in (Op.I, Op.W) if name in SPLIT else (Op.B,):
                order = [action.microbatch for action in row if action.stage == stage and action.op is op]
                assert order == list(range(microbatches))


def makespan(name, p, m, v):
    return {
        "naive": m * p * (TF + TB),
        "gpipe": (m + p - 1) * (TF + TB),
        "1f1b": (m + p - 1) * (TF + TB),
        "interleaved": (m * v + p - 1) * (TF + TB),
    }[name]


def in_flight(name, p, m, v):
    return {
        "naive": lambda s: 1,
        "gpipe": lambda s: m,
        "1f1b": lambda s: min(p - s, m),
        "interleaved": lambda s: min(2 * (p - s - 1) + (v - 1) * p + 1, m * v),
    }[name]


@pytest.mark.parametrize(("name", "ranks"), WHOLE)
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


@pytest.mark.parametrize("ranks", [4, 6, 8, 9, 16, 32])
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
    with pytest.raises(ScheduleError, match=r"no schedule 'interleave': did you mean 'interleaved'\?"):
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
        (("interleaved", 4, 10), "set microbatches to 8 or 12"),
        (("interleaved", 4, 2), "set microbatches to 4"),
        (("forward", 4, 2, 0), "set chunks to 1 or more"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_fix(arguments, fix):
    with pytest.raises(ScheduleError, match=fix):
        build(*arguments)


def test_generators_called_directly_refuse_what_the_catalog_refuses():
    with pytest.raises(ScheduleError, match="whole rounds"):
        CATALOG["interleaved"].generate(4, 6)
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
