"""The state of one training step that is performed move by move: which moves are ready, and why others are not."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypar.schedules.action import RECVS, SENDS, STEP, WHOLE_STAGE, Action, Op
from raypar.schedules.checking.counterexample import demand_sound
from raypar.schedules.drawing.notebook import own_lines
from raypar.schedules.nearest_name import near
from raypar.schedules.passes.without_idle import without_idle
from raypar.schedules.rules import Occurrence, needs, partner, provides, rank_of, stage_needs
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import simulate

_MOST_SHOWN = 8
_LONGEST_NAME = 40  # characters of a text that are compared with the names of actions
_MOST_HINTS = 4  # suggestions for an unknown name
_LONGEST, _SHORT = 16, 6  # lines of the explanation of ``why``, and of one in an error message


class Move(NamedTuple):
    """The actions that happen together: one of a row, a SEND with its RECV, or the STEP of all ranks.

    Attributes:
        actions: One ``(pipeline rank, action)`` for each action.
        before: Number of equal moves before it in the step: an action of a whole stage may be repeated.
    """

    actions: tuple[tuple[int, Action], ...]
    before: int = 0

    @property
    def head(self) -> Action:
        """Return the action that names the move; for a SEND and its RECV that is the SEND."""
        return self.actions[0][1]

    @property
    def names(self) -> tuple[Action, ...]:
        """Return the move's actions, each once."""
        return tuple(dict.fromkeys(action for _, action in self.actions))

    def __str__(self) -> str:
        return " + ".join(map(str, self.names))


@dataclass(frozen=True, repr=False)
class Why:
    """Why a move is not ready: the moves it waits for, the moves those wait for, and so on down to ready moves.

    Attributes:
        move: The move.
        asked: The action of the move that the user asked about.
        status: ``done``, ``ready`` or ``waits``.
        waits_for: The same for each move that it waits for.
        more: Number of further moves that it waits for, which ``waits_for`` leaves out.
    """

    move: Move
    asked: Action
    status: str
    waits_for: tuple[Why, ...] = ()
    more: int = 0

    @property
    def causes(self) -> tuple[Action, ...]:
        """Return the ready actions at the ends of all chains of waiting."""
        found = (cause for why in self.waits_for for cause in why.causes)
        return (self.move.head,) if self.status == "ready" else tuple(dict.fromkeys(found))

    @property
    def full(self) -> str:
        """Return the whole explanation, down to the ready moves on every branch."""
        if self.status != "waits":
            return f"{self.move} is {'done' if self.status == 'done' else _ready(self.move)}"
        return "\n".join(self._lines(str(self.move), ""))

    @property
    def brief(self) -> str:
        """Return the explanation if it has few lines; else what the move itself waits for, and what to do next."""
        if self.full.count("\n") < _SHORT:
            return self.full
        direct = [str(why.move) for why in self.waits_for[:_MOST_HINTS]]
        more = len(self.waits_for) + self.more - len(direct)
        waits = f"{self.move} waits for {', '.join(direct)}{f' and {more} moves more' if more else ''}"
        return f'{waits}\n{self._next()}; why("{self.asked}") has the chain in between'

    def __repr__(self) -> str:
        lines = self.full.splitlines()
        if len(lines) <= _LONGEST:
            return self.full
        shown = _LONGEST - 2
        return "\n".join([*lines[:shown], f"... {len(lines) - shown} lines more are in why(...).full", self._next()])

    def _next(self) -> str:
        """Name the ready moves among those that it waits for."""
        dos = " or ".join(f'do("{cause}")' for cause in self.causes[:_MOST_HINTS])
        return f'next: {dos}; run_to("{self.asked}") takes it and all before it'

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
    """A move that does not exist in the step, is done already or is not ready; the message says what to do instead."""

    _render_traceback_ = own_lines


