"""Ctrl-C and SIGTERM while actors work: the first waits, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from raypar.cluster import interrupts
from raypar.cluster.interrupts import Sigterm, answered, impatience, patience, unannounced


@pytest.fixture(autouse=True)
def sigterm(monkeypatch):
    """The handlers that a command of raypar has, for the time of a test."""
    monkeypatch.setattr(interrupts, "_ONE_PRESS", 0.0)
    monkeypatch.setattr(interrupts, "_latest", {})
    before, handler = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], Sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, handler)
    yield handler
    for number, one in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, one)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "raised", "told"),
    [
        (signal.SIGINT, KeyboardInterrupt, "Ctrl-C: waiting for the actors to finish it; press it again"),
        (
            signal.SIGTERM,
            SystemExit,
            "SIGTERM: waiting for the actors to finish it; send it again to end the job at once, which may lose steps",
        ),
    ],
)
def test_the_first_waits_and_a_second_one_ends_at_once(number, raised, told, caplog, sigterm):
    with patience("it") as ctrl_c:
        send(number)
        assert told in caplog.text
        with patience("more"):
            pass
    with pytest.raises(raised):
        ctrl_c.heed()
    ctrl_c.heed()
    with pytest.raises(raised), patience("it"):
        send(number)
        send(number)
    assert signal.getsignal(number) in (sigterm, signal.default_int_handler)


def test_a_sigterm_does_not_wait_for_what_takes_too_long_and_ctrl_c_does():
    with patience("it", lambda: True) as ctrl_c:
        send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.heed()
    with pytest.raises(SystemExit, match="15"), patience("it", lambda: True):
        send(signal.SIGTERM)
        pytest.fail("it was waited for")


def test_once_sigterm_has_come_the_next_one_waits_for_nothing(caplog, sigterm):
    with patience("it") as ctrl_c:
        send(signal.SIGTERM)
    assert sigterm.came
    with pytest.raises(SystemExit, match="15"):
        ctrl_c.heed()
    with pytest.raises(SystemExit, match="15"), patience("the checkpoint"):
        send(signal.SIGTERM)
    assert "the checkpoint" not in caplog.text


def test_sigterm_behind_ctrl_c_ends_at_once_and_outside_there_is_no_patience():
    with pytest.raises(SystemExit), patience("it"):
        send(signal.SIGINT)
        send(signal.SIGTERM)
    with pytest.raises(SystemExit):
        send(signal.SIGTERM)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_long_wait_within_ends_at_once_also_for_a_signal_that_was_delayed(number, raised, sigterm):
    with patience("it") as ctrl_c:
        with pytest.raises(raised), impatience():
            send(number)
        sigterm.came = False
        send(number)
        with pytest.raises(raised), impatience():
            pytest.fail("it has come before")
        ctrl_c.heed()
    with impatience():
        pass
    assert signal.getsignal(number) in (sigterm, signal.default_int_handler)


def test_a_handler_of_the_users_is_left_alone():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with patience("it") as ctrl_c:
        send(signal.SIGTERM)
    ctrl_c.heed()
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_what_is_called_for_a_signal_is_ended_by_the_next_one(number, raised, caplog, sigterm):
    """The last save, and steps that the actors have: also in a generator that is closed meanwhile."""

    def steps():
        try:
            yield
        finally:
            with pytest.raises(raised), patience("the last save"):
                send(number)
                pytest.fail("the second one was delayed")

    for ends in (lambda generator: generator.close(), next):
        sigterm.came, generator = False, steps()
        next(generator)
        with patience("it") as ctrl_c:
            send(number)
        try:
            ctrl_c.heed()
        except BaseException:
            with suppress(StopIteration):
                ends(generator)
    assert "the last save" not in caplog.text
    with patience("it"):
        pass


def test_signals_within_a_fifth_of_a_second_are_one_press(monkeypatch, caplog):
    monkeypatch.setattr(interrupts, "_ONE_PRESS", 10.0)
    with pytest.raises(KeyboardInterrupt), patience("it") as ctrl_c:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert len(caplog.messages) == 1
        interrupts._latest[signal.SIGINT] -= 10.0
        send(signal.SIGINT)
        pytest.fail("a later one was not the second")
    assert ctrl_c.has_come


def test_a_signal_is_answered_while_no_handler_runs(monkeypatch, caplog):
    monkeypatch.setattr(interrupts, "_SILENT", 0.02)
    monkeypatch.setattr(interrupts, "_ONE_PRESS", 0.2)
    with answered(), answered(), suppress(KeyboardInterrupt):
        threading.Timer(0.05, lambda: send(signal.SIGINT)).start()
        try:
            threading.Event().wait(5)
        except KeyboardInterrupt:
            time.sleep(0.3)  # to end takes as long
            raise
    assert caplog.messages == ["Ctrl-C: ending what is under way"]
    caplog.clear()
    with answered(), patience("it") as ctrl_c:
        send(signal.SIGINT)
        time.sleep(0.1)
    assert [ctrl_c.has_come, *caplog.messages] == [
        True,
        "Ctrl-C: waiting for the actors to finish it; press it again to end the job at once, which may lose steps",
    ]


def test_where_the_user_sees_what_a_signal_ends_nothing_is_logged(caplog):
    with pytest.raises(KeyboardInterrupt), unannounced(), patience("an answer") as ctrl_c:
        send(signal.SIGINT)
        ctrl_c.heed()
    assert not caplog.messages
    with patience("it"):
        send(signal.SIGINT)
    assert caplog.messages
