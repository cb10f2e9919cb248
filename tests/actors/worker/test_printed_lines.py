"""What is printed on an actor is kept for the driver, and goes where it went before."""

from __future__ import annotations

import io

from raypar.actors.worker.actor import PrintedLines


def test_lines_are_kept_until_they_are_taken():
    through = io.StringIO()
    lines = PrintedLines(through)
    print("one\ntwo\nthr", end="", file=lines)
    assert lines.take() == ("one", "two")
    print("ee", file=lines)
    print("x" * 5000, file=lines)
    assert lines.take() == ("three", "x" * 2000)
    assert lines.take() == ()
    assert through.getvalue() == "one\ntwo\nthree\n" + "x" * 5000 + "\n"
    assert not lines.isatty()


def test_of_many_lines_some_are_kept():
    lines = PrintedLines(io.StringIO())
    for number in range(1234):
        print(number, file=lines)
    taken = lines.take()
    assert taken[:200] == tuple(map(str, range(200)))
    assert taken[200:] == ("(and 1,034 more lines, which are in Ray's log of the actor)",)
    print("next", file=lines)
    assert lines.take() == ("next",)
