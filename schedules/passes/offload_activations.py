"""Offload of activations: those of some microbatches are in host memory until shortly before their backwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypar.schedules.action import COMPUTE, MOVES, Action, Op
from raypar.schedules.passes.insertion import with_inserted
from raypar.schedules.rules import MAKES_INPUT_GRADIENTS, why_none_moves
from raypar.schedules.schedule import Schedule, ScheduleError

_Saved = tuple[int | None, int | None]  # stage and microbatch


def offload_activations(schedule: Schedule, most: int | None) -> Schedule:
    """Add OFFLOAD and RELOAD, so that no rank holds more than ``most`` activations on its device.

    Where a forward has no memory left, the activation whose next use is furthest in the future goes to host memory: its
    OFFLOAD comes right after its forward and that one's SENDs, so that the move runs beside the next actions. Its
    RELOAD comes one compute action before its backward if memory allows, else right before that and its RECVs. The row
    of a rank that holds no more than ``most`` anyway does not change.

    Args:
        schedule: A synchronous training schedule, lowered or not. One that has OFFLOAD or RELOAD is returned as it is.
        most: The most activations that a rank's device may hold, each of one microbatch in one stage; None for no
            limit.

    Returns:
        The schedule with other rows.

    Raises:
        ScheduleError: The schedule has another kind, or ``most`` is too few for its order; the text says how many are
            enough.

    Source: Wan et al. 2025, "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization";
    Belady 1966, "A study of replacement algorithms for a virtual-storage computer".
    """
    if most is None or any(action.op in MOVES for row in schedule.rows for action in row):
        return schedule
    if kind := why_none_moves(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} is {kind}: activations go to host memory within one step of whole "
            "microbatches, so leave their bound out"
        )
    if most < 1:
        raise ScheduleError(f"{most} activations are too few for a forward: let 1 or more be on a device")
    moves = [_Moves([action for action in row if action.op in COMPUTE]) for row in schedule.rows]
    short = [rank for rank, one in enumerate(moves) if not one.insert(most)]
    if short:
        enough = next(
            more
            for more in range(most + 1, schedule.num_microbatches * schedule.num_stages + 1)
            if all(_Moves(moves[rank].computes).insert(more) for rank in short)
        )
        raise ScheduleError(
            f"schedule {schedule.name!r} on {schedule.label(short[0])} holds more than {most} activations whose W is "
            f"still to come, which can't go to host memory: allow {enough}, or split no backwards"
        )
    rows = tuple(tuple(one.written_to(row)) for one, row in zip(moves, schedule.rows, strict=True))
    return schedule if rows == schedule.rows else replace(schedule, rows=rows)


class _Moves:
    """The moves of one rank, by the number of the compute action next to them.

    Args:
        computes: The compute actions of the rank's row.
    """

    def __init__(self, computes: Sequence[Action]) -> None:
        self.computes = computes
        self._made: dict[_Saved, int] = {}
        self._used: dict[_Saved, int] = {}
        for at, (stage, op, number, _) in enumerate(computes):
            if op is Op.F:
                self._made[stage, number] = at
            elif op in MAKES_INPUT_GRADIENTS:
                self._used[stage, number] = at
        self._away: set[_Saved] = set()  # in host memory
        self._held: set[_Saved] = set()  # on the device
        self._stays: set[_Saved] = set()  # of these: reloaded, or between I and W
        self._offloads: defaultdict[int, list[Action]] = defaultdict(list)  # by compute action: after it
        self._reloads: defaultdict[int, list[Action]] = defaultdict(list)  # by compute action: before it

    def insert(self, most: int) -> bool:
        """Find moves with which the rank holds at most ``most`` activations; return whether that is possible."""
        for at, (stage, op, number, _) in enumerate(self.computes):
            key = stage, number
            if op is Op.F:
                if not self._has_room(most):
                    return False
                self._held.add(key)
            elif op in MAKES_INPUT_GRADIENTS:
                if key in self._away:
                    if not self._has_room(most):
                        return False
                    self._reload(key, at)
                self._stays.add(key)
            ahead = self.computes[at + 1] if at + 1 < len(self.computes) else None
            later = None if ahead is None or ahead.op not in MAKES_INPUT_GRADIENTS else (ahead.stage, ahead.microbatch)
            if later in self._away and len(self._held) < most:
                self._reload(later, at)
            if op is Op.B or op is Op.W:
                self._held.discard(key)
        return True

    def _has_room(self, most: int) -> bool:
        """Offload activations, the furthest next use first, until one more fits; return whether it does."""
        while len(self._held) >= most:
            movable = self._held - self._stays
            if not movable:
                return False
            last = max(movable, key=lambda key: self._used.get(key, len(self.computes)))
            self._held.remove(last)
            self._away.add(last)
            self._offloads[self._made[last]].append(Action(last[0], Op.OFFLOAD, last[1]))
        return True

    def _reload(self, key: _Saved, at: int) -> None:
        self._reloads[at].append(Action(key[0], Op.RELOAD, key[1]))
        self._away.remove(key)
        self._held.add(key)
        self._stays.add(key)

    def written_to(self, row: Sequence[Action]) -> Iterator[Action]:
        """Yield a row with its moves."""
        return with_inserted(row, after=self._offloads, before=self._reloads)
