"""Ctrl-C and SIGTERM while actors work: the first one lets the calls under way finish, a second one ends them at once.

So the job stays usable after the first.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class Sigterm:
    """A handler of SIGTERM: it raises SystemExit, so that the actors are ended. ``patience`` delays the first one.

    Attributes:
        came: Whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise SystemExit with the number of the signal."""
        self.came = True
        sys.exit(number)


class CtrlC:
    """Whether Ctrl-C was pressed, or SIGTERM has come.

    Attributes:
        raises: Raises what the latest signal stands for; None if none has come.
    """

    def __init__(self) -> None:
        self.raises: Callable[[], Any] | None = None

    def heed(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed, SystemExit if SIGTERM has come."""
        if (raises := self.raises) is not None:
            self.raises = None
            raises()


@contextmanager
def patience(what: str) -> Iterator[CtrlC]:
    """Delay a Ctrl-C or SIGTERM until ``heed`` is called; a second one interrupts at once.

    Of nested blocks only the outermost has an effect. Nothing is delayed outside the main thread, which alone receives
    signals. Of SIGINT only Python's own handler is replaced, and of SIGTERM only a ``Sigterm``: one that has come is
    followed by no more patience with the next.

    Args:
        what: What the actors are doing, for the message.

    Yields:
        The object whose ``heed`` raises what was delayed.
    """
    ctrl_c = CtrlC()
    handlers = _handlers() if threading.current_thread() is threading.main_thread() else {}

    def press(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        again = ctrl_c.raises is not None or (isinstance(handler, Sigterm) and handler.came)
        if isinstance(handler, Sigterm):
            handler.came = True
        if again:
            handler(number, frame)
        ctrl_c.raises = lambda: handler(number, frame)
        told = "SIGTERM: waiting for the actors to finish %s; send it again to end the job at once"
        if number == signal.SIGINT:
            told = "Ctrl-C: waiting for the actors to finish %s; press it again to end the job"
        log.warning(told, what)

    for number in handlers:
        signal.signal(number, press)
    try:
        yield ctrl_c
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """Return the handlers that may be replaced, by the number of the signal."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {
        int(number): handler
        for number, handler in found.items()
        if callable(handler) and (handler is signal.default_int_handler or isinstance(handler, Sigterm))
    }
