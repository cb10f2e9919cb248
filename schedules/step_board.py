"""A training step on paper, as it is taken by hand: what may be done next, and why something can't be done yet."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypar.schedules.action import RECVS, SENDS, STEP, Action, Op
from raypar.schedules.checking.counterexample import demand_sound
from raypar.schedules.rules import needs, partner, provides, rank_of
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import simulate

_MOST_SHOWN = 8


class Move(NamedTuple):
    """What happens at once: a compute action, a SEND with its RECV, or the STEP of all ranks.

    actions  (pipeline rank, action) of each
    """

    actions: tuple[tuple[int, Action], ...]

    @property
    def head(self) -> Action:
        """The action that stands for the move: of a SEND and its RECV the SEND."""
        return self.actions[0][1]

    @property
    def names(self) -> tuple[Action, ...]:
        """Its actions, each once."""
        return tuple(dict.fromkeys(action for _, action in self.actions))

    def __str__(self) -> str:
        return " + ".join(map(str, self.names))


@dataclass(frozen=True, repr=False)
class Why:
    """Why a move can't be taken yet: what it waits for, and what that waits for, down to what can be taken.

    asked   the action that was asked for, one of the move's
    status  ``done``, ``ready`` or ``waits``
    more    moves that it waits for too and that are not told
    """

    move: Move
    asked: Action
    status: str
    waits_for: tuple[Why, ...] = ()
    more: int = 0

    @property
    def causes(self) -> tuple[Action, ...]:
        """The actions that can be taken and that it comes down to."""
        found = (cause for why in self.waits_for for cause in why.causes)
        return (self.move.head,) if self.status == "ready" else tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        if self.status != "waits":
            return f"{self.move} is {'done' if self.status == 'done' else _ready(self.move)}"
        return "\n".join(self._lines(str(self.move), ""))

    def _lines(self, name: str, indent: str) -> Iterator[str]:
        for why in self.waits_for:
            if why.status == "ready":
                yield f"{indent}{name} waits for {why.move}, which is {_ready(why.move)}"
            else:
                yield f"{indent}{name} waits for {why.move}{'' if why.waits_for else ', see above'}"
                yield from why._lines("which" if len(why.waits_for) == 1 else str(why.move), f"{indent}  ")
        if self.more:
            yield f"{indent}... and for {self.more} moves more"


class MoveError(ValueError):
    """A move that the step does not have, that is done, or that is not ready; the text says what to do instead."""


class Board:
    """Where a step stands. ``take`` records a move; whoever plays sees to it that the actors do it.

    ``schedule`` is a lowered training schedule that ``check`` has passed.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.taken: list[Move] = []
        self._there: set[Action] = set()
        self._set_out(schedule)

    @property
    def left(self) -> tuple[Move, ...]:
        """The moves that are left, in the schedule's order: the first one is ready, and behind it the next."""
        return tuple(self._left.values())

    @property
    def done(self) -> tuple[Action, ...]:
        """The actions taken so far, in their order."""
        return tuple(name for move in self.taken for name in move.names)

    def ready(self) -> tuple[Move, ...]:
        """Every move that may be taken next, in the schedule's order."""
        return tuple(move for move in self.left if not self._blockers(move))

    def find(self, action: str | Action) -> Move:
        """The move of an action that is left. Raises MoveError if it is done, or if the step has no such action."""
        wanted = self._known(action)
        if wanted not in self._move_of:
            raise MoveError(f"{wanted} is done; ready: {_listed(self.ready())}")
        return self._move_of[wanted]

    def demand_ready(self, action: str | Action) -> Move:
        """The move of an action that may be taken next. Raises MoveError, for one that waits with ``why``."""
        move = self.find(action)
        if self._blockers(move):
            raise MoveError(repr(self.why(move.head)))
        return move

    def take(self, move: Move) -> None:
        """Record a move that is ready."""
        assert not self._blockers(move), "moves are taken when they are ready"
        del self._left[move.head]
        for name in move.names:
            del self._move_of[name]
            self._there.update(provides(name))
        self.taken.append(move)

    def why(self, action: str | Action) -> Why:
        """What an action waits for, back to what can be done now. Raises MoveError if the step has no such action."""
        wanted = self._known(action)
        if wanted in self._move_of:
            return replace(self._why(self._move_of[wanted], set()), asked=wanted)
        return Why(next(move for move in self.taken if wanted in move.names), wanted, "done")

    def swap(self, schedule: Schedule) -> None:
        """Go on in the order of another lowered schedule of the same step; what is done stays done.

        Raises ScheduleError, and changes nothing, if it is for other ranks, stages or microbatches, or if what is done
        and what it still asks for do not make a sound step.
        """
        old = self.schedule
        faults = [
            f"it has {new} {what}, the step has {was}"
            for what, new, was in (
                ("ranks", schedule.num_ranks, old.num_ranks),
                ("stages", schedule.num_stages, old.num_stages),
                ("microbatches", schedule.num_microbatches, old.num_microbatches),
            )
            if new != was
        ]
        if not faults and schedule.placement != old.placement:
            faults.append(f"its stages are on the ranks {schedule.placement}, those of the step on {old.placement}")
        if faults:
            raise ScheduleError(f"schedule {schedule.name!r} can't take over: {'; '.join(faults)}")
        rows = []
        for rank, row in enumerate(schedule.rows):
            done = [action for move in self.taken for at, action in move.actions if at == rank]
            left = (part for action in row for part in self._left_of(action))
            rows.append((*done, *left))
        name = schedule.name if not self.taken else f"{old.name.rpartition(' then ')[2]} then {schedule.name}"
        mixed = replace(schedule, name=name, rows=tuple(rows))
        demand_sound(mixed)
        self.schedule = mixed
        self._set_out(mixed)

    def _left_of(self, action: Action) -> Iterator[Action]:
        """What is left to do of an action: of a B whose I is done its W."""
        missing = [value for value in provides(action) if value not in self._there]
        yield from (action,) if len(missing) == len(provides(action)) else missing

    def _set_out(self, schedule: Schedule) -> None:
        """Lay out the moves that are left."""
        done = set(self.done)
        self._left = {move.head: move for move in moves(schedule) if move.head not in done}
        self._move_of = {name: move for move in self._left.values() for name in move.names}

    def _blockers(self, move: Move) -> list[Move]:
        """The moves that have to be taken before this one."""
        if move.head == STEP:
            return [other for other in self._left.values() if other.head != STEP]
        wanted = (need for name in move.names for need in needs(name, self.schedule))
        missing = (need for need in wanted if need not in self._there and need not in move.names)
        return list(dict.fromkeys(self._maker(need) for need in missing))

    def _maker(self, value: Action) -> Move:
        """The move that brings a value about; one half of a backward may come with the other."""
        if value in self._move_of:
            return self._move_of[value]
        return self._move_of[Action(value.stage, Op.B, value.microbatch)]

    def _why(self, move: Move, told: set[Move]) -> Why:
        blockers = self._blockers(move)
        if not blockers:
            return Why(move, move.head, "ready")
        told.add(move)
        shown = blockers[:_MOST_SHOWN]
        found = tuple(Why(one, one.head, "waits") if one in told else self._why(one, told) for one in shown)
        return Why(move, move.head, "waits", found, len(blockers) - len(shown))

    def _known(self, action: str | Action) -> Action:
        try:
            wanted = Action.parse(action) if isinstance(action, str) else action
        except ValueError as error:
            raise MoveError(str(error)) from None
        every = [name for move in (*self.left, *self.taken) for name in move.names]
        if wanted not in every:
            raise MoveError(f"schedule {self.schedule.name!r} has no action {wanted}{_instead(wanted, every)}")
        return wanted


