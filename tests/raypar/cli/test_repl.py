"""The REPL on a stepper: what Tab offers, and how mistakes are told."""

from __future__ import annotations

import io
import sys

import pytest

from raypar.cli import repl
from raypar.errors import UnknownNameError
from tests.support.team import Team, linears
from tests.support.thread_jobs import Hands


@pytest.fixture
def stepper():
    return Hands(Team(linears(), 2, 2, "gpipe")).stepper()


def offered(stepper, line):
    return repl.call_completions({"s": stepper, "other": 1}, line)


def test_tab_offers_what_makes_sense(stepper):
    assert offered(stepper, 's.do("') == ["0F0", "0F1"]
    assert offered(stepper, "s.do('0F1") == ["0F1"]
    assert offered(stepper, 's.peek("') == []
    stepper.run_to("0RECV_B0")
    assert offered(stepper, 'x = s.do( "') == ["1I1", "0B0", "1W0"]
    assert offered(stepper, 's.peek("1')[:2] == ["1RECV_F0", "1F0"]
    assert offered(stepper, 's.run_to("0') == ["0B0", "0RECV_B1", "0B1"]
    assert "STEP" in offered(stepper, 's.why("')
    assert offered(stepper, 's.swap("1f') == ["1f1b"]
    stepper.finish()
    assert offered(stepper, 's.do("') == []


@pytest.mark.parametrize("line", ['other.do("', 's.do("0F0")', "s.", 'nobody.do("', 's.next("', ""])
def test_elsewhere_python_completes(stepper, line):
    assert offered(stepper, line) is None


def test_readline_is_given_one_after_the_other(stepper):
    lines = iter(['s.do("'] * 3 + ["s.ne"])
    complete = repl._completer({"s": stepper}, lambda: next(lines), lambda word, number: f"{word}xt()")
    assert [complete("", number) for number in range(3)] == ["0F0", "0F1", None]
    assert complete("s.ne", 0) == "s.next()"


def test_a_mistake_is_told_by_its_text_and_the_session_goes_on(stepper, monkeypatch, capsys):
    class FakeJob:
        def stepper(self):
            return stepper

    def refuse():
        raise UnknownNameError("no parameter 'x': see job.parameters")

    monkeypatch.setattr(FakeJob, "param", staticmethod(refuse), raising=False)
    slips = ['s.do("0B0")', "job.param()", "raise KeyboardInterrupt", "1 / 0", "s.next(", "", ")", "s.do(' ", ""]
    lines = [*slips, 's.peek("0F0").norm > 0', "exit()", "2 / 0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    monkeypatch.setattr(repl, "tab_completion", lambda namespace: None)
    repl.interact(FakeJob())
    out, err = capsys.readouterr()
    assert 'MoveError: 0B0 waits for 0F0, which is ready: do("0F0")' in err
    assert "UnknownNameError: no parameter 'x': see job.parameters" in err
    assert "Traceback" in err and "ZeroDivisionError" in err
    assert err.count("Traceback") == 1
    assert "\nKeyboardInterrupt\n" in err
    assert "SyntaxError" in err
    assert "code.py" not in err and "codeop.py" not in err
    assert "1 of 15 moves done, next: 0SEND_F0 + 1RECV_F0" in out
    assert "True" in out
