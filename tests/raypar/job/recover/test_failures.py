"""How many failures a run survives."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.errors import Death, PreemptedError
from raypar.job.recover.failures import Failure, Failures, failure_line

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


def test_the_end_of_a_node_that_was_announced_does_not_count():
    failures, announced = Failures(1), rp.ActorDiedError("actor pp=1 died", Death(is_preempted=True))
    for _ in range(4):
        failures.count(4, announced)
        failures.count(4, DIED, is_foreseen=True)
    failures.count(4, DIED)
    with pytest.raises(rp.ActorDiedError):
        Failures(0).count(4, announced)
    with pytest.raises(PreemptedError):
        failures.count(4, PreemptedError("second is taken away"))


def test_a_death_is_told_in_one_line_with_its_reason():
    death = Death("ended by SIGSEGV", None, "SIGSEGV", False, "1F0 of step 4", ("Fatal",), "/logs/a.err")
    error = rp.ActorDiedError("actor pp=1 died during step 4; seen from the others: this", death)
    assert failure_line(error) == (
        "actor pp=1 died during step 4: it was ended by SIGSEGV; it died in or after 1F0 of step 4, the last action "
        "that it began"
    )
    assert failure_line(DIED) == "actor pp=1 died during step 4"
    assert str(Failure.ending(4, error, 2, "step-00000002", 1.0)) == "the run has ended: actor pp=1 died during step 4"
