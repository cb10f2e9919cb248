"""Errors that tell all that is wrong at once."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Self

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


class ActionError(RuntimeError):
    """An action that failed: on which actor, which action, with which peer, and why.

    ``secondary`` marks a failed communication: its cause is often another actor's error.
    """

    def __init__(self, actor: str, action: str, peer: str | None, reason: str, secondary: bool, trace: str) -> None:
        super().__init__(actor, action, peer, reason, secondary, trace)
        self.actor, self.action, self.peer, self.reason = actor, action, peer, reason
        self.secondary, self.trace = secondary, trace

    def __str__(self) -> str:
        whom = f" with {self.peer}" if self.peer else ""
        return f"actor {self.actor}: action {self.action}{whom} failed: {self.reason}"


class NonFiniteError(ArithmeticError):
    """The gradients of a step are not finite; no actor updated its weights."""


class StaleError(RuntimeError):
    """A step that was handed over behind one that could not be made: nothing of it was done."""


class FaultsError(Exception):
    """Base of errors that list faults, a sentence each with its fix; its kinds derive from a standard error besides."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"- {fault}" for fault in faults))

    def __reduce__(self) -> tuple[type[Self], tuple[list[str]]]:
        return type(self), (self.faults,)


class CheckpointError(FaultsError, RuntimeError):
    """A checkpoint that can't be written or read: all that is wrong, a sentence each. Older ones are untouched."""
