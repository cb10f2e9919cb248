"""The placements of gathers side by side: what a schedule takes and holds with each, for ``raypar simulate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from raypar.actors.specs.types import SEND_WINDOW
from raypar.schedules.drawing.cells import lines_in_width
from raypar.schedules.drawing.text import plain
from raypar.schedules.formatting import aligned
from raypar.schedules.passes.gather_weights import ReshardAfterForward, gather_weights
from raypar.schedules.rules import most_whole
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.memory import peaks, traffic
from raypar.schedules.simulation.simulate import Costs, outcome, simulate

Reshard = Literal["always", "except_last", "never"]

RESHARDS: Mapping[Reshard, ReshardAfterForward] = {"always": True, "except_last": "except_last", "never": False}

_MOST_RESIDENT = 4  # bounds that are shown of ranks with more stages
_HEAD = ("makespan", "bubble", "gathers", "most whole", "peak MiB")
_MIB = 1 << 20


@dataclass(frozen=True)
class GatherPlacement:
    """What a schedule takes and holds with one placement of its gathers.

    Attributes:
        flags: The flags of ``raypar`` that ask for it, or "no --gather".
        makespan: In the unit of the costs.
        bubble: As in ``Timeline``.
        gathers: Number of gathers of each rank in a step, for the rank that gathers most.
        whole: The most stages of a rank that are whole at once.
        peak: The most MiB of whole weights and activations that a rank holds, 0 if their sizes are not given.
    """

    flags: str
    makespan: float
    bubble: float
    gathers: int
    whole: int
    peak: float


def placements(
    schedule: Schedule, costs: Costs, weights: float = 0.0, activations: float = 0.0
) -> list[GatherPlacement]:
    """Simulate a schedule with each placement of its gathers.

    Args:
        schedule: The lowered schedule, without gathers.
        costs: The costs.
        weights: MiB of the whole weights of each stage.
        activations: MiB of what a forward of a microbatch keeps in each stage.

    Returns:
        The placements; the first one has no gathers.
    """
    sizes = round(weights * _MIB), round(activations * _MIB)
    return [_measured(flags, place(schedule), costs, *sizes) for flags, place in _every(schedule)]


def placement_table(found: Sequence[GatherPlacement]) -> str:
    """Format placements as a table: a line for each."""
    rows = [_HEAD, *map(_cells, found)]
    shown = len(_HEAD) if any(one.peak for one in found) else len(_HEAD) - 1
    return "\n".join(lines_in_width(["", *(one.flags for one in found)], aligned(row[:shown] for row in rows)))


def _cells(one: GatherPlacement) -> tuple[str, ...]:
    return plain(one.makespan), f"{one.bubble:.1%}", str(one.gathers), str(one.whole), f"{one.peak:,.1f}"


def _every(schedule: Schedule) -> Iterator[tuple[str, Callable[[Schedule], Schedule]]]:
    """Yield the flags and the pass of each placement."""
    gather = {when: partial(gather_weights, when=when) for when in ("step", "microbatch")}
    most = max(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    yield "no --gather", lambda rows: rows
    yield "--gather step", gather["step"]
    for resident in reversed(range(1, min(most, _MOST_RESIDENT + 1))):
        yield f"--gather step --resident {resident}", partial(gather["step"], resident=resident)
    for name in reversed(tuple(RESHARDS)):
        flags = f"--gather microbatch --reshard-after-forward {name}"
        yield flags, partial(gather["microbatch"], reshard_after_forward=RESHARDS[name])


def _measured(flags: str, schedule: Schedule, costs: Costs, weights: int, activations: int) -> GatherPlacement:
    found = outcome(schedule, costs, send_capacity=SEND_WINDOW)
    each, kept = [weights] * schedule.num_stages, [activations] * schedule.num_stages
    times = [one.gathers for one in traffic(schedule, each, each, shards=1)]
    gathers = max(sum(times[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    peak = 0
    if weights or activations:
        timeline = simulate(schedule, costs, send_capacity=SEND_WINDOW)
        peak = max(one.bytes for one in peaks(timeline, each, kept, units=costs.units))
    return GatherPlacement(flags, found.makespan, found.bubble, gathers, max(most_whole(schedule)), peak / _MIB)
