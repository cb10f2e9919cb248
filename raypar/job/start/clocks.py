"""The clocks of the machines that a job's actors are on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from raypar.actors.machine.process_identity import own_identity
from raypar.actors.specs.results import Located
from raypar.cluster.calls.calls import Calls
from raypar.cluster.together import together
from raypar.job.start.lifetime import HEARD

_ASKS = 5  # requests for the time of a machine


def align(calls: Calls, located: Mapping[int, Located]) -> None:
    """Make actors on other machines report times by the clock of this one (``time.perf_counter``).

    Such a clock counts from the machine's boot, in all containers that have no other time namespace. A request for the
    time has an error of at most half of the wait for its answer, so the request with the shortest wait counts: on a
    local network it has an error of less than half a millisecond.

    Args:
        calls: Calls to the actors.
        located: Where they are, by rank.
    """
    here, elsewhere = own_identity().clock_domain, dict[str, list[int]]()
    for rank, at in located.items():
        if (domain := at.process.clock_domain) != here:
            elsewhere.setdefault(domain, []).append(rank)
    together(partial(_align, calls), elsewhere.values())


def _align(calls: Calls, ranks: Sequence[int]) -> None:
    """Make the actors of one machine report times by the clock of this one."""
    asked = [found for _ in range(_ASKS) if (found := _asked(calls, ranks[0])) is not None]
    if asked:
        calls.answers(ranks, "set_clock", *min(asked)[1:], seconds=HEARD)


def _asked(calls: Calls, rank: int) -> tuple[float, float, float] | None:
    """Ask an actor for the time: the wait in seconds, and what to add to its clock, and to its time of day, to get
    those of this machine."""
    before = time.perf_counter()
    there = calls.answers([rank], "now", seconds=HEARD, group="ctl").get(rank)
    after, today = time.perf_counter(), time.time()
    if there is None:
        return None
    clock, wall = there
    return after - before, (before + after) / 2 - clock, today - (after - before) / 2 - wall
