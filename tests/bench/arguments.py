"""What the programs of the bench have in common: the argument ``--smallest``, and rows in processes of their own."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the text of a program's module, as it is written there."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_words(parser: argparse.ArgumentParser, words: Sequence[str] | None, smallest: str) -> argparse.Namespace:
    """Parse a program's words.

    Args:
        parser: The program's; it gets the argument ``--smallest`` too.
        words: The words; None takes those of the command line.
        smallest: The words that ``--smallest`` stands for. Those that are given beside it go before them.
    """
    note = f" ({smallest})" if smallest else ""
    parser.add_argument("--smallest", action="store_true", help=f"the least that runs, for its test{note}")
    given = sys.argv[1:] if words is None else list(words)
    if "--smallest" not in given:
        return parser.parse_args(given)
    return parser.parse_args([*smallest.split(), *given])


def printed(module: str, words: Sequence[object], *, here: bool) -> str:
    """Return what a program prints, run in a process of its own, or, for a test, here in this one."""
    texts = [str(word) for word in words]
    if here:
        with redirect_stdout(io.StringIO()) as out:
            import_module(module).main(texts)
        return out.getvalue()
    command = [sys.executable, "-m", module, *texts]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
