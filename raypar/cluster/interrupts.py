"""Ctrl-C and SIGTERM while actors work: the first one lets the calls under way finish, a second one ends them at once.

So the job stays usable after the first.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)
Handler = Callable[[int, FrameType | None], Any]  # of a signal


class Sigterm:
    """A handler of SIGTERM: it raises SystemExit, which ends the actors. ``patience`` delays the first SIGTERM.

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
        raises: Raises the exception of the latest signal; None if none has come.
    """

    def __init__(self) -> None:
        self.raises: Callable[[], Any] | None = None

    def heed(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed, SystemExit if SIGTERM has come."""
        if (raises := self.raises) is not None:
            self.raises = None
            raises()


@contextmanager
def patience(what: str, is_too_long: Callable[[], bool] = lambda: False) -> Iterator[CtrlC]:
    """Delay a Ctrl-C or SIGTERM until ``heed`` is called; a second one interrupts at once.

    Of nested blocks only the outermost has an effect. Nothing is delayed outside the main thread, which alone receives
    signals. For SIGINT only Python's default handler is replaced, and for SIGTERM only a ``Sigterm``: after a first
    SIGTERM, no later one is delayed.

    Args:
        what: The operation of the actors, for the message.
        is_too_long: Returns whether a SIGTERM now must not wait, because its sender would kill the process before the
            operation ends.

    Yields:
        The object whose ``heed`` raises the exception of a delayed signal.
    """
    ctrl_c = CtrlC()
    handlers = _handlers() if threading.current_thread() is threading.main_thread() else {}
    with _handled({number: _Delay(handler, ctrl_c, what, is_too_long) for number, handler in handlers.items()}):
        yield ctrl_c


@contextmanager
def impatience() -> Iterator[None]:
    """Within a block of ``patience``, interrupt at once during the context, also for a signal that was delayed."""
    here = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here}
    delays = {int(number): delay for number, delay in found.items() if isinstance(delay, _Delay)}
    with _handled({number: delay.handler for number, delay in delays.items()}):
        for delay in delays.values():
            delay.ctrl_c.heed()
        yield


@dataclass
class _Delay:
    """A handler that delays the first signal.

    Attributes:
        handler: The previous handler of the signal.
        ctrl_c: Records a signal that has come.
        what: The operation of the actors.
        is_too_long: Returns whether a SIGTERM must not wait for it.
    """

    handler: Handler
    ctrl_c: CtrlC
    what: str
    is_too_long: Callable[[], bool]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = self.ctrl_c.raises is not None or (isinstance(self.handler, Sigterm) and self.handler.came)
        if isinstance(self.handler, Sigterm):
            self.handler.came = True
        if again or (number == signal.SIGTERM and self.is_too_long()):
            self.handler(number, frame)
        self.ctrl_c.raises = lambda: self.handler(number, frame)
        message = "SIGTERM: waiting for the actors to finish %s; send it again to end the job at once"
        if number == signal.SIGINT:
            message = "Ctrl-C: waiting for the actors to finish %s; press it again to end the job"
        log.warning(message, self.what)


@contextmanager
def _handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Set the handlers of signals for the time of the context."""
    before = {number: signal.getsignal(number) for number in handlers}
    for number in handlers:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Handler]:
    """Return the handlers that may be replaced, by the number of the signal."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {
        int(number): handler
        for number, handler in found.items()
        if callable(handler) and (handler is signal.default_int_handler or isinstance(handler, Sigterm))
    }
