"""Suggestions for a misspelled name ("did you mean")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

_LIKE, _SHORT_LIKE = 0.6, 0.5  # of two letters, as in pp, one may be wrong


def near(name: str, names: Iterable[str], most: int = 3, cutoff: float | None = None) -> list[str]:
    """Return the known names most like a misspelled one, the nearest first; of equally near ones, the same beginning.

    Args:
        name: The misspelled name.
        names: The known names.
        most: How many to return at most.
        cutoff: The least likeness, from 0 to 1; None for 0.6, and 0.5 for names of three letters or less.
    """
    import difflib  # imported here because it is slower than this file, and needed only after a typing error

    least = cutoff if cutoff is not None else _LIKE if len(name) > 3 else _SHORT_LIKE

    def likeness(other: str) -> tuple[float, int]:
        begins_alike = sum(1 for _ in takewhile(bool, map(str.__eq__, name, other)))
        return difflib.SequenceMatcher(a=other, b=name).ratio(), begins_alike

    ranked = sorted(((likeness(other), other) for other in dict.fromkeys(names)), key=lambda one: one[0], reverse=True)
    return [other for (ratio, _), other in ranked[:most] if ratio >= least]


def nearest(name: str, names: Iterable[str], cutoff: float | None = None) -> str | None:
    """Return the known name most like a misspelled one; None if none is near. See ``near``."""
    return next(iter(near(name, names, 1, cutoff)), None)


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str = "",
    *,
    most: int = 1,
    cutoff: float | None = None,
    spelled: Callable[[str], str] = str,
    both: bool = False,
) -> str:
    """Return the question "did you mean X?" for a name that there is not, or what else helps.

    Args:
        name: The name that there is not.
        names: The names that there are.
        otherwise: What is returned if none is near; with ``both`` it follows the question if one is.
        most: How many names to suggest at most.
        cutoff: See ``near``.
        spelled: Returns how a name is written, as repr for one in quotes.
        both: See ``otherwise``.
    """
    close = near(name, names, most, cutoff)
    question = f"did you mean {' or '.join(map(spelled, close))}?" if close else ""
    return f"{question} {otherwise}" if question and both else question or otherwise
