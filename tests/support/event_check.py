"""A second opinion on rows of actions: ranks that perform them, one event after the other, with messages between them.

Nothing of ``raypar.schedules`` is used but the data types, so what is wrong there can't be wrong here in the same way.
"""

from __future__ import annotations

from collections import defaultdict, deque

from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule
from tests.support.version_check import wrong_updates

Message = tuple[str, int, int, int | None]  # what, the stage that makes it, microbatch; of a skip, the other stage


class UnsoundError(Exception):
    """What a rank can't do, or what is not as it should be in the end."""


def unsound(schedule: Schedule, send_capacity: int | None = None) -> str | None:
    """Why a schedule does not compute its step, or does not come to its end; None if it does both.

    ``send_capacity`` messages may be under way from one rank to another before the next SEND blocks: None for no limit,
    0 for a SEND that blocks until the other rank receives.
    """
    world = _World(schedule, send_capacity)
    try:
        world.run()
        world.close()
    except UnsoundError as error:
        return str(error)
    return wrong_updates(schedule) if schedule.stream else None


class _World:
    """The ranks: where each is in its row, what it has computed and received, and the messages on their way."""

    def __init__(self, schedule: Schedule, capacity: int | None) -> None:
        self.schedule, self.capacity = schedule, capacity
        self.at = [0] * len(schedule.rows)
        self.computed: list[set[tuple[str, int, int]]] = [set() for _ in schedule.rows]  # ("F" | "I" | "W", stage, mb)
        self.received: list[set[Message]] = [set() for _ in schedule.rows]
        self.posted: set[Message] = set()
        self.wires: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.reduced: set[tuple[int, int]] = set()  # rank and stage
        self.unreduced: dict[tuple[int, int], int] = defaultdict(int)  # weight gradients since the last reduction
        self.sharded = any(action.op is Op.UNSHARD for row in schedule.rows for action in row)
        self.whole: set[tuple[int, int]] = set()
        self.together: list[list[Action]] = [[] for _ in schedule.rows]  # what a rank did with its other replicas
        self.stepped = [False] * len(schedule.rows)

    def run(self) -> None:
        """Whoever can go on does, until nobody can."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.at)):
                while self.action(rank) is not None and self.perform(rank):
                    moved = True
        stuck = [f"rank {rank} at {self.action(rank)}" for rank in range(len(self.at)) if self.action(rank) is not None]
        if stuck:
            raise UnsoundError(f"stuck: {', '.join(stuck)}")

    def close(self) -> None:
        """What has to be true when all rows are done."""
        schedule = self.schedule
        everything = set().union(*self.computed)
        for stage in range(len(schedule.placement)):
            for mb in range(schedule.num_microbatches):
                for what in "F" if schedule.forward_only else "FIW":
                    if (what, stage, mb) not in everything:
                        raise UnsoundError(f"nobody did {what} of stage {stage}, microbatch {mb}")
        if any(self.wires.values()):
            raise UnsoundError("messages that nobody received")
        if any(self.unreduced[one] for one in self.reduced):
            raise UnsoundError("gradients that are not all there when they are reduced for the last time")
        if self.whole:
            raise UnsoundError("weights that are still whole in the end")
        held = {(rank, stage) for stage in range(len(schedule.placement)) for rank in self.homes(stage)}
        if self.reduced and self.reduced != held:
            raise UnsoundError("some stages reduced their gradients, others did not")
        for stage in range(len(schedule.placement)):
            homes = self.homes(stage)
            if any(self.together[rank] != self.together[homes[0]] for rank in homes):
                raise UnsoundError("replicas that meet in different orders")
            if schedule.num_microbatches // max(1, schedule.stream) % max(1, len(homes)):
                raise UnsoundError("replicas with unequal shares")
        closes = schedule.lowered and not schedule.forward_only and not schedule.stream
        if closes and not all(self.stepped):
            raise UnsoundError("a rank took no STEP")

    def action(self, rank: int) -> Action | None:
        row = self.schedule.rows[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def perform(self, rank: int) -> bool:
        """Whether the rank could perform its next action. It did, then."""
        action = self.action(rank)
        assert action is not None
        if action.op is Op.STEP and action.stage is None:
            return self.step(rank)
        if action.stage is None or not self.is_home(rank, action.stage):
            raise UnsoundError(f"rank {rank} does not hold the stage of {action}")
        if action.op in (Op.STEP, Op.USE):
            return self.alone(rank, action.op, action.stage)
        if action.op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD):
            return self.whole_stage(rank, action.op, action.stage)
        if action.microbatch not in range(self.schedule.num_microbatches):
            raise UnsoundError(f"{action}: there is no such microbatch")
        if rank != self.row(action.stage, action.microbatch):
            raise UnsoundError(f"{action} is not of rank {rank}'s turn")
        if action.op in (Op.SEND_F, Op.SEND_B):
            return self.send(rank, action)
        if action.op in (Op.RECV_F, Op.RECV_B):
            return self.receive(rank, action)
        return self.compute(rank, action)

    def compute(self, rank: int, action: Action) -> bool:
        stage, op, mb, _ = action
        if self.sharded and op is not Op.W and (rank, stage) not in self.whole:
            raise UnsoundError(f"{action} has only a shard of its weights")
        if op is Op.F:
            if stage > 0 and not self.has(rank, ("F", stage - 1, mb, None)):
                return False
            if not all(self.has(rank, ("F", one, mb, stage)) for one, two in self.schedule.skips if two == stage):
                return False
            if mb % self.schedule.slices and ("F", stage, mb - 1) not in self.computed[rank]:
                raise UnsoundError(f"{action} has no keys and values of the slice before")
            return self.keep(rank, ("F", stage, mb))
        if self.schedule.forward_only:
            raise UnsoundError(f"{action} in an evaluation")
        if op is Op.W:
            if ("I", stage, mb) not in self.computed[rank]:
                raise UnsoundError(f"{action} before its I")
            return self.keep(rank, ("W", stage, mb))
        if ("F", stage, mb) not in self.computed[rank]:
            raise UnsoundError(f"{action} before its F")
        if stage + 1 < len(self.schedule.placement) and not self.has(rank, ("I", stage + 1, mb, None)):
            return False
        if not all(self.has(rank, ("I", two, mb, stage)) for one, two in self.schedule.skips if one == stage):
            return False
        if (mb + 1) % self.schedule.slices and ("I", stage, mb + 1) not in self.computed[rank]:
            raise UnsoundError(f"{action} has no gradients from the slice behind")
        return self.keep(rank, *[(what, stage, mb) for what in ("IW" if op is Op.B else "I")])

    def keep(self, rank: int, *made: tuple[str, int, int]) -> bool:
        for one in made:
            if one in self.computed[rank]:
                raise UnsoundError(f"{one} is computed twice")
            self.computed[rank].add(one)
            self.unreduced[rank, one[1]] += one[0] == "W"
        self.at[rank] += 1
        return True

    def has(self, rank: int, value: Message) -> bool:
        """Whether the value is there. Where nobody can bring it any more, nobody will wait for it either."""
        home = self.row(value[1], value[2])
        if home == rank:
            there = value[:3] in self.computed[rank]
        elif self.schedule.lowered:
            there = value in self.received[rank]
        else:
            return home is not None and value[:3] in self.computed[home]  # it may still come
        if not there:
            raise UnsoundError(f"rank {rank} at {self.action(rank)} has no {value}")
        return True

    def send(self, rank: int, action: Action) -> bool:
        """SEND, unless it is to meet its RECV: then that one performs both."""
        value, wire = self.message(rank, action)
        if self.capacity == 0 or (self.capacity is not None and len(self.wires[wire]) >= self.capacity):
            return False
        self.post(rank, value, wire)
        return True

    def post(self, rank: int, value: Message, wire: tuple[int, int]) -> None:
        if value in self.posted:
            raise UnsoundError(f"{value} is sent twice")
        if value[:3] not in self.computed[rank]:
            raise UnsoundError(f"rank {rank} sends {value}, which it does not have")
        self.posted.add(value)
        self.wires[wire].append(value)
        self.at[rank] += 1

    def receive(self, rank: int, action: Action) -> bool:
        stage, op, mb, peer = action
        source = peer if peer is not None else stage - 1 if op is Op.RECV_F else stage + 1
        value = ("F" if op is Op.RECV_F else "I", source, mb, None if peer is None else stage)
        wire = (self.peer(rank, source, action), rank)
        if self.capacity == 0:
            other = self.action(wire[0])
            if other is None or other.op not in (Op.SEND_F, Op.SEND_B):
                return False
            if not self.is_home(wire[0], other.stage) or self.message(wire[0], other)[1] != wire:
                return False
            self.post(wire[0], *self.message(wire[0], other))
        if not self.wires[wire]:
            return False
        got = self.wires[wire].popleft()
        if got != value:
            raise UnsoundError(f"rank {rank} at {action} receives {got}")
        self.received[rank].add(value)
        self.at[rank] += 1
        return True

    def message(self, rank: int, send: Action) -> tuple[Message, tuple[int, int]]:
        stage, op, mb, peer = send
        target = peer if peer is not None else stage + 1 if op is Op.SEND_F else stage - 1
        return ("F" if op is Op.SEND_F else "I", stage, mb, peer), (rank, self.peer(rank, target, send))

    def peer(self, rank: int, stage: int, action: Action) -> int:
        """The rank at the other end of a wire."""
        if not self.schedule.lowered or stage not in range(len(self.schedule.placement)):
            raise UnsoundError(f"{action} has no other end")
        ends = (action.stage, stage) if action.op in (Op.SEND_F, Op.RECV_B) else (stage, action.stage)
        if action.peer is not None and ends not in self.schedule.skips:
            raise UnsoundError(f"{action} is of no skip")
        other = self.row(stage, action.microbatch)
        if other == rank or other is None:
            raise UnsoundError(f"{action} has no other end")
        return other

    def whole_stage(self, rank: int, op: Op, stage: int) -> bool:
        here = rank, stage
        if op is Op.REDUCE_GRAD:
            if not self.unreduced[here]:
                raise UnsoundError(f"stage {stage} has no gradients to reduce that are not reduced already")
            if self.stepped[rank]:
                raise UnsoundError(f"stage {stage} reduces gradients that the optimizer has used already")
            self.reduced.add(here)
            self.unreduced[here] = 0
        elif op is Op.UNSHARD:
            self.whole.add(here)
        elif here in self.whole:
            self.whole.remove(here)
        else:
            raise UnsoundError(f"stage {stage} frees weights that are not whole")
        self.together[rank].append(Action(stage, op, None))
        self.at[rank] += 1
        return True

    def alone(self, rank: int, op: Op, stage: int) -> bool:
        """An update of one stage, or its next version: nobody waits for it. ``wrong_updates`` looks at the numbers."""
        if not self.schedule.stream:
            raise UnsoundError(f"stage {stage} has versions of its own, but the schedule is synchronous")
        if op is Op.STEP and (rank, stage) in self.whole:
            raise UnsoundError(f"stage {stage} takes a STEP with whole weights")
        self.at[rank] += 1
        return True

    def step(self, rank: int) -> bool:
        """The update, in which all ranks vote: nobody goes on before all are there."""
        if self.schedule.forward_only or self.schedule.stream or self.stepped[rank]:
            raise UnsoundError(f"rank {rank} takes a STEP too many")
        if any(self.lacks_gradients(rank, s) for s in range(len(self.schedule.placement)) if self.is_home(rank, s)):
            raise UnsoundError(f"rank {rank} takes the STEP before all of its gradients are there")
        if any(one == rank for one, _ in self.whole):
            raise UnsoundError(f"rank {rank} takes the STEP with whole weights")
        voters = [other for other, row in enumerate(self.schedule.rows) if any(action.op is Op.STEP for action in row)]
        for other in voters:
            action = self.action(other)
            if not self.stepped[other] and (action is None or action.op is not Op.STEP):
                return False
        self.stepped[rank] = True
        self.at[rank] += 1
        return True

    def lacks_gradients(self, rank: int, stage: int) -> bool:
        own = (mb for mb in range(self.schedule.num_microbatches) if self.row(stage, mb) == rank)
        return any(("W", stage, mb) not in self.computed[rank] for mb in own)

    def is_home(self, rank: int, stage: int | None) -> bool:
        return stage in range(len(self.schedule.placement)) and rank in self.homes(stage)

    def homes(self, stage: int) -> list[int]:
        """The rows of a stage, one for each of its replicas; of a stage that is not there, none."""
        if stage not in range(len(self.schedule.placement)):
            return []
        home, rows = self.schedule.placement[stage], range(len(self.at))
        if not self.schedule.replicas:
            return [home] if home in rows else []
        owners = [rank for rank, count in enumerate(self.schedule.replicas) for _ in range(count)]
        return [row for row in rows if owners[row] == home]

    def row(self, stage: int, mb: int) -> int | None:
        """Who computes a microbatch of a stage: its replicas take them in turn."""
        homes, turns = self.homes(stage), self.schedule.turns
        return homes[(mb + (turns[stage] if stage < len(turns) else 0)) % len(homes)] if homes else None
