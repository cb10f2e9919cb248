"""The source lines where the user's function makes its modules, for errors inside torch's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from traceback import FrameSummary
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from raypar.actors.errors import is_ours

_MADE: WeakKeyDictionary[nn.Module, FrameSummary] = WeakKeyDictionary()
_NOTING = local()  # whether this thread's modules are noted


def _note(module: nn.Module, name: str, part: object) -> None:
    """Note the user's line for a module that gets its first parameter or module; torch calls it for every module."""
    if not getattr(_NOTING, "on", False) or module in _MADE:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if not is_ours(frame.f_code.co_filename):
        _MADE[module] = FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


# Never removed: torch iterates over its hooks without a lock, while another thread may build a model.
register_module_parameter_registration_hook(_note)
register_module_module_registration_hook(_note)


@contextmanager
def noted_lines() -> Iterator[None]:
    """Note the user's line for every module that gets a parameter or a module in this context, in this thread."""
    _NOTING.on = True
    try:
        yield
    finally:
        _NOTING.on = False


def note_copy(module: nn.Module, copy: nn.Module) -> None:
    """Note for each module of a deep copy the user's line that made the original."""
    for one, other in zip(module.modules(), copy.modules(), strict=True):
        if one in _MADE:
            _MADE[other] = _MADE[one]


def made_at(error: BaseException) -> FrameSummary | None:
    """Return the user's line that made the innermost module that an error went through; None if it is not known."""
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = _MADE.get(owner, found)
        trace = trace.tb_next
    return found
