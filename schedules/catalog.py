"""Schedules by name: raypar's own, those that users register, and those that user code generates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from raypar.schedules.generators import (
    automatic,
    dual_pipe,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    v_shape,
    zero_bubble,
)
from raypar.schedules.generators.entry import Entry, Sizes, exception_phrase, qualified_name
from raypar.schedules.nearest_name import did_you_mean
from raypar.schedules.passes.replicate import replicate
from raypar.schedules.reading.user_code import installed, names_code
from raypar.schedules.reading.user_code import user_entry as entry_of_code
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs

G = TypeVar("G", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_TABLE = {  # ``register`` adds to it, in this process only
    "naive": Entry.of(naive.naive, "one microbatch at a time; the reference", naive.SIZES),
    "gpipe": Entry.of(gpipe.gpipe, "all forwards, then all backwards; simple, holds all m activations", gpipe.SIZES),
    "1f1b": Entry.of(
        one_f_one_b.one_f_one_b, "the bubble of gpipe, but at most p activations a rank", one_f_one_b.SIZES
    ),
    "interleaved": Entry.of(
        interleaved.interleaved,
        "1f1b over several stages a rank: a bubble v times smaller for v times the communication",
        interleaved.SIZES,
    ),
    "looped-bfs": Entry.of(
        interleaved.looped_bfs,
        "gpipe over several stages a rank, all microbatches through one after the other",
        interleaved.SIZES,
    ),
    "zb-h1": Entry.of(
        zero_bubble.zb_h1, "1f1b with split backwards: its memory, a third of its bubble", zero_bubble.SIZES
    ),
    "zb-h2": Entry.of(zero_bubble.zb_h2, "zb-h1 with up to twice the memory and next to no bubble", zero_bubble.SIZES),
    "zb-1p": Entry.of(automatic.zb_1p, "a search for the costs of a run, with the memory of 1f1b", automatic.SIZES),
    "zb-2p": Entry.of(
        automatic.zb_2p, "a search for the costs of a run, with up to twice the memory of 1f1b", automatic.SIZES
    ),
    "zb-interleaved": Entry.of(
        interleaved.zb_interleaved,
        "interleaved with split backwards: a third of its bubble, the same memory on every rank",
        interleaved.SIZES,
    ),
    "zb-v": Entry.of(v_shape.zb_v, "two stages a rank in a V: the memory of 1f1b, next to no bubble", v_shape.SIZES),
    "v-half": Entry.of(
        v_shape.v_half, "the V that holds (p+3)/2 microbatches where 1f1b holds p, with half its bubble", v_shape.SIZES
    ),
    "v-min": Entry.of(
        v_shape.v_min, "the V that holds at most p/3 + 1.5 microbatches where 1f1b holds p", v_shape.SIZES
    ),
    "dualpipe-v": Entry.of(
        dual_pipe.dualpipe_v,
        "a V in which a forward of one microbatch is paired with a backward of another",
        dual_pipe.SIZES,
    ),
    "dualpipe": Entry.of(
        dual_pipe.dualpipe,
        "every stage held twice, microbatches from both ends: dualpipe-v over twice the actors",
        dual_pipe.TWICE,
    ),
    "pipedream": Entry.of(
        pipedream.pipedream,
        "1f1b without a flush: every stage updates by itself, with gradients of its earlier weights",
        pipedream.SIZES,
        is_stream=True,
    ),
    "pipedream-vertical": Entry.of(
        pipedream.pipedream_vertical,
        "pipedream where all stages compute a microbatch with weights of the same step",
        pipedream.SIZES,
        is_stream=True,
    ),
    "pipedream-2bw": Entry.of(
        pipedream.pipedream_2bw,
        "pipedream with two versions of the weights, and gradients that are one step old",
        pipedream.SIZES_2BW,
        is_stream=True,
    ),
    "forward": Entry.of(forward_only.forward, "forwards only, for evaluation", forward_only.SIZES, forward_only=True),
}

CATALOG: Mapping[str, Entry] = MappingProxyType(_TABLE)
"""The schedules by name, registered ones too."""


def register(
    name: str,
    *,
    summary: str = "",
    sizes: Sizes | None = None,
    default_chunks: int | None = None,
    forward_only: bool = False,
    is_stream: bool = False,
) -> Callable[[G], G]:
    """Register your schedule under a name: a decorator for the function that generates it.

    Example: ``@register("zigzag")`` above ``def zigzag(num_ranks, num_microbatches)``. Add a third parameter
    ``num_chunks`` if ranks hold several stages. The function returns a Schedule or plain rows, see ``Entry``; the
    decorator does not change it. Registering the same function again, as a rerun notebook cell does, replaces the
    entry.

    Args:
        name: The name of the schedule.
        summary: One line that says what the schedule is good for.
        sizes: The sizes that the function accepts, or None for the default of ``Entry.of``.
        default_chunks: Number of stages on each rank if the user gives none. None takes the default value of
            ``num_chunks``, else 1.
        forward_only: Whether the schedule is an evaluation.
        is_stream: Whether the schedule is asynchronous: the function's third parameter is the number of steps.

    Returns:
        The decorator.

    Raises:
        ScheduleError: If the name is no text. When the decorator is applied, if the name is not allowed or taken, or if
            the function can't generate schedules; the text lists all faults.
    """
    if not isinstance(name, str):
        raise ScheduleError(f'a schedule is registered under a name: @register("zigzag"), not {name!r}')

    def add(generate: G) -> G:
        """Check the name and the generator, and add them to the table."""
        faults = []
        if not _NAME.fullmatch(name) or name.endswith((".csv", ".py")):
            faults.append("a name has 1 to 100 of the characters A-Z a-z 0-9 . _ - and ends neither in .csv nor in .py")
        if name in _TABLE and not _is_again(generate, _TABLE[name].generate):
            other = _TABLE[name].generate
            faults.append(f"it is taken by {other.__module__}.{qualified_name(other)}: take another")
        try:
            entry = Entry.of(generate, summary, sizes, default_chunks, forward_only, is_stream)
        except ScheduleError as error:
            faults.append(str(error))
        if faults:
            raise ScheduleError(f"schedule {name!r} can't be registered: " + "; ".join(faults))
        _TABLE[name] = entry
        return generate

    return add


register_schedule = register  # its name in raypar


def names(catalog: Mapping[str, Entry] = CATALOG) -> tuple[str, ...]:
    """Return the names that ``build`` knows."""
    return tuple(catalog)


def entry_of(word: str, catalog: Mapping[str, Entry] = CATALOG) -> Entry:
    """Return the entry that a word stands for.

    Args:
        word: A name of the catalog or of an installed package, or a function like ``my.py:zigzag``. The last two run
            the code that they name.
        catalog: The catalog to look in. Installed packages are searched only with the default.

    Returns:
        The entry.

    Raises:
        ScheduleError: If the name is unknown (the text suggests close names), or if the code can't be found or fails.
    """
    if word in catalog:
        return catalog[word]
    if names_code(word):
        return entry_of_code(word)
    offered = installed() if catalog is CATALOG else {}
    if word not in offered:
        raise _unknown(word, [*catalog, *offered])
    try:
        generate = offered[word]()
    except Exception as error:
        raise ScheduleError(f"schedule {word!r} of an installed package {exception_phrase(error, None)}") from error
    if word not in catalog:  # loading the module may have registered it already
        register(word)(generate)
    return catalog[word]


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int | None = None,
    *,
    costs: Costs | None = None,
    replicas: Sequence[int] = (),
    catalog: Mapping[str, Entry] = CATALOG,
) -> Schedule:
    """Generate a schedule by name. The result usually has compute actions only; ``lower`` adds the others.

    Args:
        name: A word that ``entry_of`` accepts.
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches in a step.
        chunks: Number of stages on each rank, or None for the schedule's own default.
        steps: Number of steps of an asynchronous schedule, None for 8; others are one step.
        costs: How long actions last, for a schedule that depends on it (zb-1p, zb-2p); None for those of ``simulate``.
        replicas: The number of replicas of each rank, which take microbatches in turn; empty: one each.
        catalog: The catalog to look in. It may hold the user's entries: ``build("mine", 4, 8, catalog={**CATALOG,
            "mine": Entry.of(...)})``.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If the name is unknown (the text suggests close names), or if the sizes are not accepted (the
            text lists all faults and the fix for each).
    """
    entry, counts = entry_of(name, catalog), tuple(replicas) if any(count > 1 for count in replicas) else ()
    schedule = entry.build(name, ranks, microbatches, chunks, steps, costs=costs, replicas=counts)
    return replicate(schedule, counts) if counts and not schedule.replicas else schedule


def _is_again(generate: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether two functions are one that was defined twice. A file may be two modules, one ``__main__``."""

    def definitions(function: Callable[..., Any]) -> set[tuple[str, str]]:
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        sources = (file and str(Path(file).resolve()), getattr(function, "__module__", ""))
        return {(source, qualified_name(function)) for source in sources if source}

    return bool(definitions(generate) & definitions(other))


def _unknown(word: str, known: Iterable[str]) -> ScheduleError:
    every = list(dict.fromkeys(known))
    files = "; a file is a table, FILE.csv, or a function, FILE.py:FUNCTION" if Path(word).suffix else ""
    known_are = f"known are {', '.join(every)}{files}"
    fix = did_you_mean(word.lower(), every, known_are, most=3, spelled=repr, both=True)
    return ScheduleError(f"there is no schedule {word!r}: {fix}")
