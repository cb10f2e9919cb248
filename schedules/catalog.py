"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from raypar.schedules import forward, gpipe, interleaved, naive, one_f_one_b
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule of the catalog.

    generate       ``(num_ranks, num_microbatches)`` to a compute-only schedule, ``(..., num_chunks)`` where
                   ``sizes`` allows more than one chunk
    summary        what it is good for, in one line
    sizes          the sizes it takes
    default_chunks stages a rank if the user says nothing
    forward_only   an evaluation: no backward
    """

    generate: Callable[..., Schedule]
    summary: str
    sizes: Sizes
    default_chunks: int = 1
    forward_only: bool = False


CATALOG: Mapping[str, Entry] = MappingProxyType(
    {
        "naive": Entry(naive.naive, "one microbatch at a time; the reference", naive.SIZES),
        "gpipe": Entry(gpipe.gpipe, "all forwards, then all backwards; simple, holds all m activations", gpipe.SIZES),
        "1f1b": Entry(
            one_f_one_b.one_f_one_b, "the bubble of gpipe, but at most p activations a rank", one_f_one_b.SIZES
        ),
        "interleaved": Entry(
            interleaved.interleaved,
            "1f1b over several stages a rank: a bubble v times smaller for v times the communication",
            interleaved.SIZES,
            default_chunks=2,
        ),
        "forward": Entry(forward.forward, "forwards only, for evaluation", forward.SIZES, forward_only=True),
    }
)


def names(catalog: Mapping[str, Entry] = CATALOG) -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(catalog)


def build(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, *, catalog: Mapping[str, Entry] = CATALOG
) -> Schedule:
    """Generate a schedule by name: its compute rows, which ``lower`` completes.

    ``chunks`` is the number of stages a rank holds, None for the schedule's own default. ``catalog`` may hold
    entries of the user's own: ``build("mine", 4, 8, catalog={**CATALOG, "mine": Entry(...)})``.
    Raises ScheduleError for an unknown name, with the names that come close, and for sizes that the schedule does
    not take, with all faults and the fix for each.
    """
    if name not in catalog:
        import difflib  # for a typing error only: it takes longer to import than the rest of this file

        close = difflib.get_close_matches(name.lower(), catalog, n=3)
        guess = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ScheduleError(f"there is no schedule {name!r}: {guess}known are {', '.join(catalog)}")
    entry = catalog[name]
    stages_a_rank = entry.default_chunks if chunks is None else chunks
    entry.sizes.demand(name, ranks, microbatches, stages_a_rank)
    if entry.sizes.max_chunks == 1:
        return entry.generate(ranks, microbatches)
    return entry.generate(ranks, microbatches, stages_a_rank)
