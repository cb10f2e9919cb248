"""What raypar does not have yet, as docs/index.md names it, and where it would come: for messages that refuse it."""

from __future__ import annotations

import re
from types import MappingProxyType

FP8 = "fp8"
HYBRID_EXPERTS = "experts on several actors with hybrid sharding"

WHERE = MappingProxyType(  # by what is missing, the folder in which it would come, or that none is planned
    {
        FP8: "not planned yet",
        HYBRID_EXPERTS: "actors/expert_parallel/",
    }
)
_ASKED_BY = MappingProxyType(  # by a pattern, what values ask for that match it
    {
        r"(fp|float)8.*": FP8,
    }
)


def not_yet(what: str) -> str:
    """Say that raypar does not have something yet, and where it would come.

    Args:
        what: A key of ``WHERE``.
    """
    return f"raypar has no {what} yet ({WHERE[what]})"


def not_yet_hint(value: object) -> str:
    """Return what is added to the fault of a value that asks for what is not there yet; "" for other values.

    Args:
        value: The value of a field, or the name of a schedule or a recipe.
    """
    asked = value.lower() if isinstance(value, str) else ""
    return next((f"; {not_yet(what)}" for pattern, what in _ASKED_BY.items() if re.fullmatch(pattern, asked)), "")
