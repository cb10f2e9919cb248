"""How many failures a run survives."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.recovery.failures import Failures

DIED = rp.ActorDiedError("actor pp=1 died during step 4; seen from the others: this differs from time to time")


def test_one_more_than_max_failures_is_raised_with_the_count():
    failures = Failures(2)
    failures.count(4, DIED)
    failures.count(5, rp.JobError("another"))
    with pytest.raises(rp.JobError, match="a third") as caught:
        failures.count(6, rp.JobError("a third"))
    assert caught.value.__notes__ == ["It was failure 3, and max_failures is 2."]


def test_the_same_in_one_step_is_no_accident():
    failures = Failures(9)
    failures.count(4, DIED)
    failures.count(4, rp.ActorDiedError("actor pp=1 died during step 4; seen from the others: something else"))
    failures.count(5, DIED)
    with pytest.raises(rp.ActorDiedError) as caught:
        failures.count(4, rp.ActorDiedError("actor pp=1 died during step 4"))
    assert caught.value.__notes__ == ["The same happened 3 times in step 4, so another try would not help."]


def test_without_max_failures_nothing_is_added():
    with pytest.raises(rp.JobError) as caught:
        Failures(0).count(1, rp.JobError("x"))
    assert not hasattr(caught.value, "__notes__")
