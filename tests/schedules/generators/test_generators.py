"""Every generator, at every size of a grid, against the check and against its closed forms."""

import pytest

from raypar.schedules import CATALOG, Costs, Entry, Schedule, ScheduleError, build, check, lower, names, simulate
from raypar.schedules.action import COMPUTE, Action, Op

RANKS = range(1, 9)
TF, TB = 3.0, 5.0
COSTS = Costs(f=TF, b=TB)


def sizes(name, ranks):
    """All (microbatches, chunks) of the grid that the generator takes."""
    chunks = {"interleaved": (2, 3, 4), "forward": (1, 2, 3, 4)}.get(name, (1,))
    return [(m, v) for m in range(1, 17) for v in chunks if name != "interleaved" or m % ranks == 0]


GRID = [(name, ranks) for name in names() for ranks in RANKS]


@pytest.mark.parametrize(("name", "ranks"), GRID)
def test_every_size_passes_the_check_before_and_after_lowering(name, ranks):
    for microbatches, chunks in sizes(name, ranks):
        schedule = build(name, ranks, microbatches, chunks)
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)
        assert schedule.placement == tuple(range(ranks)) * chunks
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
            order = [action.microbatch for action in row if action.stage == stage and action.op is Op.B]
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


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, ranks in GRID if name != "forward"])
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
