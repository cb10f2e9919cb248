"""The rules of ``rules.py``, cached by stage and op for schedules of millions of actions.

A rule gives the same result for all microbatches, so its result for one is cached for the others. This does not hold
where microbatches are cut into slices, whose first and last need less: there each call evaluates the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypar.schedules.action import SENDS, Action, Op
from raypar.schedules.rules import partner, rank_of
from raypar.schedules.schedule import Schedule

Rule = Callable[[Action, Schedule], Sequence[Action]]
_Kind = tuple[int | None, Op, int | None]  # stage, op and peer: an action without its microbatch

_make = tuple.__new__  # the constructor of Action takes twice as long


class KnownRule:
    """A cached rule of one schedule that returns actions of the microbatch of its argument, such as ``needs``.

    Args:
        rule: The rule.
        schedule: The schedule.
    """

    def __init__(self, rule: Rule, schedule: Schedule) -> None:
        self._rule, self._schedule = rule, schedule
        self._known: dict[_Kind, tuple[_Kind, ...]] = {}

    def __call__(self, action: Action) -> Sequence[Action]:
        """Return the rule's result for an action."""
        if self._schedule.slices > 1:
            return self._rule(action, self._schedule)
        stage, op, microbatch, peer = action
        found = self._known.get((stage, op, peer))
        if found is None:
            actions = self._rule(action, self._schedule)
            found = self._known[stage, op, peer] = tuple((one.stage, one.op, one.peer) for one in actions)
        return [_make(Action, (where, what, microbatch, other)) for where, what, other in found] if found else ()


class KnownEdges:
    """The rows between which the messages of a lowered schedule go.

    Args:
        schedule: The schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._known: dict[_Kind, tuple[int, int]] = {}

    def __call__(self, action: Action) -> tuple[int, int]:
        """Return the sending row and the receiving row of a SEND or a RECV."""
        stage, op, _, peer = action
        found = self._known.get((stage, op, peer))
        if found is None:
            own, other = rank_of(action, self._schedule), rank_of(partner(action), self._schedule)
            found = (own, other) if op in SENDS else (other, own)
            if not self._schedule.replicas:  # else microbatches go to one replica after the other
                self._known[stage, op, peer] = found
        return found