def moves(schedule: Schedule) -> Iterator[Move]:
    """A lowered training schedule as moves, in an order in which every action finds what it needs."""
    # Sorting by start time keeps simulate's own order where times are equal, and that order is causal.
    for event in sorted(simulate(schedule).events, key=lambda event: event.start):
        action = event.action
        if action.op in SENDS:
            other = partner(action)
            yield Move(((event.rank, action), (rank_of(other, schedule), other)))
        elif action.op not in RECVS and action.op is not Op.STEP:
            yield Move(((event.rank, action),))
    if not schedule.forward_only:
        yield Move(tuple((rank, STEP) for rank in range(schedule.num_ranks)))


def _ready(move: Move) -> str:
    return f'ready: do("{move.head}")'


def _listed(ready: tuple[Move, ...]) -> str:
    more = f" and {len(ready) - _MOST_SHOWN} more" if len(ready) > _MOST_SHOWN else ""
    return ", ".join(str(move.head) for move in ready[:_MOST_SHOWN]) + more if ready else "nothing, take finish()"


def _instead(wanted: Action, every: Sequence[Action]) -> str:
    """What there is instead of an action that a step does not have: the halves of a backward, its whole, or names that
    come close."""
    whole, first, second = (wanted._replace(op=op) for op in (Op.B, Op.I, Op.W))
    if wanted.op is Op.B and first in every:
        return f": this backward is split, take {first} and then {second}"
    if wanted.op in (Op.I, Op.W) and whole in every:
        return f": this backward is whole, take {whole}"
    close = difflib.get_close_matches(str(wanted), list(map(str, every)), n=3)
    return f": did you mean {', '.join(close)}?" if close else ""


def maker_of(action: Action, actions: Collection[Action]) -> Action:
    """The one of these actions that has made what is to be seen of another: of a SEND what it sends."""
    if action.op is Op.SEND_F:
        return action._replace(op=Op.F)
    if action.op is Op.SEND_B:
        first = action._replace(op=Op.I)
        return first if first in actions else action._replace(op=Op.B)
    return action


def makes_tensors(action: Action) -> bool:
    """Whether there is something to see of an action: the first stage hands no gradient on."""
    if action.op in (Op.B, Op.I):
        return action.stage != 0
    return action.op is Op.F or action.op in RECVS
