"""The schedules by name: raypar's, those that users register, and what code is called that makes others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from raypar.schedules import user_code
from raypar.schedules.generators import forward_only, gpipe, interleaved, naive, one_f_one_b
from raypar.schedules.generators.entry import Entry, Sizes, failure, name_of
from raypar.schedules.schedule import Schedule, ScheduleError

G = TypeVar("G", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_TABLE = {  # of this process: ``register`` adds to it
    "naive": Entry(naive.naive, "one microbatch at a time; the reference", naive.SIZES),
    "gpipe": Entry(gpipe.gpipe, "all forwards, then all backwards; simple, holds all m activations", gpipe.SIZES),
    "1f1b": Entry(one_f_one_b.one_f_one_b, "the bubble of gpipe, but at most p activations a rank", one_f_one_b.SIZES),
    "interleaved": Entry(
        interleaved.interleaved,
        "1f1b over several stages a rank: a bubble v times smaller for v times the communication",
        interleaved.SIZES,
        default_chunks=2,
    ),
    "forward": Entry(forward_only.forward, "forwards only, for evaluation", forward_only.SIZES, forward_only=True),
}

CATALOG: Mapping[str, Entry] = MappingProxyType(_TABLE)


def register(
    name: str,
    *,
    summary: str = "",
    sizes: Sizes | None = None,
    default_chunks: int | None = None,
    forward_only: bool = False,
) -> Callable[[G], G]:
    """Give a schedule of your own a name: a decorator for a function that generates it.

    ``@register("zigzag")`` above ``def zigzag(num_ranks, num_microbatches)``, with a third parameter ``num_chunks`` if
    it takes several stages a rank. It returns a Schedule or plain rows, see Entry, which tells the other arguments
    too: ``sizes=None`` takes any, ``default_chunks=None`` is the default of ``num_chunks``, else 1. The function stays
    as it is. Registering it again, as a cell of a notebook does that is run again, replaces it.

    Raises ScheduleError, with all faults, for a name that can't be one or is taken, and for what is no such function.
    """

    def add(generate: G) -> G:
        """Put the generator into the table, if its name will do."""
        faults = []
        if not _NAME.fullmatch(name) or name.endswith((".csv", ".py")):
            faults.append("a name has 1 to 100 of the characters A-Z a-z 0-9 . _ - and ends neither in .csv nor in .py")
        if name in _TABLE and not _is_again(generate, _TABLE[name].generate):
            other = _TABLE[name].generate
            faults.append(f"it is taken by {other.__module__}.{name_of(other)}: take another")
        try:
            entry = Entry.of(generate, summary, sizes, default_chunks, forward_only)
        except ScheduleError as error:
            faults.append(str(error))
        if faults:
            raise ScheduleError(f"schedule {name!r} can't be registered: " + "; ".join(faults))
        _TABLE[name] = entry
        return generate

    return add


def names(catalog: Mapping[str, Entry] = CATALOG) -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(catalog)


def entry_of(word: str, catalog: Mapping[str, Entry] = CATALOG) -> Entry:
    """The entry that a name or a word like ``my.py:zigzag`` stands for; such a word runs the code that it names.

    A name that is not in the catalog may be one of an installed package. Raises ScheduleError for an unknown name,
    with the names that come close, and for code that is not there or fails.
    """
    if word in catalog:
        return catalog[word]
    if user_code.names_code(word):
        return user_code.entry_of(word)
    offered = user_code.installed() if catalog is CATALOG else {}
    if word not in offered:
        raise _unknown(word, [*catalog, *offered])
    try:
        generate = offered[word]()
    except Exception as error:
        raise ScheduleError(f"schedule {word!r} of an installed package {failure(error, None)}") from error
    if word not in catalog:  # its module may have registered it
        register(word)(generate)
    return catalog[word]


def build(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, *, catalog: Mapping[str, Entry] = CATALOG
) -> Schedule:
    """Generate a schedule by name, mostly its compute rows, which ``lower`` completes; see ``entry_of``.

    ``chunks`` is the number of stages a rank holds, None for the schedule's own default. ``catalog`` may hold
    entries of the user's own: ``build("mine", 4, 8, catalog={**CATALOG, "mine": Entry(...)})``.
    Raises ScheduleError for an unknown name, with the names that come close, and for sizes that the schedule does
    not take, with all faults and the fix for each.
    """
    return entry_of(name, catalog).build(name, ranks, microbatches, chunks)


def _is_again(generate: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether it is the same function, defined again. Its file may be two modules, one of them ``__main__``."""

    def homes(function: Callable[..., Any]) -> set[tuple[str, str]]:
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        places = (file and str(Path(file).resolve()), getattr(function, "__module__", ""))
        return {(place, name_of(function)) for place in places if place}

    return bool(homes(generate) & homes(other))


def _unknown(word: str, known: Iterable[str]) -> ScheduleError:
    import difflib  # for a typing error only: it takes longer to import than the rest of this file

    every = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word.lower(), every, n=3)
    guess = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    files = "; a file is a table, FILE.csv, or a function, FILE.py:FUNCTION" if Path(word).suffix else ""
    return ScheduleError(f"there is no schedule {word!r}: {guess}known are {', '.join(every)}{files}")
