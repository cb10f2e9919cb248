"""Ctrl-C while actors work: the first one lets the calls under way finish, a second one interrupts at once.

So the job stays usable after the first.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class CtrlC:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def heed(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt


@contextmanager
def patience(what: str) -> Iterator[CtrlC]:
    """Delay a Ctrl-C until ``heed`` is called; a second one interrupts at once.

    Of nested blocks only the outermost has an effect. Nothing is delayed outside the main thread, which alone receives
    signals, or if SIGINT has another handler than Python's own.

    Args:
        what: What the actors are doing, for the message on Ctrl-C.

    Yields:
        The object whose ``heed`` raises the delayed KeyboardInterrupt.
    """
    ctrl_c = CtrlC()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield ctrl_c
        return

    def press(number: int, frame: FrameType | None) -> None:
        if ctrl_c.pressed:
            signal.default_int_handler(number, frame)
        ctrl_c.pressed = True
        log.warning("Ctrl-C: waiting for the actors to finish %s; press it again to end the job", what)

    signal.signal(signal.SIGINT, press)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
