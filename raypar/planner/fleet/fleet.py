"""Whole steps of a cluster of thousands of actors: stragglers, slow links, failures and checkpoints.

A step is the schedule performed by every replica at once, with the same order of actions and durations of its own: a
straggler is slower in all of them, a slow link delays what goes over it, and each actor differs a little from step to
step. Replicas wait for one another in the update. Then all steps are taken, with failures that come at random and cost
what was done since the last checkpoint. All random numbers follow from a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError
from raypar.planner.formulas.checkpoints import daly_interval, goodput, young_interval
from raypar.schedules.action import COMPUTE, Action
from raypar.schedules.known_rules import KnownEdges, KnownRule
from raypar.schedules.rules import awaited, leaving
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs, outcome
from raypar.schedules.simulation.sweep import Sweep

if TYPE_CHECKING:
    from raypar.planner.fleet.fleet_file import Fleet

_MOST_FAILURES = 200_000


@dataclass
class Days:
    """A training with its failures, in seconds.

    Attributes:
        wall: How long it has taken.
        lost: The part of it since the last save before a failure.
        saving: The part of it in saves.
        restarting: The part of it in restarts.
        failures: How many failures came.
    """

    wall: float = 0.0
    lost: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    failures: int = 0


@dataclass(frozen=True)
class FleetOutcome:
    """The result of the simulation, in seconds if no other unit is given.

    Attributes:
        actors: Number of actors.
        steps: Number of steps.
        ideal: A step on a cluster where nothing is slow.
        median: The median step.
        slowest: The slowest step that was drawn.
        every: Steps between two saves.
        interval: Training between two saves.
        young: The interval by Young's formula; infinite without failures.
        daly: The interval by Daly's formula; infinite without failures.
        mtbf: Mean time between two failures of the job; infinite without.
        days: The training.
        closed_form: By Daly's formula, the part of the time that trains; see ``trained``.
    """

    actors: int
    steps: int
    ideal: float
    median: float
    slowest: float
    every: int
    interval: float
    young: float
    daly: float
    mtbf: float
    days: Days
    closed_form: float

    @property
    def trained(self) -> float:
        """The part of the time in steps that were kept, 0 to 1."""
        days = self.days
        return 1 - (days.lost + days.saving + days.restarting) / days.wall if days.wall else 1.0

    @property
    def goodput(self) -> float:
        """What the steps would take on a cluster where nothing is slow or fails, as a part of the time, 0 to 1."""
        return self.steps * self.ideal / self.days.wall if self.days.wall else 1.0


def simulate_fleet(schedule: Schedule, costs: Costs, fleet: Fleet) -> FleetOutcome:
    """Simulate a training on a cluster.

    Args:
        schedule: The lowered schedule of a step of one replica, synchronous.
        costs: How long actions last on an actor that is not slow, in seconds.
        fleet: The cluster.

    Raises:
        ScheduleError: The schedule deadlocks.
        ConfigError: Failures come so often that the training does not come to its end.
    """
    import numpy as np  # the other commands for schedules do without

    draw = np.random.default_rng(fleet.seed)
    ideal = outcome(schedule, costs).makespan + fleet.reduce_seconds
    drawn = _steps(schedule, costs, fleet, draw) + fleet.reduce_seconds
    actors, mean = schedule.num_ranks * fleet.replicas * fleet.tensor_ranks, float(drawn.mean())
    young = daly = mtbf = math.inf
    if fleet.node_mtbf_hours:
        mtbf = fleet.node_mtbf_hours * 3600 / math.ceil(actors / fleet.actors_per_node)
        young, daly = young_interval(fleet.save_seconds, mtbf), daly_interval(fleet.save_seconds, mtbf)
    if isinstance(fleet.save_every, int):
        every = fleet.save_every
    else:
        wanted = min({"young": young, "daly": daly}[fleet.save_every], mean * fleet.steps)
        every = max(1, round(wanted / mean))
    days = _days(drawn, every, mtbf, fleet, draw)
    closed = goodput(every * mean, fleet.save_seconds, fleet.restart_seconds, mtbf)
    steps = float(np.median(drawn)), float(drawn.max())
    return FleetOutcome(actors, fleet.steps, ideal, *steps, every, every * mean, young, daly, mtbf, days, closed)


def _steps(schedule: Schedule, costs: Costs, fleet: Fleet, draw: Any) -> Any:
    """Return the seconds of some sampled steps, by the slowest replica of each, all computed at once."""
    import numpy as np

    ranks, shape = schedule.num_ranks, (fleet.sampled_steps, fleet.replicas)
    slow = np.ones((ranks, fleet.replicas, fleet.tensor_ranks))
    slow[draw.random(slow.shape) < fleet.straggler_share] = fleet.straggler_slowdown
    link = np.ones((ranks, 1, fleet.replicas))
    link[draw.random(link.shape) < fleet.slow_link_share] = fleet.slow_link_slowdown
    factors = []
    for rank in range(ranks):  # in each action the slowest of the tensor ranks counts
        each = slow[rank] * np.exp(draw.normal(0.0, fleet.jitter, (*shape, fleet.tensor_ranks)))
        factors.append(each.max(axis=2))
    now = [np.zeros(shape) for _ in range(ranks)]
    sent: dict[Action, Any] = {}
    needs, gives, edge = KnownRule(awaited, schedule), KnownRule(leaving, schedule), KnownEdges(schedule)
    for rank, _, action in Sweep(schedule):
        for need in needs(action):
            sender, _ = edge(action)
            now[rank] = np.maximum(now[rank], sent.pop(need) + costs.link * np.maximum(link[sender], link[rank]))
        if cost := costs.of(action):
            now[rank] = now[rank] + cost * (factors[rank] if action.op in COMPUTE else 1.0)
        for value in gives(action):
            sent[value] = now[rank]
    return np.max([each.max(axis=1) for each in now], axis=0)


def _days(drawn: Any, every: int, mtbf: float, fleet: Fleet, draw: Any) -> Days:
    """Take all steps, each a drawn one, with failures at random. Raises ConfigError if there are too many."""
    days, done = Days(), 0

    def next_failure() -> float:
        return math.inf if math.isinf(mtbf) else days.wall + float(draw.exponential(mtbf))

    fails_at = next_failure()
    while done < fleet.steps:
        count = min(every, fleet.steps - done)
        work = float(drawn[draw.integers(0, len(drawn), count)].sum())
        if days.wall + work + fleet.save_seconds <= fails_at:
            days.wall += work + fleet.save_seconds
            days.saving += fleet.save_seconds
            done += count
            continue
        days.lost += fails_at - days.wall
        days.wall, restarted = fails_at, False
        while not restarted:  # it may fail again while it restarts
            days.failures += 1
            if days.failures > _MOST_FAILURES:
                progress = f"after {_MOST_FAILURES:,} failures {done:,} of {fleet.steps:,} steps are done"
                raise ConfigError([f"--cluster: {progress}: save more often, or restart faster"])
            fails_at = next_failure()
            restarted = days.wall + fleet.restart_seconds <= fails_at
            end = days.wall + fleet.restart_seconds if restarted else fails_at
            days.restarting, days.wall = days.restarting + end - days.wall, end
    return days