class Board:
    """The state of a step. ``take`` only records a move; the caller makes the actors perform it.

    Attributes:
        schedule: The lowered training schedule, which has passed ``check``.
        taken: The moves taken so far, in their order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.taken: list[Move] = []
        self._there: set[Action] = set()  # what the actions taken provide
        self._count_moves(schedule)

    @property
    def left(self) -> tuple[Move, ...]:
        """Return the moves that are left, in the schedule's order, in which each one becomes ready in time."""
        return tuple(self._left)

    @property
    def done(self) -> tuple[Action, ...]:
        """Return the actions taken so far, in their order."""
        return tuple(name for move in self.taken for name in move.names)

    def ready(self) -> tuple[Move, ...]:
        """Return every move that may be taken next, in the schedule's order."""
        return tuple(move for move in self.left if not self._blockers(move))

    def find(self, action: str | Action) -> Move:
        """Return the move of an action; for a repeated action, the first one that is left.

        Args:
            action: An Action, or a text like "1F0".

        Returns:
            The move, which is not taken yet.

        Raises:
            MoveError: If the action is done already, or if the step has no such action.
        """
        wanted = self._known(action)
        move = self._next(wanted)
        if move is None:
            raise MoveError(f"{wanted} is done; ready: {_listed(self.ready())}")
        return move

    def demand_ready(self, action: str | Action) -> Move:
        """Return the move of an action, if it is ready.

        Args:
            action: An Action, or a text like "1F0".

        Returns:
            The move.

        Raises:
            MoveError: If the move is done, does not exist or is not ready. If it is not ready, the text says what it
                waits for, as ``why`` does.
        """
        move, wanted = self.find(action), self._known(action)
        if self._blockers(move):
            raise MoveError(self.why(wanted).brief)
        return move

    def take(self, move: Move) -> None:
        """Record a move, which must be ready."""
        assert not self._blockers(move), "moves are taken when they are ready"
        del self._left[move]
        for name in move.names:
            self._there.update(provides(name))
        self.taken.append(move)

    def why(self, action: str | Action) -> Why:
        """Explain what an action waits for, down to the moves that are ready.

        Args:
            action: An Action, or a text like "1F0".

        Returns:
            The explanation.

        Raises:
            MoveError: If the step has no such action.
        """
        wanted = self._known(action)
        move = self._next(wanted)
        if move is not None:
            return replace(self._why(move, set()), asked=wanted)
        return Why(next(move for move in reversed(self.taken) if wanted in move.names), wanted, "done")

    def swap(self, schedule: Schedule) -> None:
        """Continue the step in the order of another schedule; actions that are done stay done.

        Args:
            schedule: A lowered schedule with the same ranks, stages, microbatches and placement.

        Raises:
            ScheduleError: If the schedule has other sizes or another placement, or if its remaining actions after those
                that are done break a rule of ``check``. Then the board is unchanged.
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
        if not faults and schedule.skips != old.skips:
            faults.append(f"its skips between stages are {schedule.skips}, those of the step {old.skips}")
        if faults:
            raise ScheduleError(f"schedule {schedule.name!r} can't take over: {'; '.join(faults)}")
        rows = []
        for rank, row in enumerate(schedule.rows):
            done = [action for move in self.taken for at, action in move.actions if at == rank]
            left = (part for action in row for part in self._left_of(action))
            rows.append(without_idle((*done, *left), first=len(done)))
        name = schedule.name if not self.taken else f"{old.name.rpartition(' then ')[2]} then {schedule.name}"
        mixed = replace(schedule, name=name, rows=tuple(rows))
        demand_sound(mixed)
        self.schedule = mixed
        self._count_moves(mixed)

    def _left_of(self, action: Action) -> Iterator[Action]:
        """Yield what is left to do of an action: the W of a B whose I is done. Actions of whole stages may repeat."""
        if action.op in WHOLE_STAGE:
            yield action
            return
        missing = [value for value in provides(action) if value not in self._there]
        yield from (action,) if len(missing) == len(provides(action)) else missing

    def _count_moves(self, schedule: Schedule) -> None:
        """Compute the moves of a schedule that are left, and what they need of their rows."""
        done = set(self.taken)
        self._moves_of: defaultdict[Action, list[Move]] = defaultdict(list)  # in the schedule's order
        self._left: dict[Move, None] = {}
        for move in moves(schedule):
            for name in move.names:
                self._moves_of[name].append(move)
            if move not in done:
                self._left[move] = None
        self._stage_needs = defaultdict[Occurrence, list[Occurrence]](list)
        for row in schedule.rows:
            for one, wanted in stage_needs(row).items():
                self._stage_needs[one] += wanted  # replicas share the actions of their whole stage

    def _next(self, name: Action) -> Move | None:
        """Return the first move with this action that is left."""
        return next((move for move in self._moves_of[name] if move in self._left), None)

    def _blockers(self, move: Move) -> list[Move]:
        """Return the moves that must be taken before this one."""
        if move.head == STEP:
            return [other for other in self._left if other.head != STEP]
        wanted = (need for name in move.names for need in needs(name, self.schedule))
        missing = [self._maker(need) for need in wanted if need not in self._there and need not in move.names]
        stages = self._stage_needs.get((move.head, move.before), ())
        missing += [one for name, before in stages if (one := self._moves_of[name][before]) in self._left]
        return list(dict.fromkeys(missing))

    def _maker(self, value: Action) -> Move:
        """Return the move that provides a value; one half of a backward may be provided by the full backward B."""
        return self._next(value) or self._moves_of[Action(value.stage, Op.B, value.microbatch)][0]

    def _why(self, move: Move, explained: set[Move]) -> Why:
        """Explain a move; moves in ``explained`` are explained elsewhere in the tree."""
        blockers = self._blockers(move)
        if not blockers:
            return Why(move, move.head, "ready")
        explained.add(move)
        shown = blockers[:_MOST_SHOWN]
        found = tuple(Why(one, one.head, "waits") if one in explained else self._why(one, explained) for one in shown)
        return Why(move, move.head, "waits", found, len(blockers) - len(shown))

    def _known(self, action: str | Action) -> Action:
        """Read an action and check that the step has it. Raises MoveError."""
        every = [name for move in (*self.left, *self.taken) for name in move.names]
        try:
            wanted = Action.parse(action) if isinstance(action, str) else action
        except ValueError as error:
            raise MoveError(f"{error}{_meant(str(action), every)}") from None
        if wanted not in every:
            raise MoveError(f"schedule {self.schedule.name!r} has no action {wanted}{_instead(wanted, every)}")
        return wanted


def moves(schedule: Schedule) -> Iterator[Move]:
    """Yield the moves of a lowered training schedule, in an order in which each one comes after those that it needs."""
    taken: Counter[tuple[int, Action]] = Counter()
    together: Counter[tuple[Action, int]] = Counter()  # number of replicas that reached an action of their whole stage
    # The sort is stable: events with equal start times keep the order of simulate, in which causes come before effects.
    for event in sorted(simulate(schedule).events, key=lambda event: event.start):
        action = event.action
        if action.op in SENDS:
            other = partner(action)
            yield Move(((event.rank, action), (rank_of(other, schedule), other)))
        elif action.op not in RECVS and action.op is not Op.STEP:
            before, rows = taken[event.rank, action], schedule.rows_of(schedule.pipeline_rank_of(event.rank))
            taken[event.rank, action] += 1
            if action.op in WHOLE_STAGE:
                together[action, before] += 1
                if together[action, before] == len(rows):
                    yield Move(tuple((row, action) for row in rows), before)
            else:
                yield Move(((event.rank, action),), before)
    if not schedule.forward_only:
        yield Move(tuple((rank, STEP) for rank in range(schedule.num_ranks)))


def _ready(move: Move) -> str:
    return f'ready: do("{move.head}")'


def _listed(ready: tuple[Move, ...]) -> str:
    more = f" and {len(ready) - _MOST_SHOWN} more" if len(ready) > _MOST_SHOWN else ""
    return ", ".join(str(move.head) for move in ready[:_MOST_SHOWN]) + more if ready else "nothing, take finish()"


def _instead(wanted: Action, every: Sequence[Action]) -> str:
    """Suggest actions instead of one that a step does not have: the halves of a backward, its whole, or close names."""
    whole, first, second = (wanted._replace(op=op) for op in (Op.B, Op.I, Op.W))
    if wanted.op is Op.B and first in every:
        return f": this backward is split, take {first} and then {second}"
    if wanted.op in (Op.I, Op.W) and whole in every:
        return f": this backward is whole, take {whole}"
    return _meant(str(wanted), every)


def _meant(text: str, every: Sequence[Action]) -> str:
    """Suggest the actions that a text may mean: the same without the stage or the microbatch, or close names."""
    said = re.sub(r"[^0-9A-Z_]", "", text[:_LONGEST_NAME].upper())
    names = dict.fromkeys(every)
    half = [str(name) for name in names if said in (str(name), str(name._replace(stage=None)), _stage_and_op(name))]
    close = half or near(said, map(str, names))
    more = ", ..." if len(close) > _MOST_HINTS else ""
    return f": did you mean {', '.join(close[:_MOST_HINTS])}{more}?" if close else ""


def _stage_and_op(name: Action) -> str:
    return str(name._replace(microbatch=None))


def maker_of(action: Action, actions: Collection[Action]) -> Action:
    """Return the action, one of these, that made the tensors to show for another one: for a SEND, those it sends."""
    if action.op is Op.SEND_F:
        return action._replace(op=Op.F, peer=None)
    if action.op is Op.SEND_B:
        first = action._replace(op=Op.I, peer=None)
        return first if first in actions else first._replace(op=Op.B)
    return action


def makes_tensors(action: Action) -> bool:
    """Return whether an action makes tensors that can be shown. The backward of stage 0 does not: it sends none."""
    if action.op in (Op.B, Op.I):
        return action.stage != 0
    return action.op is Op.F or action.op in RECVS
