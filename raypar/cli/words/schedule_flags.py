"""What the commands for schedules share: flags for sizes, durations of actions, and how a schedule is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypar.config.schedule import MOST_CELLS, Loaded, load
from raypar.schedules.passes.skip_connections import Skips
from raypar.schedules.schedule import ScheduleError
from raypar.schedules.simulation.simulate import Costs

SCHEDULE = "SCHEDULE|FILE.csv|FILE.py:FUNCTION"
_RANKS, _MICROBATCHES = 4, 8
_MOST_COST = 1e100  # sums and products of as many as a schedule has are numbers, too


@dataclass(frozen=True, kw_only=True)
class SizeArgs:
    """The flags for the sizes of a schedule."""

    ranks: int | None = None
    """pipeline ranks; None: 4, or what the file has"""
    microbatches: int | None = None
    """microbatches of a step; None: 8, or what the file has"""
    chunks: int | None = None
    """stages on each rank; None is the schedule's own default"""
    steps: int | None = None
    """steps from one flush to the next; None: 8 of an asynchronous schedule, or what the file has, else 1"""
    replicas: tuple[int, ...] = ()
    """replicas of each rank, as 2 3 1, which take microbatches in turn; one each if it is left out"""
    slices: int = 1
    """slices along the sequence in which each microbatch is cut (Seq1F1B); number 5 in a row is then, of 4, slice 1 of
    microbatch 1"""
    skips: tuple[str, ...] = ()
    """skip connections, pairs of stages as 0-3 1-2: the first one gives something to the second one, too"""


@dataclass(frozen=True, kw_only=True)
class CostArgs:
    """The flags for the durations of actions: of a stage for simulate, of all layers of a rank for compare."""

    f: float = 1.0
    """duration of a forward, in any unit"""
    b: float = 2.0
    """duration of a full backward"""
    i: float = 1.0
    """duration of the input half of a backward"""
    w: float = 1.0
    """duration of the weight half of a backward"""
    link: float = 0.0
    """time from the end of a compute action to the arrival of its value on another rank"""


def cost_faults(costs: Mapping[str, float]) -> list[str]:
    """Return which durations, or other figures that are added up, are out of range, by the names of their flags."""
    return [
        f"--{name.replace('_', '-')} is {cost}: it must be from 0 to {_MOST_COST:g}"
        for name, cost in costs.items()
        if not 0 <= cost <= _MOST_COST
    ]


def load_sized(word: str, sizes: SizeArgs, costs: Costs | None = None, most_cells: int = MOST_CELLS) -> Loaded:
    """Load a schedule, made for these costs if it depends on them.

    Args:
        word: A name, a CSV file, or a function that generates rows.
        sizes: Its sizes; a synchronous schedule takes no steps.
        costs: How long actions last; None for the schedule's default.
        most_cells: The most that ranks x microbatches x chunks may be.

    Raises:
        ScheduleError: It can't be loaded, or a file has other sizes than the flags ask for.
    """
    ranks = _RANKS if sizes.ranks is None else sizes.ranks
    microbatches = _MICROBATCHES if sizes.microbatches is None else sizes.microbatches
    ranks = len(sizes.replicas) or ranks if sizes.ranks is None else ranks
    further = sizes.chunks, costs, sizes.steps
    if sizes.slices < 1:
        raise ScheduleError(f"--slices is {sizes.slices}: it must be 1 or more")
    numbers = microbatches * sizes.slices
    loaded = load(word, ranks, numbers, *further, replicas=sizes.replicas, most_cells=most_cells)
    loaded = loaded.in_slices(sizes.slices)
    schedule = loaded.schedule
    faults = [
        f"schedule {schedule.name!r} has {has} {name}, not {wanted}: leave --{name} out for a file"
        for name, has, wanted in (
            ("ranks", schedule.num_pipeline_ranks, sizes.ranks),
            ("microbatches", schedule.microbatches_a_step, sizes.microbatches),
            ("steps", schedule.stream, sizes.steps if schedule.stream else None),
        )
        if wanted is not None and has != wanted
    ]
    if faults:
        raise ScheduleError("\n".join(faults))
    pairs = _pairs(sizes.skips)
    return loaded.skipping(lambda num_stages: pairs)


def _pairs(words: Sequence[str]) -> Skips:
    """Read pairs of stages, such as 0-3. Raises ScheduleError."""
    read = [re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", word) for word in words]
    if wrong := [word for word, found in zip(words, read, strict=True) if found is None]:
        raise ScheduleError(f"--skips has {', '.join(map(repr, wrong))}: give pairs of stages, such as 0-3")
    return tuple((int(found[1]), int(found[2])) for found in read if found is not None)
