"""The dynamic order of a step: each rank performs the first ready action of its row, as values arrive."""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from raypar.schedules.action import COMPUTE, RECVS, SENDS, STEP, Action, Op
from raypar.schedules.rules import HOLDS, needs, occurrences, partner, provides, rank_of, stage_needs
from raypar.schedules.schedule import Schedule


class DynamicOrder:
    """Chooses the next actions of each rank, as values arrive.

    A rank computes one action at a time, the first ready one of its row. An action is ready when the actions of its
    rank that it needs were issued before it (an actor performs its actions in the order in which it gets them), and the
    values of other ranks that it needs were sent. SENDs, RECVs and the actions of whole stages are issued as soon as
    they are ready.

    There is no deadlock, and no rank holds more activations than in the order of its row. An F is issued before its
    turn only if the rest of the row still has memory. So in any order in which the rows can be performed, the first
    action that is not done may always be issued. A SEND is issued only while fewer than ``send_window`` values are
    under way to its peer, so that it never blocks, and the RECVs from a peer are issued in the order of its SENDs.

    Args:
        schedule: A lowered training schedule that gathers no weights, and has passed ``check``.
        send_window: Number of values that may be under way from one rank to another.
    """

    def __init__(self, schedule: Schedule, send_window: int) -> None:
        self._schedule, self._window = schedule, send_window
        self._ranks = [_Rank(row, schedule) for row in schedule.rows]
        self._sends = [defaultdict[int, deque[Action]](deque) for _ in schedule.rows]  # by receiver and sender
        self._num_left = sum(map(len, schedule.rows))
        self._under_way = Counter[tuple[int, int]]()  # by sender and receiver: values whose RECVs are not done
        self._sent = set[Action]()  # SENDs that are done, whose RECVs were not issued yet

    def take(self, rank: int) -> Iterator[Action]:
        """Yield the actions that a rank is issued now, in their order."""
        here = self._ranks[rank]
        for sends in self._sends[rank].values():
            while sends and sends[0] in self._sent:
                send = sends.popleft()
                self._sent.discard(send)
                self._num_left -= 1
                yield here.issue(here.positions[partner(send)])
        while (position := self._first(here)) is not None:
            here.ready.remove(position)
            self._num_left -= 1
            action = here.issue(position)
            if action.op in COMPUTE:
                here.is_computing = True
            elif action.op in SENDS:
                sender, receiver = link = self._link(action)
                self._sends[receiver][sender].append(action)
                self._under_way[link] += 1
            yield action

    def done(self, rank: int, action: Action) -> int:
        """Record that a rank has done an action; return the rank that may have new ready actions because of it."""
        if action.op in COMPUTE:
            self._ranks[rank].is_computing = False
        elif action.op in SENDS:
            self._sent.add(action)
            return self._link(action)[1]
        elif action.op in RECVS:
            link = self._link(partner(action))
            self._under_way[link] -= 1
            return link[0]
        return rank

    @property
    def is_over(self) -> bool:
        """Whether all actions of every rank were issued."""
        return not self._num_left

    def _first(self, here: _Rank) -> int | None:
        """Return the position of the first ready action that may be issued to a rank now; None if there is none."""
        is_full = False  # then there is no memory for a later F either
        for position in here.ready:
            action = here.row[position]
            if action.op in SENDS:
                if self._under_way[self._link(action)] < self._window:
                    return position
            elif action.op not in COMPUTE:
                return position
            elif not here.is_computing and not (is_full and action.op is Op.F):
                if here.has_room(position):
                    return position
                is_full = True
        return None

    def _link(self, send: Action) -> tuple[int, int]:
        """Return the sender and the receiver of a SEND."""
        return rank_of(send, self._schedule), rank_of(partner(send), self._schedule)


class _Rank:
    """A rank and its progress through its row.

    Args:
        row: The row.
        schedule: The schedule of the row.

    Attributes:
        row: The row.
        positions: The position in the row of each action of a microbatch, and of each half of a backward.
        ready: The positions of ready actions, in the order of the row; without RECVs, which wait for values.
        is_computing: Whether the rank computes an action.
    """

    def __init__(self, row: Sequence[Action], schedule: Schedule) -> None:
        self.row, self.is_computing = row, False
        self.positions = {value: position for position, action in enumerate(row) for value in provides(action)}
        needed = [_needed(action, self.positions, schedule) for action in row]
        position_of = {occurrence: position for position, occurrence in enumerate(occurrences(row))}
        for occurrence, wanted in stage_needs(row).items():
            needed[position_of[occurrence]].update(position_of[need] for need in wanted)
        reduces = [position for position, action in enumerate(row) if action.op is Op.REDUCE_GRAD]
        for before, position in pairwise(reduces):  # replicas reduce in one order
            needed[position].add(before)
        if row and row[-1] == STEP:
            needed[-1].update(range(len(row) - 1))
        self._num_missing = [len(positions) for positions in needed]
        self._frees: defaultdict[int, list[int]] = defaultdict(list)
        for position, positions in enumerate(needed):
            for need in positions:
                self._frees[need].append(position)
        self.ready = [
            position for position, action in enumerate(row) if not needed[position] and action.op not in RECVS
        ]
        # By n: the activations held after the first n actions of the row and all later ones that were issued already.
        self._held = [0, *accumulate(HOLDS.get(action.op, 0) for action in row)]
        self._most = max(self._held)

    def issue(self, position: int) -> Action:
        """Issue the ready action at a position to the rank, and return it."""
        action = self.row[position]
        if held := HOLDS.get(action.op, 0):
            for length in range(position + 1):
                self._held[length] += held
        for other in self._frees[position]:
            self._num_missing[other] -= 1
            if not self._num_missing[other] and self.row[other].op not in RECVS:
                insort(self.ready, other)
        return action

    def has_room(self, position: int) -> bool:
        """Return whether the activations of the whole row fit in memory if this action comes next."""
        return HOLDS.get(self.row[position].op, 0) <= 0 or max(self._held[: position + 1]) < self._most


def _needed(action: Action, positions: dict[Action, int], schedule: Schedule) -> set[int]:
    """Return the positions in an action's row of what it needs, without what another rank sends."""
    return {positions[need] for need in needs(action, schedule) if action.op not in RECVS}
