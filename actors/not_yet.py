"""Features that raypar does not have yet, as docs/what_fits.md names them, for messages that refuse them."""

from __future__ import annotations

import re
from types import MappingProxyType

FP8 = "fp8"
HYBRID_EXPERTS = "experts on several actors with hybrid sharding"

WHERE = MappingProxyType(  # by missing feature, its future folder, or that it is not planned
    {
        FP8: "not planned yet",
        HYBRID_EXPERTS: "actors/expert_parallel/",
    }
)
_REQUESTED = MappingProxyType(  # by a pattern of values, the feature that they request
    {
        r"(fp|float)8.*": FP8,
    }
)


def not_yet(what: str) -> str:
    """Return the message that raypar does not have a feature yet.

    Args:
        what: A key of ``WHERE``.
    """
    return f"raypar has no {what} yet ({WHERE[what]})"


def not_yet_hint(value: object) -> str:
    """Return the addition to the fault of a value that requests a missing feature; "" for other values.

    Args:
        value: The value of a field, or the name of a schedule or a recipe.
    """
    text = value.lower() if isinstance(value, str) else ""
    return next((f"; {not_yet(what)}" for pattern, what in _REQUESTED.items() if re.fullmatch(pattern, text)), "")
