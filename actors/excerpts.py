"""Exceptions as text that is short enough to be passed on."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

_LONGEST = 2000  # characters of an exception's text


def described(error: Exception) -> str:
    """Kind, text and notes of a user's exception, whose ``__str__`` may fail or go on for pages."""
    try:
        text = " ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def first_line(error: Exception) -> str:
    """An error's first line, its kind if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def trace() -> str:
    """Where the exception that is being handled was raised, from the user's own code on if it came to that."""
    kind, error, whole = sys.exc_info()
    theirs, ours = whole, _ours()
    while theirs is not None and theirs.tb_frame.f_code.co_filename.startswith(ours):
        theirs = theirs.tb_next
    text = "".join(traceback.format_exception(kind, error, theirs or whole))
    return text if len(text) <= 4 * _LONGEST else text[-4 * _LONGEST :]


def _ours() -> tuple[str, ...]:
    """Where raypar and torch stand; torch is not imported for it."""
    torch = find_spec("torch")
    folders = [Path(__file__).parents[1]] + ([Path(torch.origin).parent] if torch and torch.origin else [])
    return tuple(f"{folder}/" for folder in folders)


def plain_reason(error: Exception, seconds: float) -> str:
    """Why a communication failed, in a line; the backends' texts carry file names and stack frames.

    seconds  of its deadline
    """
    text = first_line(error)
    text = text.rsplit("] ", 1)[-1] if text.startswith("[") else text
    lowered = text.lower()
    if "caused pair closure" in lowered:  # Gloo's word for other waits of a group of which one expired
        return "the group was aborted"
    if "timed out" in lowered or "timeout" in lowered or isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s"
    if any(word in lowered for word in ("closed", "reset by peer", "broken pipe", "read error", "write error")):
        return "the connection was closed at the other end (the peer died or gave up)"
    return text
