"""What the actions of a measured timeline cost: with it the simulation predicts the steps that follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from raypar.schedules.action import RECVS, Action, Op
from raypar.schedules.rules import awaited, provides, travels
from raypar.schedules.simulation.simulate import Costs
from raypar.schedules.timeline import Event, Timeline

_ENOUGH = 3  # times of an action whose median is worth more than that of others like it


def costs_of(*timelines: Timeline) -> Costs:
    """Costs with which ``simulate`` predicts the bubble and the makespan of a step like these.

    Several steps of a job are better than one, whose times scatter; the first one of a job also warms up. Each cost is
    a median, so that single actions that were held up don't count: of an action that three steps or more have (while
    other ranks wait, actions are faster), else of a stage's op over all microbatches; of the link over the values that
    somebody waited for. If nobody waited for any, the link is the longest that would still have been in time. STEP
    begins with all ranks waiting for one another, so it lasts from the last one's start to the end. A SEND costs its
    rank what it took; a RECV only the waiting, which the simulation finds. What is in no timeline costs nothing. Of a
    simulated timeline these are the costs that it was made with.
    """
    lengths: defaultdict[Action, list[float]] = defaultdict(list)
    awaited_links, spare_links, steps = list[float](), list[float](), list[float]()
    for timeline in timelines:
        for event in timeline.events:
            stage, op, _ = event.action
            if stage is not None and op not in RECVS and event.bucket is None:
                lengths[event.action].append(event.end - event.start)
        for delay, waited in _links(timeline):
            (awaited_links if waited else spare_links).append(delay)
        ends = [event for event in timeline.events if event.action.op is Op.STEP]
        if ends:
            steps.append(max(event.end for event in ends) - max(event.start for event in ends))
    link = median(awaited_links) if awaited_links else min(spare_links, default=0.0)
    alike: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for (stage, op, _), found in lengths.items():
        assert stage is not None
        alike[stage, op] += found
    of_stage = {key: median(found) for key, found in alike.items()}
    of_action = {action: median(found) for action, found in lengths.items() if len(found) >= _ENOUGH}
    step = median(steps) if steps else 0.0
    return Costs(0.0, 0.0, 0.0, 0.0, step=step, link=link, of_stage=of_stage, of_action=of_action)


def _links(timeline: Timeline) -> Iterator[tuple[float, bool]]:
    """How long after its value had left each user of a value from another rank had it, and whether it waited for it all
    that time: else the value may have been there before."""
    schedule = timeline.schedule
    makers = {value: event for event in timeline.events for value in provides(event.action) if travels(value, schedule)}
    free = [timeline.start] * timeline.num_ranks  # since when each rank has nothing else to do
    for event in timeline.events:
        if event.bucket is not None:
            continue
        need = awaited(event.action, schedule)
        maker = makers.get(need) if need is not None else None
        if maker is not None:
            yield _had(event) - maker.end, free[event.rank] <= maker.end
        free[event.rank] = event.end


def _had(event: Event) -> float:
    """When an action had the value that it waits for."""
    return event.end if event.action.op in RECVS else event.start
