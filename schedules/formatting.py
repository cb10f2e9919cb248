"""Bytes, seconds, counts and shares as text, and rows of cells as a table: how all that raypar prints is spelled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def size(count: float, *, tenths: bool = False) -> str:
    """Format bytes: 80 B, 40 KiB, 1.5 MiB, 12 MiB, 1.5 GiB; with ``tenths`` also 40.3 KiB and 12.3 MiB."""
    power = min(4, int(math.log2(count) / 10)) if count >= 1 else 0
    value = count / 1024**power
    tenths = tenths or power > 2 or (power == 2 and value < 10 and not value.is_integer())
    return f"{value:,.{int(tenths and power > 0)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds; ten and more as seconds."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1 if seconds >= 1e-3 else 3}f} ms" if seconds else "0 ms"


def three_digit_seconds(seconds: float) -> str:
    """Format seconds with three digits: 1.54 s, 12.3 ms, 212 us."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3g} {unit}"


def duration(seconds: float) -> str:
    """Format seconds: 35 ms, 1.5 s, 1 h 02 min."""
    if 0 < seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms" if seconds >= 1e-3 else "<1 ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def short_count(count: float) -> str:
    """Format a number of parameters: 6.5 M, 124.4 M, 7.0 B."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return str(count)


def amount(value: float) -> str:
    """Format a large number: 1.5 G."""
    power = min(5, int(math.log10(value) / 3)) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}".rstrip()


def percentage(part: float) -> str:
    """Format a fraction of 1 as per cent, without a trailing ".0"."""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"


def percent(share: float) -> str:
    """Format a share: two digits that count, so that a small one is not 0 %."""
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def aligned(rows: Iterable[Sequence[str]], side: str = "<") -> list[list[str]]:
    """Pad every cell with blanks to the width of its column.

    Args:
        rows: The cells of each row, the heading first if there is one; all rows have the same number of cells.
        side: "<" to begin cells at the left of their column, ">" to end them at its right.
    """
    columns = [[f"{cell:{side}{max(map(len, column))}}" for cell in column] for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def text_table(rows: Iterable[Sequence[str]], side: str = "<") -> list[str]:
    """Return a line for each row of a table, each column as wide as its widest cell. The arguments: see ``aligned``."""
    return ["  ".join(row).rstrip() for row in aligned(rows, side)]


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each stretch of numbers that follow each other."""
    found = list[tuple[int, int]]()
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def steps_in_words(steps: Iterable[int]) -> str:
    """Say which steps these are: "step 3", "steps 10 to 13, 20"."""
    parts = [f"{one}" if one == last else f"{one} to {last}" for one, last in consecutive(sorted(steps))]
    return f"step{'s' * (len(parts) > 1 or ' ' in parts[0])} {', '.join(parts)}"
