"""Exceptions as text that is short enough to be passed on."""

from __future__ import annotations

import traceback

_LONGEST = 2000  # characters of an exception's text


def described(error: Exception) -> str:
    """Kind and text of a user's exception, whose ``__str__`` may fail or go on for pages."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def trace() -> str:
    """Where the exception that is being handled was raised."""
    text = traceback.format_exc()
    return text if len(text) <= 4 * _LONGEST else text[-4 * _LONGEST :]
