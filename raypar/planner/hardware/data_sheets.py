"""The fault of a name without a data sheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raypar.schedules.nearest_name import did_you_mean


def sheet_faults(kind: str, name: str, known: Mapping[str, object], measure: str) -> Iterator[str]:
    """Yield a fault if there is no data sheet of a name, with what to measure instead.

    Args:
        kind: What it is of: "device" or "link".
        name: The name.
        known: The data sheets by name.
        measure: What to measure of one that has none.
    """
    if name not in known:
        others = f"known are {', '.join(known)}; else {measure}"
        fix = did_you_mean(name.lower(), known, others, spelled=repr, both=True)
        yield f"there is no data sheet of a {kind} {name!r}: {fix}"
