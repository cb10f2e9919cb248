"""Answers are taken once each as they arrive, and questions to late actors are bounded, however many there are."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from raypar.cluster.calls import answers as answers_module
from raypar.cluster.calls.answers import LOOK, Answers, ProgressWatch
from tests.support.refs import Ref, answered

IDLE = SimpleNamespace(step=0, done=0, idle=True, action=None)


class Clock:
    """The time of the module under test, which passes when the test says so."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(answers_module, "time", clock)
    return clock


def test_answers_come_in_the_order_in_which_they_arrive_and_once():
    refs = [Ref() for _ in range(4)]
    waiting = Answers(zip(refs, (0, 1, 1, 2), strict=True))
    assert waiting.late == {0: 1, 1: 2, 2: 1} and waiting.take(0) == []
    refs[2].set_result("two")
    refs[0].set_exception(error := ValueError("zero"))
    assert waiting.take(0) == [(refs[2], 1, "two", None), (refs[0], 0, None, error)]
    assert waiting.late == {1: 1, 2: 1} and waiting.take(0) == []
    refs[1].set_result("one")
    assert waiting.take(0) == [(refs[1], 1, "one", None)] and waiting.late == {2: 1}


def test_a_call_is_awaited_once_however_often_it_is_named():
    ref = Ref()
    waiting = Answers([(ref, 0), (ref, 0)])
    ref.set_result(1)
    assert len(waiting.take(0)) == 1 and not waiting.late


def test_waiting_ends_with_the_first_answer_or_after_its_time():
    ref, start = Ref(), time.monotonic()
    waiting = Answers([(ref, 3), (Ref(), 4)])
    threading.Timer(0.05, ref.set_result, ["late"]).start()
    assert [one.value for one in waiting.take(10)] == ["late"] and time.monotonic() - start < 5
    assert waiting.take_within(0.05) == {}
    assert Answers().take(10) == [] and time.monotonic() - start < 5, "nothing is awaited"


@pytest.mark.parametrize("number", [64, 256, 4096])
def test_questions_a_second_are_bounded_and_nobody_is_forgotten(number, clock):
    asked = []

    def ask(rank):
        asked.append(rank)
        return answered(IDLE)

    watch, late = ProgressWatch(ask), range(number)
    for _ in range(int(20 / LOOK)):
        clock.now += LOOK
        watch.listen(late)
    assert len(asked) <= 50 + 20 * 200
    counts = [asked.count(rank) for rank in (0, 1, number // 2, number - 1)]
    assert min(counts) >= min(20 / LOOK - 1, 20 * 200 / number) // 2, "each gets its turn"


def test_looks_are_no_more_frequent_than_they_say(clock):
    watch = ProgressWatch(lambda rank: answered(IDLE))
    assert [watch.listen([0]) for _ in range(3)] == [True, False, False]
    clock.now += LOOK
    assert watch.listen([0])


def test_an_actor_is_silent_only_for_questions_that_it_was_asked(clock):
    refs = {}

    def ask(rank):
        return refs.setdefault(rank, Ref())

    watch = ProgressWatch(ask)
    watch.listen([0])
    clock.now += 7
    watch.listen([0, 1])
    assert (watch.silence(0), watch.silence(1)) == (7, 0), "the second was asked just now"
    refs[0].set_result(IDLE)
    clock.now += LOOK
    watch.listen([0, 1])
    assert watch.silence(0) == 0 and watch.silence(1) == LOOK


def test_an_actor_stays_in_an_action_as_long_as_its_answers_say_so(clock):
    at = SimpleNamespace(step=2, done=5, idle=False, action="1F0")
    watch = ProgressWatch(lambda rank: answered(SimpleNamespace(**vars(at))))
    for _ in range(5):
        watch.listen([0])
        clock.now += 2
    assert watch.stay(0) == (6, "1F0"), "from the first answer to the last one"
    at.done, at.action = 6, "1F1"
    watch.listen([0])
    clock.now += 2
    watch.listen([0])
    assert watch.stay(0) == (0, "1F1")


def test_what_an_actor_did_before_it_fell_silent_counts_until_now(clock):
    refs = [answered(SimpleNamespace(step=2, done=5, idle=False, action="1F0")), Ref()]
    watch = ProgressWatch(lambda rank: refs.pop(0))
    watch.listen([0])
    clock.now += 1
    watch.listen([0])  # hears the first answer, and asks again
    assert watch.stay(0) == (0, "1F0")
    clock.now += 60
    watch.listen([0])
    assert watch.silence(0) == 60 and watch.stay(0) == (60, "1F0")
