"""What a predicate of ``break_on`` asks of its argument, read from its code: a name that there is not shows at once."""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import fields

from raypar.actors.inspect.step import ComputedValue
from raypar.schedules.nearest_name import did_you_mean


def predicate_faults(predicate: Callable[[ComputedValue], object]) -> list[str]:
    """Return the attributes that a Python function asks its argument for and that a Seen does not have.

    Args:
        predicate: The function. It is not called. Of one that is not written in Python nothing is known.

    Returns:
        A sentence for each name, with the nearest one that there is.
    """
    code = getattr(predicate, "__code__", None)
    if code is None or not code.co_argcount:
        return []
    argument = code.co_varnames[code.co_argcount - 1 if code.co_varnames[0] == "self" else 0]
    known = [
        name for name in {*dir(ComputedValue), *(one.name for one in fields(ComputedValue))} if not name.startswith("_")
    ]
    asked, before = dict[str, None](), None
    for one in dis.get_instructions(code):
        if one.opname.startswith("STORE_FAST") and one.argval == argument:
            return []  # from here on it may be something else
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == argument and not one.argval.startswith("_"):
            asked[one.argval] = None
        before = one.argval if one.opname.startswith("LOAD_FAST") else None
    return [_told(name, sorted(known)) for name in asked if name not in known]


def _told(name: str, known: list[str]) -> str:
    guess = did_you_mean(name, known, f"it has {', '.join(known)}")
    return f"break_on: what was seen has no {name!r}: {guess}"
