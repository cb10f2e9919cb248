"""A REPL for a job and its stepper, with tab completion of actions."""

from __future__ import annotations

import code
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import raypar
from raypar.errors import ConfigError, JobError, UnknownNameError
from raypar.job.job import Job
from raypar.schedules.catalog import names
from raypar.schedules.schedule import ScheduleError
from raypar.schedules.step_board import MoveError, makes_tensors

_CALL = re.compile(r"""(\w+)\.(do|run_to|why|peek|swap|param|grad)\(\s*["']([\w.-]*)$""")
_MISTAKES = (
    ConfigError,
    ScheduleError,
    MoveError,
    JobError,
    StopIteration,
    KeyboardInterrupt,
    UnknownNameError,
)  # errors that need no traceback

Namespace = dict[str, Any]


def interact(job: Job) -> None:
    """Run a Python console on standard input, with ``job``, its stepper ``s`` and ``rp``, until the input ends."""
    shown = Path(__file__).with_name("repl.txt").read_text()
    namespace: Namespace = {"job": job, "s": job.stepper(), "rp": raypar, "__name__": "__console__"}
    tab_completion(namespace)
    with suppress(SystemExit):  # exit() leaves the console
        _Console(namespace).interact(banner=f"{shown}\n{namespace['s']!r}", exitmsg="")


def tab_completion(namespace: Namespace) -> None:
    """Turn on tab completion in this process's REPL, also of actions in ``s.do("`` and similar calls.

    In your own REPL, call ``raypar.tab_completion(globals())``. In IPython it adds to IPython's own completion.

    Args:
        namespace: The names to complete.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.set_hook(
            "complete_command",
            lambda _, event: call_completions(namespace, event.line) or [],
            re_key=f".*{_CALL.pattern}",
        )
        return
    with suppress(ImportError):  # a Python without readline
        import readline
        import rlcompleter

        names_of = rlcompleter.Completer(namespace).complete
        readline.set_completer(_completer(namespace, readline.get_line_buffer, names_of))
        readline.parse_and_bind("tab: complete")


def call_completions(namespace: Namespace, line: str) -> list[str] | None:
    """Return the completions for the quoted argument of a call of a stepper's or job's method.

    Args:
        namespace: The names of the REPL.
        line: The input up to the cursor, such as ``s.do("0F``.

    Returns:
        The whole arguments that fit; None if the line does not end in such a call.
    """
    found = _CALL.search(line)
    owner = namespace.get(found[1]) if found else None
    offered = None if found is None else _offered(owner, found[2])
    if found is None or offered is None:
        return None
    texts = dict.fromkeys(map(str, offered))  # an action may be repeated
    return [text for text in texts if text.startswith(found[3])]


def _offered(owner: object, method: str) -> Iterable[object] | None:
    """Return the sensible arguments of a method; None if the owner has no such method."""
    if isinstance(owner, Job):
        return owner.parameters if method in ("param", "grad") else None
    if not isinstance(owner, raypar.Stepper):
        return None
    offered: dict[str, Callable[[], Iterable[object]]] = {
        "do": owner.ready,
        "run_to": lambda: owner.left,
        "why": lambda: (*owner.left, *owner.done),
        "peek": lambda: filter(makes_tensors, owner.done),
        "swap": names,
    }
    return offered[method]() if method in offered else None


def _completer(
    namespace: Namespace, line: Callable[[], str], names_of: Callable[[str, int], str | None]
) -> Callable[[str, int], str | None]:
    """Return a completer for readline, which asks for the first, second, ... completion until it gets None."""

    def complete(word: str, number: int) -> str | None:
        inside = call_completions(namespace, line())
        if inside is None:
            return names_of(word, number)
        return inside[number] if number < len(inside) else None

    return complete


class _Console(code.InteractiveConsole):
    """Console that shows only the text of a user's mistake, and other errors without the console's own frames."""

    def showsyntaxerror(self, filename: str | None = None, **_: object) -> None:
        self.write("".join(traceback.format_exception_only(sys.exc_info()[1])))

    def showtraceback(self) -> None:
        kind, error, trace = sys.exc_info()
        if isinstance(error, _MISTAKES):
            self.write(f"{type(error).__name__}: {error}".removesuffix(": ") + "\n")
        else:
            inner = trace.tb_next if trace is not None else None
            self.write("".join(traceback.format_exception(kind, error, inner)))
