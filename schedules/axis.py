"""Round numbers for the axis of a picture."""

from __future__ import annotations

import math

_ROUND = (1.0, 2.0, 5.0, 10.0)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, at most so many; none of an empty range."""
    span = high - low
    if not (math.isfinite(low) and math.isfinite(high) and span > 0 and most >= 1):
        return []
    finest = span / most
    power = 10.0 ** math.floor(math.log10(finest))
    step = next(power * factor for factor in _ROUND if power * factor >= finest * (1 - 1e-9))
    while (found := _multiples(low, high, step)) and len(found) > most:
        step *= 2  # both ends are round, which makes one more
    return found


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
