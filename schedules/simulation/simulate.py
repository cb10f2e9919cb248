"""The simulation of a schedule: when each action starts and ends, given the cost of each."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from raypar.schedules.action import COMPUTE, MOVES, RECVS, SENDS, Action, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.known_rules import KnownEdges, KnownRule
from raypar.schedules.rules import (
    MAKES_GRADIENTS,
    MAKES_INPUT_GRADIENTS,
    USES_WEIGHTS,
    awaited,
    leaving,
    most_in_flight,
    streamed,
)
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.sweep import Sweep
from raypar.schedules.timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class Costs:
    """How long actions last, in seconds or any other unit. Ops without a field cost nothing.

    Attributes:
        f: Cost of a forward F.
        b: Cost of a full backward B.
        i: Cost of an input-gradient half I.
        w: Cost of a weight-gradient half W.
        unshard: Cost of an UNSHARD: time of the gather of a stage's weights on the rank's link to its replicas, beside
            the actions.
        reduce_grad: Cost of a REDUCE_GRAD.
        step: Cost of a STEP.
        offload: Cost of an OFFLOAD or a RELOAD, a move between the device and host memory.
        link: Time from the end of a compute action to the arrival of its value on another rank.
        of_stage: Exceptions by stage and op, ``{(3, Op.F): 1.5}``.
        of_action: Exceptions by action, which override ``of_stage``.
        reduce_beside: Whether a REDUCE_GRAD runs beside the actions, as a gather does, and only the STEP waits for it.
            If not, it occupies its rank.
        offload_beside: Whether an OFFLOAD or RELOAD runs beside the actions, on the rank's link to host memory, after
            the moves before it. An F, which needs the memory, waits for the OFFLOADs before it, and a B or I for its
            RELOAD. If not, it occupies its rank.
        units: Number of equal units in which a stage is gathered, and reduced. If an action is alone in the time in
            which its stage is whole, it starts when the first unit has arrived, and the others arrive while it runs. A
            reduction beside the actions starts when the B or W before it has the first unit's gradients.
    """

    f: float = 1.0
    b: float = 2.0
    i: float = 1.0
    w: float = 1.0
    unshard: float = 0.0
    reduce_grad: float = 0.0
    step: float = 0.0
    offload: float = 0.0
    link: float = 0.0
    of_stage: Mapping[tuple[int, Op], float] = field(default_factory=dict)
    of_action: Mapping[Action, float] = field(default_factory=dict)
    reduce_beside: bool = False
    offload_beside: bool = False
    units: int = 1

    def of(self, action: Action) -> float:
        """Return how long the action occupies its rank, or its rank's link if it runs beside (see ``is_beside``)."""
        stage, op, _, _ = action
        if self.of_action and action in self.of_action:
            return self.of_action[action]
        if stage is not None and (stage, op) in self.of_stage:
            return self.of_stage[stage, op]
        cost: float = getattr(self, _FIELD[op]) if op in _FIELD else 0.0
        return cost

    def is_beside(self, action: Action) -> bool:
        """Return whether an action takes time of its rank's link to the replicas or to the host, not of its rank."""
        op = action.op
        return (
            op is Op.UNSHARD or (op is Op.REDUCE_GRAD and self.reduce_beside) or (op in MOVES and self.offload_beside)
        )


_FIELD = {
    Op.F: "f",
    Op.B: "b",
    Op.I: "i",
    Op.W: "w",
    Op.UNSHARD: "unshard",
    Op.REDUCE_GRAD: "reduce_grad",
    Op.STEP: "step",
    Op.OFFLOAD: "offload",
    Op.RELOAD: "offload",
}

#: Every compute action lasts one slot.
UNIT = Costs(b=1.0)


