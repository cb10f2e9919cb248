"""The dynamic order of a step: a rank does next what is ready and comes first in its row, as values arrive."""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from raypar.schedules.action import COMPUTE, RECVS, SENDS, STEP, Action, Op
from raypar.schedules.rules import HOLDS, needs, occurrences, partner, provides, rank_of, stage_needs
from raypar.schedules.schedule import Schedule


class DynamicOrder:
    """Says what each rank does next, as values arrive.

    A rank computes one action at a time: of those that are ready, the one that comes first in its row. An action is
    ready when what it needs of its own rank was given to that rank before, for an actor performs its actions in the
    order in which it gets them, and what it needs of another rank was sent. A rank is given SENDs, RECVs and the
    actions of whole stages as soon as they are ready.

    There is no deadlock, and no rank holds more activations than its row does. An F is taken before its turn only if
    the rest of the row still finds room. So of the actions that are not done, the one that comes first in an order in
    which the rows can be performed, may always go. A SEND is given only while fewer than ``send_window`` values are
    under way to its peer, so that it never blocks, and the RECVs from a peer are given in the order of its SENDs.

    Args:
        schedule: A lowered training schedule that gathers no weights, and has passed ``check``.
        send_window: Number of values that may be under way from one rank to another.
    """

    def __init__(self, schedule: Schedule, send_window: int) -> None:
        self._schedule, self._window = schedule, send_window
        self._ranks = [_Rank(row, schedule) for row in schedule.rows]
        self._sends = [defaultdict[int, deque[Action]](deque) for _ in schedule.rows]  # by receiver and sender
        self._num_left = sum(map(len, schedule.rows))
        self._under_way = Counter[tuple[int, int]]()  # likewise: values whose RECVs are not done
        self._sent = set[Action]()  # SENDs that are done, whose RECVs were not given yet

    def take(self, rank: int) -> Iterator[Action]:
        """Yield what a rank is given now, in its order."""
        here = self._ranks[rank]
        for sends in self._sends[rank].values():
            while sends and sends[0] in self._sent:
                send = sends.popleft()
                self._sent.discard(send)
                self._num_left -= 1
                yield here.give(here.places[partner(send)])
        while (place := self._first(here)) is not None:
            here.ready.remove(place)
            self._num_left -= 1
            action = here.give(place)
            if action.op in COMPUTE:
                here.is_computing = True
            elif action.op in SENDS:
                sender, receiver = link = self._link(action)
                self._sends[receiver][sender].append(action)
                self._under_way[link] += 1
            yield action

    def done(self, rank: int, action: Action) -> int:
        """Note that a rank has done an action; return the rank that may be given others for it."""
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
        """Whether every rank was given all its actions."""
        return not self._num_left

    def _first(self, here: _Rank) -> int | None:
        """Return the place of the first ready action that a rank may be given now; None if there is none."""
        is_full = False  # then there is no room for a later F either
        for place in here.ready:
            action = here.row[place]
            if action.op in SENDS:
                if self._under_way[self._link(action)] < self._window:
                    return place
            elif action.op not in COMPUTE:
                return place
            elif not here.is_computing and not (is_full and action.op is Op.F):
                if here.has_room(place):
                    return place
                is_full = True
        return None

    def _link(self, send: Action) -> tuple[int, int]:
        """Return the sender and the receiver of a SEND."""
        return rank_of(send, self._schedule), rank_of(partner(send), self._schedule)


class _Rank:
    """A rank on its way through its row.

    Args:
        row: The row.
        schedule: The schedule that it is of.

    Attributes:
        row: The row.
        places: The place in the row of each action of a microbatch, and of each half of a backward.
        ready: The places of actions that are ready, in the order of the row; without RECVs, which wait for values.
        is_computing: Whether it computes an action.
    """

    def __init__(self, row: Sequence[Action], schedule: Schedule) -> None:
        self.row, self.is_computing = row, False
        self.places = {value: place for place, action in enumerate(row) for value in provides(action)}
        found = [_needed(action, self.places, schedule) for action in row]
        ranked = {one: place for place, one in enumerate(occurrences(row))}
        for one, others in stage_needs(row).items():
            found[ranked[one]].update(ranked[other] for other in others)
        reduces = [place for place, action in enumerate(row) if action.op is Op.REDUCE_GRAD]
        for before, place in pairwise(reduces):  # replicas reduce in one order
            found[place].add(before)
        if row and row[-1] == STEP:
            found[-1].update(range(len(row) - 1))
        self._missing = [len(wanted) for wanted in found]
        self._frees: defaultdict[int, list[int]] = defaultdict(list)
        for place, wanted in enumerate(found):
            for other in wanted:
                self._frees[other].append(place)
        self.ready = [place for place, action in enumerate(row) if not found[place] and action.op not in RECVS]
        # By the length of a part of the row from its start: what is held behind it, and behind what else was given.
        self._held = [0, *accumulate(HOLDS.get(action.op, 0) for action in row)]
        self._most = max(self._held)

    def give(self, place: int) -> Action:
        """Give the rank an action that is ready and may go, and return it."""
        action = self.row[place]
        if held := HOLDS.get(action.op, 0):
            for length in range(place + 1):
                self._held[length] += held
        for other in self._frees[place]:
            self._missing[other] -= 1
            if not self._missing[other] and self.row[other].op not in RECVS:
                insort(self.ready, other)
        return action

    def has_room(self, place: int) -> bool:
        """Return whether the whole row finds room for its activations if this action comes next."""
        return HOLDS.get(self.row[place].op, 0) <= 0 or max(self._held[: place + 1]) < self._most


def _needed(action: Action, places: dict[Action, int], schedule: Schedule) -> set[int]:
    """Return the places in an action's row of what it needs, without what another rank sends."""
    return {places[need] for need in needs(action, schedule) if action.op not in RECVS}
