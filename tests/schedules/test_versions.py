"""Asynchronous schedules: which version of its weights a stage computes with, and how many it keeps."""

import pytest

from raypar.schedules import Action, CheckError, Schedule, ScheduleError, build, check, from_csv, lower, to_csv
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.rules import most_in_flight
from raypar.schedules.versions import Versions, most_versions, staleness, versions_used

NAMES = ("pipedream", "pipedream-vertical", "pipedream-2bw")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_proved(name, ranks, steps):
    for microbatches in (ranks, ranks + 1) if name == "pipedream-2bw" else (1, 2, 3):
        schedule = build(name, ranks, microbatches, steps=steps)
        bound = max(most_versions(schedule))
        for reduce_grad in (False, True):
            check(lower(schedule, reduce_grad=reduce_grad), max_in_flight=ranks, max_versions=bound)
        assert (schedule.stream, schedule.num_microbatches) == (steps, steps * microbatches)
        assert most_in_flight(schedule) == most_in_flight(build("1f1b", ranks, steps * microbatches))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_papers_delays_and_numbers_of_versions(ranks):
    steps = 3 * ranks
    pipedream, vertical = (build(name, ranks, 1, steps=steps) for name in NAMES[:2])
    twice = build("pipedream-2bw", ranks, ranks, steps=steps)
    for stage in range(ranks):
        behind = ranks - 1 - stage
        assert versions_used(pipedream.rows[stage], stage) == {t: max(0, t - behind) for t in range(steps)}
        assert versions_used(vertical.rows[stage], stage) == {t: max(0, t - ranks + 1) for t in range(steps)}
        used = versions_used(twice.rows[stage], stage)
        assert used == {mb: max(0, mb // ranks - 1) for mb in range(steps * ranks)}
    assert most_versions(pipedream) == tuple(range(ranks, 0, -1))
    assert most_versions(twice) == (2,) * ranks
    assert most_versions(vertical) == (ranks,) * ranks
    assert most_versions(build("1f1b", ranks, 4)) == (1,) * ranks


def test_staleness_names_the_smallest_trace_of_unequal_versions():
    found = staleness(build("pipedream", 3, 1, steps=6))
    assert found.delays == ((0, 2), (0, 1), (0, 0))
    assert found.mixed == (1, 1, 0, 2, 1)
    assert found.lines()[-1].endswith("1F1 computes with version 0, 2F1 with version 1")
    for name in NAMES[1:]:
        assert staleness(build(name, 3, 3, steps=6)).mixed is None


def test_a_version_is_kept_while_it_is_newest_or_a_backward_needs_it():
    row = [
        Action.parse(word) for word in ["0F0", "0F1", "0B0", "0STEP0", "0USE1", "0F2", "0B1", "0STEP1", "0B2", "0STEP2"]
    ]
    versions, kept = Versions(row, 0), []
    for action in row:
        versions.perform(action)
        kept.append(versions.kept)
    assert kept == [(0,), (0,), (0,), (0, 1), (0, 1), (0, 1), (1,), (1, 2), (2,), (3,)]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_are_those_of_a_shorter_schedule(name):
    whole = build(name, 3, 3, steps=6)
    for steps in range(1, 7):
        assert first_steps(whole, steps) == build(name, 3, 3, steps=steps)
        check(first_steps(lower(whole, reduce_grad=True), steps))
    for schedule, steps in ((whole, 7), (whole, 0), (build("1f1b", 2, 4), 1)):
        with pytest.raises(ScheduleError, match="can't be taken"):
            first_steps(schedule, steps)


def test_a_stream_is_written_and_read():
    schedule = lower(build("pipedream-2bw", 2, 2, steps=3))
    assert from_csv(to_csv(schedule), schedule.name) == schedule


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("0F0 0B0 0STEP0 0F1 0B1", "stage 0 has no STEP1"),
        ("0F0 0STEP0 0B0 0F1 0B1 0STEP1", "0STEP0 comes before 1 weight gradients"),
        ("0F0 0F1 0B0 0B1 0STEP0 0STEP1", "0STEP0 would take weight gradients of step 1 too"),
        ("0F0 0B0 0USE2 0F1 0STEP0 0B1 0STEP1", "0USE2 uses a version that 0STEP1 makes"),
        ("0F0 0B0 0STEP1 0F1 0B1 0STEP0", "0STEP1 is the stage's update number 0"),
        ("0F0 0B0 0STEP0 0F1 0B1 0STEP1 STEP", "give each stage its own"),
        ("0F0 0B0 0STEP0 0F1 0B1 0STEP1 1STEP0", "1STEP0"),
        ("0F0 0B0 0STEP0 0F1 0B1 0STEP1 0STEP2", "0STEP2: the schedule has 2 steps only"),
        ("0F0 0B0 0STEP0 0F1 0B1 0REDUCE_GRAD 0STEP1", "0STEP0 takes weight gradients that are not reduced"),
        (
            "0F0 0B0 0REDUCE_GRAD 0STEP0 0F1 0B1 0STEP1 0REDUCE_GRAD",
            "0STEP1 takes weight gradients that are not reduced",
        ),
        ("0UNSHARD 0F0 0B0 0STEP0 0RESHARD 0UNSHARD 0F1 0B1 0RESHARD 0STEP1", "still whole at 0STEP0"),
    ],
)
def test_wrong_updates_and_uses_are_told(row, told):
    schedule = Schedule("wrong", (tuple(map(Action.parse, row.split())),), (0,), 2, True, False, 2)
    with pytest.raises(CheckError) as error:
        check(schedule)
    assert told in str(error.value)


