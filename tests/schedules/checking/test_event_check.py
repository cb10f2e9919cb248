"""``check`` says of random and damaged schedules what ranks that perform them find out; schedule_fuzz.py has more."""

from collections import Counter

import pytest

from raypar.schedules import Schedule, build, lower
from tests.long.schedule_fuzz import disagreements
from tests.support.event_check import unsound


def test_check_and_events_agree():
    counts = Counter()
    found = [text for seed in range(-400, 0) for text in disagreements(seed, counts)]
    assert not found, "\n".join(found)
    assert min(counts["all", "sound"], counts["all", "unsound"]) > 300, counts


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


def test_sends_that_block_are_told_from_others():
    schedule = lower(build("1f1b", 3, 6))
    assert unsound(schedule) is unsound(schedule, 1) is None
    assert "stuck" in unsound(schedule, 0)
    assert unsound(lower(build("1f1b", 3, 6), "one_sweep"), 0) is None