def simulate(schedule: Schedule, costs: Costs | None = None, *, send_capacity: int | None = None) -> Timeline:
    """Simulate a schedule: every rank performs its row in order, each action as early as it can.

    Before lowering, a value reaches another rank ``costs.link`` after the end of its compute action. After lowering, a
    SEND takes no time of its rank unless ``of_stage`` says so, its value arrives ``costs.link`` later, and a RECV lasts
    as long as the rank waits for the value, and no less than ``of_stage`` says.

    The gathers and reductions of a rank queue up on its link to the replicas. UNSHARD takes no time of the rank: the
    stage's next F, B or I starts when its weights have arrived, or the first of ``units``. UNSHARD of a whole stage
    takes no time.

    Args:
        schedule: The schedule, lowered or not.
        costs: The costs, or None for ``Costs()``.
        send_capacity: As in ``check``: a SEND waits until fewer values are under way; with 0 it waits for its RECV, and
            then both last ``costs.link``.

    Returns:
        The timeline, in the unit of the costs.

    Raises:
        ScheduleError: If the schedule deadlocks.
    """
    timeline, deadlock = simulate_to_deadlock(schedule, costs, send_capacity=send_capacity)
    if deadlock:
        raise ScheduleError(deadlock)
    return timeline


def simulate_to_deadlock(
    schedule: Schedule, costs: Costs | None = None, *, send_capacity: int | None = None
) -> tuple[Timeline, str]:
    """Simulate a schedule as ``simulate`` does, up to its deadlock if it has one.

    Args:
        schedule: As in ``simulate``.
        costs: As in ``simulate``.
        send_capacity: As in ``simulate``.

    Returns:
        The timeline of what can happen, and which rank waits for what then; "" if the schedule comes to its end.
    """
    actors = [f"pp={schedule.label(rank).removeprefix('rank ')}" for rank in range(schedule.num_ranks)]
    costs, events, deadlock = costs or Costs(), list[Event](), ""
    try:
        for rank, action, start, end in _performed(schedule, costs, send_capacity):
            bucket = 0 if costs.is_beside(action) else None
            events.append(Event(rank, actors[rank], action, start, end, bucket=bucket))
    except ScheduleError as error:
        deadlock = str(error)
    return Timeline(schedule, tuple(events)), deadlock


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation without its events, which take more memory than the schedule.

    Attributes:
        schedule: The schedule.
        makespan: Time from the first start to the last end, in the unit of the costs.
        busy: For each rank, the time that it spends computing (F, B, I, W).
    """

    schedule: Schedule
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing is computed, as ``Timeline.bubble``."""
        whole = self.schedule.num_ranks * self.makespan
        return 1 - float_sum(self.busy) / whole if whole else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of activations that each rank holds at once, as ``Timeline.in_flight``."""
        return most_in_flight(self.schedule)


def outcome(schedule: Schedule, costs: Costs | None = None, *, send_capacity: int | None = None) -> Outcome:
    """Simulate a schedule as ``simulate`` does, and return only the sums.

    The arguments and the error are those of ``simulate``.
    """
    first, last, busy = math.inf, 0.0, [0.0] * schedule.num_ranks
    for rank, action, start, end in _performed(schedule, costs or Costs(), send_capacity):
        first, last = min(first, start), max(last, end)
        if action.op in COMPUTE:
            busy[rank] += end - start
    return Outcome(schedule, max(0.0, last - first), tuple(busy))


def _performed(
    schedule: Schedule, costs: Costs, send_capacity: int | None
) -> Iterator[tuple[int, Action, float, float]]:
    """Yield ``(rank, action, start, end)`` in a causal order. Raises ScheduleError if the schedule deadlocks."""
    clock, sweep = _Clock(schedule, costs, send_capacity), Sweep(schedule, send_capacity)
    for rank, _, action in sweep:
        yield rank, action, *clock.perform(rank, action)
    if waits := sweep.waits():
        first = waits[0]
        raise ScheduleError(
            f"schedule {schedule.name!r} does not come to its end: {schedule.label(first.rank)} at {first.action} "
            f"waits for {first.reason} (check says more)"
        )


class _Clock:
    """The current time of every rank and of its links to replicas and host, and the start time of each message."""

    def __init__(self, schedule: Schedule, costs: Costs, send_capacity: int | None) -> None:
        self._costs, self._capacity = costs, send_capacity
        self._awaited_by, self._left_by = KnownRule(awaited, schedule), KnownRule(leaving, schedule)
        self._edge = KnownEdges(schedule)
        self._now = [0.0] * schedule.num_ranks
        self._link = [0.0] * schedule.num_ranks
        self._host = [0.0] * schedule.num_ranks  # when the last OFFLOAD or RELOAD beside the actions ends
        self._room_from = [0.0] * schedule.num_ranks  # when the last OFFLOAD does
        self._there: dict[tuple[int | None, int | None], float] = {}  # by stage and microbatch: when its RELOAD ends
        self._whole: dict[int | None, tuple[float, float]] = {}  # by stage: start and end of its gather
        self._made: dict[int | None, tuple[float, float]] = {}  # by stage: start and end of its last B or W
        self._streamed = streamed(schedule) if costs.units > 1 else frozenset()
        self._left: dict[Action, float] = {}
        # For two ranks: when each slot for a value under way becomes free, the earliest first.
        free_at_first = [0.0] * (send_capacity or 0)
        self._room: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(free_at_first))

    def perform(self, rank: int, action: Action) -> tuple[float, float]:
        """Advance a rank's time by its next action, and return the action's start and end."""
        start, cost, last = self._now[rank], self._costs.of(action), 0.0
        stage, op, _, _ = action
        if op is Op.UNSHARD or op is Op.REDUCE_GRAD:
            return self._travel(rank, action, cost)
        if self._costs.offload_beside:
            if op in MOVES:
                return self._move(rank, action, cost)
            start = self._after_moves(rank, action, start)
        if op is Op.RESHARD:
            self._whole.pop(stage, None)
        elif op in USES_WEIGHTS and stage in self._whole:
            units = self._costs.units if action in self._streamed else 1
            since, there = self._whole[stage]
            start, last = max(start, since + (there - since) / units), there + cost / units
        elif op is Op.STEP:
            start = max(start, self._link[rank])
        if action.op in SENDS and self._capacity is not None:
            edge = self._edge(action)
            if self._capacity == 0:
                start, cost = max(start, self._now[edge[1]]), self._costs.link
            else:
                start = max(start, self._room[edge].popleft())
        end = start + cost
        for need in self._awaited_by(action):
            start, end = self._receive(action, need, start, cost)
        end = max(end, last)  # its last unit may arrive late
        if op in MAKES_GRADIENTS:
            self._made[stage] = start, end
        for value in self._left_by(action):
            self._left[value] = start if self._capacity == 0 else end
        self._now[rank] = end
        return start, end

    def _travel(self, rank: int, action: Action, cost: float) -> tuple[float, float]:
        """Return start and end of a gather or a reduction, after those before it."""
        stage, op, _, _ = action
        if op is Op.UNSHARD and stage in self._whole:
            return self._now[rank], self._now[rank]
        ready = last = self._now[rank]
        if op is Op.REDUCE_GRAD and self._costs.reduce_beside:
            units = self._costs.units
            since, made = self._made.get(stage, (ready, ready))
            ready, last = since + (made - since) / units, made + cost / units
        start = max(ready, self._link[rank])
        end = self._link[rank] = max(start + cost, last)
        start = max(start, end - cost)
        if op is Op.UNSHARD:
            self._whole[stage] = start, end
        if not self._costs.is_beside(action):
            self._now[rank] = end
        return start, end

    def _after_moves(self, rank: int, action: Action, start: float) -> float:
        """Return when an action can start after the moves it waits for; ``start`` is when it could without them."""
        if action.op is Op.F:
            return max(start, self._room_from[rank])
        if action.op in MAKES_INPUT_GRADIENTS:
            return max(start, self._there.pop((action.stage, action.microbatch), start))
        return start

    def _move(self, rank: int, action: Action, cost: float) -> tuple[float, float]:
        """Return start and end of a move to or from host memory, after those before it."""
        start = max(self._now[rank], self._host[rank])
        end = self._host[rank] = start + cost
        if action.op is Op.OFFLOAD:
            self._room_from[rank] = end
        else:
            self._there[action.stage, action.microbatch] = end
        return start, end

    def _receive(self, action: Action, need: Action, start: float, cost: float) -> tuple[float, float]:
        """Return start and end of an action that waits for a value from another rank."""
        left = self._left.pop(need)
        arrival = left + self._costs.link
        if action.op not in RECVS:
            start = max(start, arrival)
            return start, start + cost
        start = max(start, left)
        end = max(start + cost, arrival)
        if self._capacity:
            self._room[self._edge(action)].append(end)
        return start, end
