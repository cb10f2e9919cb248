"""The placements of gathers side by side: what a schedule takes and holds with each, for ``raypar simulate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from raypar.actors.specs.types import SEND_WINDOW
from raypar.schedules.drawing.cells import lines, padded, widest
from raypar.schedules.drawing.text import plain
from raypar.schedules.passes.gather_weights import ReshardAfterForward, gather_weights
from raypar.schedules.rules import most_whole
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.memory import traffic
from raypar.schedules.simulation.simulate import Costs, simulate

Reshard = Literal["always", "except_last", "never"]

RESHARDS: Mapping[Reshard, ReshardAfterForward] = {"always": True, "except_last": "except_last", "never": False}

_MOST_RESIDENT = 4  # bounds that are shown of ranks with more stages
_HEAD = ("makespan", "bubble", "gathers", "most whole")


@dataclass(frozen=True)
class Placement:
    """What a schedule takes and holds with one placement of its gathers.

    Attributes:
        flags: The flags of ``raypar`` that ask for it, or "no --gather".
        makespan: In the unit of the costs.
        bubble: As in ``Timeline``.
        gathers: Number of gathers of each rank in a step, for the rank that gathers most.
        whole: The most stages of a rank that are whole at once.
    """

    flags: str
    makespan: float
    bubble: float
    gathers: int
    whole: int


def placements(schedule: Schedule, costs: Costs) -> list[Placement]:
    """Simulate a schedule with each placement of its gathers.

    Args:
        schedule: The lowered schedule, without gathers.
        costs: The costs.

    Returns:
        The placements; the first one has no gathers.
    """
    return [_measured(flags, place(schedule), costs) for flags, place in _every(schedule)]


def table(found: Sequence[Placement]) -> str:
    """Format placements as a table: a line for each."""
    rows = [
        _HEAD,
        *((plain(one.makespan), f"{one.bubble:.1%}", str(one.gathers), str(one.whole)) for one in found),
    ]
    return "\n".join(lines(["", *(one.flags for one in found)], padded(rows, widest(_HEAD))))


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


def _measured(flags: str, schedule: Schedule, costs: Costs) -> Placement:
    timeline = simulate(schedule, costs, send_capacity=SEND_WINDOW)
    none = [0] * schedule.num_stages
    times = [one.gathers for one in traffic(schedule, none, none, 1)]
    gathers = max(sum(times[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    return Placement(flags, timeline.makespan, timeline.bubble, gathers, max(most_whole(schedule)))