@pytest.mark.parametrize("word", ["0USE0", "0USE1", "0STEP0"])
def test_versions_in_a_synchronous_schedule_are_refused(word):
    row = tuple(map(Action.parse, f"0F0 0B0 {word} STEP".split()))
    with pytest.raises(CheckError, match=f"{word} in a synchronous schedule"):
        check(Schedule("wrong", (row,), (0,), 1, True, False))


@pytest.mark.parametrize(("microbatches", "steps"), [(3, 2), (2, 3)])
def test_steps_of_unequal_length_are_refused(microbatches, steps):
    row = tuple(map(Action.parse, ["0F0", "0F1", "0B0", "0B1", "0STEP0", "0F2", "0B2", "0STEP1"]))
    with pytest.raises(CheckError, match=f"{microbatches} microbatches are not {steps} steps of equal length"):
        check(Schedule("wrong", (row,), (0,), microbatches, True, False, steps))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("0F0 0F1 0I0 0W0 0STEP0 0I1 0W1 0STEP1", "0W1 needs version 0"),
        ("0F0 0F1 0B0 0STEP0 0STEP1", "no backward of it comes"),
    ],
)
def test_a_bound_of_versions_is_checked_where_backwards_are_halved_or_missing(row, told):
    schedule = Schedule("wrong", (tuple(map(Action.parse, row.split())),), (0,), 2, True, False, 2)
    with pytest.raises(CheckError, match=told):
        check(schedule, max_versions=1)


def test_without_stashing_the_mismatch_is_named():
    with pytest.raises(CheckError) as error:
        check(build("pipedream", 2, 1, steps=4), max_versions=1)
    assert "0STEP0 makes it 2 versions of stage 0 (0, 1), the bound is 1: 0B1 needs version 0" in str(error.value)


def test_steps_of_unequal_length_are_no_schedule():
    with pytest.raises(ScheduleError, match="3 microbatches are not 2 steps of equal length"):
        Schedule.of("odd", ["0F0 0B0 0STEP0 0F1 0F2 0B1 0B2 0STEP1"])
    with pytest.raises(ScheduleError, match="set microbatches to 4 or more"):
        build("pipedream-2bw", 4, 3)
    with pytest.raises(ScheduleError, match="set steps to 1 or more"):
        build("pipedream", 4, 1, steps=0)
    for word in ("STEP0", "0STEP", "USE0", "0USE"):
        with pytest.raises(ValueError, match=word):
            Action.parse(word)
