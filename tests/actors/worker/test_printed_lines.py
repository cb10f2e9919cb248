"""What is printed and what is logged on an actor is kept for the driver, and goes where it went before."""

from __future__ import annotations

import io
import logging

from raypar.actors.worker.actor import LoggedWarnings, PrintedLines


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


def test_warnings_of_raypar_and_of_graphs_are_kept():
    kept, root = LoggedWarnings(), logging.getLogger("raypar")
    try:
        logging.getLogger("raypar.actors.x").warning("%d things", 2)
        logging.getLogger("raypar.actors.x").info("none")
        logging.getLogger("torch._inductor.cudagraph_utils").warning("skipping cudagraphs due to a read")
        logging.getLogger("torch._inductor.utils").warning("too few cores")
        assert kept.take() == ("2 things", "skipping cudagraphs due to a read")
        assert kept.take() == ()
    finally:
        root.removeHandler(kept)
        logging.getLogger("torch._inductor").removeHandler(kept)
