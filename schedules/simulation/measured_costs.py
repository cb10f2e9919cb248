"""Costs read off measured timelines, with which the simulation predicts later steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from raypar.schedules.action import RECVS, Action, Op
from raypar.schedules.rules import awaited, leaving
from raypar.schedules.simulation.simulate import Costs
from raypar.schedules.timeline import Event, Timeline

_ENOUGH = 3  # measurements: with as many or more, an action has a separate median


def costs_of(*timelines: Timeline) -> Costs:
    """Compute the costs with which ``simulate`` predicts the makespan and bubble of steps like the given ones.

    Each cost is a median, so that a single delayed action does not count:

    - An action that is in three or more timelines has a separate median: actions are faster while other ranks wait.
      Any other action has the median of its stage and op over all microbatches.
    - The link has the median delay of the values for which a rank was waiting. If no rank waited for any value, it is
      the shortest delay: the longest link that still delivers in time.
    - STEP begins when all ranks have reached it, so it lasts from the last rank's start to the end.
    - UNSHARD lasts as long as the gathers of its stage's units together, for each time that the schedule gathers it; if
      no units were measured, as long as the action itself.
    - A SEND costs its rank its measured time. A RECV costs nothing: the simulation computes the waiting.
    - An op that is in no timeline costs nothing.

    Args:
        *timelines: Steps of one job. Several are better than one, since times vary; omit the job's first step,
            which also warms up.

    Returns:
        The costs, in seconds. For a simulated timeline they are the costs of the simulation, if its reductions did not
        run beside the actions.
    """
    lengths: defaultdict[Action, list[float]] = defaultdict(list)
    awaited_links, spare_links, steps = list[float](), list[float](), list[float]()
    for timeline in timelines:
        for event in timeline.events:
            stage, op, _, _ = event.action
            if stage is not None and op not in RECVS and op is not Op.UNSHARD and event.bucket is None:
                lengths[event.action].append(event.end - event.start)
        for action, seconds in _gathers(timeline):
            lengths[action].append(seconds)
        for delay, waited in _links(timeline):
            (awaited_links if waited else spare_links).append(delay)
        ends = [event for event in timeline.events if event.action.op is Op.STEP]
        if ends:
            steps.append(max(event.end for event in ends) - max(event.start for event in ends))
    link = median(awaited_links) if awaited_links else min(spare_links, default=0.0)
    alike: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for (stage, op, *_), found in lengths.items():
        assert stage is not None
        alike[stage, op] += found
    of_stage = {key: median(found) for key, found in alike.items()}
    of_action = {action: median(found) for action, found in lengths.items() if len(found) >= _ENOUGH}
    step = median(steps) if steps else 0.0
    return Costs(0.0, 0.0, 0.0, 0.0, step=step, link=link, of_stage=of_stage, of_action=of_action)


def _gathers(timeline: Timeline) -> Iterator[tuple[Action, float]]:
    """Yield each stage's UNSHARD, and the seconds that one gather of the stage takes."""
    beside, inside = defaultdict[Action, float](float), defaultdict[Action, float](float)
    for event in timeline.events:
        if event.action.op is Op.UNSHARD:
            (inside if event.bucket is None else beside)[event.action] += event.end - event.start
    times = Counter(action for row in timeline.schedule.rows for action in row if action.op is Op.UNSHARD)
    for action, number in times.items():
        if seconds := beside[action] or inside[action]:
            yield action, seconds / number


def _links(timeline: Timeline) -> Iterator[tuple[float, bool]]:
    """Yield the delay of each value from another rank, in seconds, and whether its user waited for all of that time.

    If the user did not, the value may have arrived before it was needed.
    """
    schedule = timeline.schedule
    makers = {value: event for event in timeline.events for value in leaving(event.action, schedule)}
    free = [timeline.start] * timeline.num_ranks  # when each rank's previous action ended
    for event in timeline.events:
        if event.bucket is not None:
            continue
        for maker in (makers[need] for need in awaited(event.action, schedule) if need in makers):
            yield _had(event) - maker.end, free[event.rank] <= maker.end
        free[event.rank] = event.end


def _had(event: Event) -> float:
    """Return when the value that an action waits for had arrived."""
    return event.end if event.action.op in RECVS else event.start
