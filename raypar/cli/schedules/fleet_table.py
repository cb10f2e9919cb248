"""What ``raypar simulate --cluster`` prints: a training on a cluster in lines, and as figures for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from raypar.planner.fleet.fleet import FleetOutcome
from raypar.schedules.formatting import milliseconds


def fleet_text(found: FleetOutcome) -> str:
    """Return the outcome in lines."""
    days, wall = found.days, found.days.wall
    slow = found.median / found.ideal - 1 if found.ideal else 0.0
    lines = [
        f"cluster: {found.actors:,} actors; a step takes {milliseconds(found.median)} (median), {slow:.1%} more than "
        f"where nothing is slow, and {milliseconds(found.slowest)} at the most",
        f"{found.steps:,} steps take {timedelta(seconds=round(wall))}, goodput {found.goodput:.1%}",
    ]
    if math.isinf(found.mtbf):
        return "\n".join([*lines, f"no node fails; saves take {days.saving / wall if wall else 0:.1%}"])
    parts = {"lost": days.lost, "saves": days.saving, "restarts": days.restarting}
    shares = ", ".join(f"{name} {seconds / wall:.1%}" for name, seconds in parts.items())
    return "\n".join(
        [
            *lines,
            f"{days.failures:,} failures, one in {found.mtbf / 3600:.2f} hours: {shares}",
            f"trained {found.trained:.1%} of the time, {found.closed_form:.1%} by Daly's formula",
            f"a save every {found.every:,} steps, {found.interval:,.0f} s; Young {found.young:,.0f} s, "
            f"Daly {found.daly:,.0f} s",
        ]
    )


def fleet_figures(found: FleetOutcome) -> dict[str, Any]:
    """Return the outcome as figures; what is infinite is None."""
    figures = {**asdict(found), "trained": found.trained, "goodput": found.goodput}
    return {name: None if isinstance(one, float) and math.isinf(one) else one for name, one in figures.items()}
