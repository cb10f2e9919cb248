"""Ctrl-C and SIGTERM while actors work: the first one lets the calls under way finish, a second one ends them at once.

So the job stays usable after the first. Something is logged within a second of each.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)
Handler = Callable[[int, FrameType | None], Any]  # of a signal

_NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
_ONE_PRESS = 0.2  # seconds within which signals are those of one press: a parent process may send its own after it
_SILENT = 0.6  # seconds after a signal in which its handler, or the end of the command, may say something better
_latest = dict[int, float]()  # by the number of a signal, when a ``_Delay`` has handled one


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

    @property
    def has_come(self) -> bool:
        """Whether a signal has come that was not heeded yet."""
        return self.raises is not None

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
    SIGTERM, no later one is delayed. What is called because of a Ctrl-C or SIGTERM (a last save) delays none either:
    the next signal is the second one.

    Args:
        what: The operation of the actors, for the message.
        is_too_long: Returns whether a SIGTERM now must not wait, because its sender would kill the process before the
            operation ends.

    Yields:
        The object whose ``heed`` raises the exception of a delayed signal.
    """
    ctrl_c, is_second = CtrlC(), _is_interrupted()
    handlers = _handlers() if _in_main_thread() else {}
    delays = {number: _Delay(handler, ctrl_c, what, is_too_long, is_second) for number, handler in handlers.items()}
    with _handled(delays):
        yield ctrl_c


@contextmanager
def impatience() -> Iterator[None]:
    """Within a block of ``patience``, interrupt at once during the context, also for a signal that was delayed."""
    found = {number: signal.getsignal(number) for number in _NAMES if _in_main_thread()}
    delays = {number: delay for number, delay in found.items() if isinstance(delay, _Delay)}
    with _handled({number: delay.handler for number, delay in delays.items()}):
        for delay in delays.values():
            delay.ctrl_c.heed()
        yield


@contextmanager
def unannounced() -> Iterator[None]:
    """Log nothing of signals within the context, because the user sees what they end."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def answered() -> Iterator[None]:
    """Log within a second that a Ctrl-C or SIGTERM has come, also while the main thread runs no Python code.

    A thread does it, unless a handler was faster. Of nested blocks only the outermost has an effect, and only in the
    main thread, unless another library watches the signals.
    """
    if not _in_main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:  # of an outer block, or of an event loop
        signal.set_wakeup_fd(before)
    thread = threading.Thread(target=_answer, args=(reading,), name="raypar-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(writing)
        thread.join()
        os.close(reading)


def _answer(signals: int) -> None:
    """Log each signal whose number comes from a pipe, until the pipe is closed, unless its handler has logged it."""
    came, number, is_due = 0.0, 0, False
    while True:
        ready, _, _ = select.select([signals], [], [], max(0.0, came + _SILENT - time.monotonic()) if is_due else None)
        if not ready:
            is_due = False
            if _latest.get(number, 0.0) < came - _ONE_PRESS:
                log.warning("%s", _message(number))
            continue
        if not (read := os.read(signals, 1)):
            return
        if read[0] in _NAMES and (read[0] != number or time.monotonic() - came > _ONE_PRESS):
            came, number, is_due = time.monotonic(), read[0], True


def _message(number: int) -> str:
    """Return what a signal does whose handler did not run yet, or has raised an exception."""
    handler = signal.getsignal(number)
    if isinstance(handler, _Delay) and not handler.ends(number):
        return handler.message(number)
    return f"{_NAMES[number]}: ending what is under way"


@dataclass
class _Delay:
    """A handler that delays the first signal.

    Attributes:
        handler: The previous handler of the signal.
        ctrl_c: Records a signal that has come.
        what: The operation of the actors.
        is_too_long: Returns whether a SIGTERM must not wait for it.
        is_second: Whether a signal has come already, for which the operation is called.
    """

    handler: Handler
    ctrl_c: CtrlC
    what: str
    is_too_long: Callable[[], bool]
    is_second: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before, now = _latest.get(number, -_ONE_PRESS), time.monotonic()
        if now - before < _ONE_PRESS:
            return
        ends = self.ends(number)
        if isinstance(self.handler, Sigterm):
            self.handler.came = True
        if ends:
            self.handler(number, frame)
        _latest[number] = now
        self.ctrl_c.raises = lambda: self.handler(number, frame)
        log.warning("%s", self.message(number))

    def ends(self, number: int) -> bool:
        """Return whether a signal that comes now ends the operation at once."""
        again = self.is_second or self.ctrl_c.has_come or (isinstance(self.handler, Sigterm) and self.handler.came)
        return again or (number == signal.SIGTERM and self.is_too_long())

    def message(self, number: int) -> str:
        """Return the message for a signal that is delayed."""
        verb = "press" if number == signal.SIGINT else "send"
        again = f"{verb} it again to end the job at once, which may lose steps"
        return f"{_NAMES[number]}: waiting for the actors to finish {self.what}; {again}"


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_interrupted() -> bool:
    """Return whether this is called while a Ctrl-C or SIGTERM unwinds the stack."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        error = error.__context__
    return False


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
    found = {number: signal.getsignal(number) for number in _NAMES}
    return {
        number: handler
        for number, handler in found.items()
        if callable(handler) and (handler is signal.default_int_handler or isinstance(handler, Sigterm))
    }
