"""``check`` says of random and damaged schedules what ranks that perform them find out; schedule_fuzz.py has more."""

from collections import Counter

import pytest

from raypar.schedules import Schedule, build, lower
from tests.long.schedule_fuzz import disagreements
from tests.support.event_check import unsound
from tests.support.version_check import most_kept


@pytest.mark.parametrize("stream", [False, True])
def test_check_and_events_agree(stream):
    counts = Counter()
    found = [text for seed in range(-100, 0) for text in disagreements(seed, counts, stream=stream)]
    assert not found, "\n".join(found)
    assert min(counts["all", "sound"], counts["all", "unsound"]) > 60, counts
    if stream:
        assert min(counts["versions bounded", "sound"], counts["versions bounded", "unsound"]) > 12, counts


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0 0B0", None),
        ("0F0 0I0 0W0 STEP", None),
        ("0B0 0F0", "0B0 before its F"),
        ("0F0 0W0 0I0", "0W0 before its I"),
        ("0F0 0B0 0W0", "computed twice"),
        ("0F0 0B0 0F1", "nobody did I of stage 0, microbatch 1"),
        ("0F0 STEP 0B0", "before all of its gradients"),
        ("0F0 0B0 STEP STEP", "a STEP too many"),
        ("0F0 0B0 STEP 0REDUCE_GRAD", "that the optimizer has used already"),
        ("0F0 0B0 0SEND_F0 STEP", "no other end"),
        ("0F0 0SEND_F0 STEP 0RECV_B0 0B0|1RECV_F0 1F0 1B0 1SEND_B0 STEP", "rank 0 takes the STEP before all"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 STEP|1RECV_F0 1F0 1B0 STEP 1SEND_B0", "stuck: rank 0 at 0RECV_B0, rank 1 at STEP"),
        ("0F0 0SEND_F0 0RECV_B0 0B0|1RECV_F0 1F0 1B0 1SEND_B0 STEP", "a rank took no STEP"),
        ("0F0 0F1 0SEND_F0 0SEND_F1|1RECV_F1 1RECV_F0 1F0 1F1", "receives"),
        ("0F0 0SEND_F0 0SEND_F0|1RECV_F0 1F0", "sent twice"),
        ("0F0 0F1 0SEND_F0 0SEND_F1|1RECV_F0 1F0 1F1", "has no"),
        ("0F0 0REDUCE_GRAD 0B0", "no gradients to reduce"),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD", None),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "not all there when they are reduced"),
        ("0UNSHARD 0F0 0RESHARD 0UNSHARD 0I0 0RESHARD 0W0", None),
        ("0UNSHARD 0F0 0RESHARD 0B0", "0B0 has only a shard"),
        ("0F0 0B0 0RESHARD", "frees weights that are not whole"),
        ("0UNSHARD 0F0 0B0", "still whole in the end"),
        ("0UNSHARD 0F0 0B0 STEP 0RESHARD", "takes the STEP with whole weights"),
        ("0F0 0B0 0REDUCE_GRAD|1F0 1B0", "some stages reduced"),
    ],
)
def test_the_events_tell_what_is_wrong(rows, says):
    schedule = Schedule.of("mine", rows.split("|"), lowered="SEND" in rows)
    why = unsound(schedule)
    assert why is None if says is None else says in why


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("0F0 0B0 0STEP0 0USE1 0F1 0B1 0STEP1", None),
        ("0F0 0F1 0B0 0STEP0 0B1 0STEP1", None),
        ("0F0 0F1 0B0 0B1 0STEP0 0STEP1", "0STEP0 is update 0 and has the gradients of [0, 1]"),
        ("0F0 0B0 0STEP0 0F1 0B1 0STEP0 0STEP1", "0STEP0 is update 1"),
        ("0F0 0B0 0STEP1 0F1 0B1 0STEP0", "0STEP1 is update 0"),
        ("0F0 0B0 0F1 0B1 0STEP1", "0STEP1 is update 0"),
        ("0F0 0B0 0STEP0 0USE2 0F1 0B1 0STEP1", "0USE2, but there are versions 0 to 1"),
        ("0F0 0B0 0STEP0 0F1 0B1 0REDUCE_GRAD 0STEP1", "gradients that are not reduced"),
        ("0UNSHARD 0F0 0B0 0STEP0 0F1 0B1 0RESHARD 0STEP1", "takes a STEP with whole weights"),
        ("0F0 0B0 0STEP0 0F1 0B1 0STEP1 STEP", "a STEP too many"),
    ],
)
def test_the_events_tell_wrong_updates_and_versions(row, says):
    schedule = Schedule.of("mine", [row], lowered=True)
    why = unsound(schedule)
    assert why is None if says is None else says in why
    assert schedule.stream == 2


def test_the_versions_kept_are_counted():
    late = Schedule.of("mine", ["0F0 0F1 0F2 0B0 0STEP0 0B1 0STEP1 0I2 0STEP2 0W2"])
    assert most_kept(late, 0) == 2, "version 1 is neither newest nor needed any more when version 2 is made"
    assert [most_kept(build("pipedream", 3, 1, steps=5), stage) for stage in range(3)] == [3, 2, 1]


def test_sends_that_block_are_told_from_others():
    schedule = lower(build("1f1b", 3, 6))
    assert unsound(schedule) is unsound(schedule, 1) is None
    assert "stuck" in unsound(schedule, 0)
    assert unsound(lower(build("1f1b", 3, 6), "one_sweep"), 0) is None
