"""Errors of the actors, and descriptions of exceptions. Errors that list faults report all of them at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary
from types import TracebackType
from typing import Self

from raypar.schedules.drawing.notebook import own_lines

_LONGEST = 2000  # characters of an exception's text
_BLAMED = "raypar_blamed"  # the attribute of an exception that holds the user's line


def described(error: Exception) -> str:
    """Return an exception's type, text and notes.

    A user's ``__str__`` may fail or return pages, so the text is shortened.
    """
    try:
        text = " ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def user_traceback() -> str:
    """Format the traceback of the exception being handled, from the user's code on.

    It begins with the first frame of the user's code, else with the user's line that ``blame`` has set, before the
    frames below raypar's. Without either it begins below raypar's frames, and is whole if there are none. It ends with
    the last frame if ``described`` has the text after it.
    """
    kind, error, whole = sys.exc_info()
    assert kind is not None and error is not None
    line: FrameSummary | None = getattr(error, _BLAMED, None)
    theirs = _outside(whole, _ours())
    shown = traceback.TracebackException(kind, error, theirs or _outside(whole, _ours()[:1]) or whole)
    if theirs is None and line is not None:
        shown.stack.insert(0, line)
    end = "".join(shown.format_exception_only())
    text = "".join(shown.format())
    if isinstance(error, Exception) and " ".join(end.split()).endswith(" ".join(described(error).split())):
        text = text.removesuffix(end)
    return text if len(text) <= 4 * _LONGEST else text[-4 * _LONGEST :]


def blame(error: Exception, line: FrameSummary) -> None:
    """Set the user's line that caused an error, for ``user_traceback``, if it is not among the error's frames."""
    setattr(error, _BLAMED, line)


def is_ours(filename: str) -> bool:
    """Return whether a source file is raypar's or torch's."""
    return filename.startswith(_ours())


def _outside(frames: TracebackType | None, folders: tuple[str, ...]) -> TracebackType | None:
    """Return the traceback from the first frame outside of some folders on; None if there is none."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folders):
        frames = frames.tb_next
    return frames


@cache
def _ours() -> tuple[str, ...]:
    """Return the folders of raypar and torch, without importing torch."""
    torch = find_spec("torch")
    folders = [Path(__file__).parents[1]] + ([Path(torch.origin).parent] if torch and torch.origin else [])
    return tuple(f"{folder}/" for folder in folders)


class MaskError(ValueError):
    """An invalid attention mask: it does not define the keys that a query attends to."""


class ActionError(RuntimeError):
    """A failed action, with its actor, its peer and the reason.

    Args:
        actor: Label of the actor.
        action: The action.
        peer: Label of the peer; None without one.
        reason: The reason.
        secondary: Whether a communication failed, which is often the consequence of another actor's error.
        trace: The traceback.
    """

    def __init__(self, actor: str, action: str, peer: str | None, reason: str, secondary: bool, trace: str) -> None:
        super().__init__(actor, action, peer, reason, secondary, trace)
        self.actor = actor
        self.action = action
        self.peer = peer
        self.reason = reason
        self.secondary, self.trace = secondary, trace

    def __str__(self) -> str:
        whom = f" with {self.peer}" if self.peer else ""
        return f"actor {self.actor}: action {self.action}{whom} failed: {self.reason}"


class NonFiniteError(ArithmeticError):
    """The gradients of a step are not finite. No actor updated its weights."""

    _render_traceback_ = own_lines


class OffloadError(RuntimeError):
    """There is no space for tensors that are offloaded, or the disk with them fails."""


class RouterError(NonFiniteError):
    """The gradients of a step are not finite, because the scores of a router were not."""


class StaleError(RuntimeError):
    """A call of another epoch, such as a step that was queued after a failed one. It was not executed."""


class FaultsError(Exception):
    """Base of errors that list faults, each a sentence with its fix. Subclasses also derive from a standard error."""

    _render_traceback_ = own_lines

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(faults[0] if len(faults) == 1 else "\n".join(f"- {fault}" for fault in faults))

    def __reduce__(self) -> tuple[type[Self], tuple[list[str]]]:
        return type(self), (self.faults,)

    @classmethod
    def raise_if(cls, faults: Iterable[str]) -> None:
        """Raise an error with all faults, if there are any."""
        if found := [*faults]:
            raise cls(found)


class CheckpointError(FaultsError, RuntimeError):
    """A checkpoint cannot be written or read; lists all faults. Older checkpoints are unchanged."""
