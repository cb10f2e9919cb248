"""Features that raypar does not have yet, as docs/what_fits.md names them, for messages that refuse them."""

from __future__ import annotations

from types import MappingProxyType

HYBRID_EXPERTS = "experts on several actors with hybrid sharding"

WHERE = MappingProxyType(  # by missing feature, its future folder, or that it is not planned
    {
        HYBRID_EXPERTS: "actors/expert_parallel/",
    }
)


def not_yet(what: str) -> str:
    """Return the message that raypar does not have a feature yet.

    Args:
        what: A key of ``WHERE``.
    """
    return f"raypar has no {what} yet ({WHERE[what]})"
