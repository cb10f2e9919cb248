"""Leaving out actions without effect: gathers that serve no action, and reductions of nothing."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.schedules.action import Action, Op
from raypar.schedules.rules import MAKES_GRADIENTS, USES_WEIGHTS


def without_idle(row: Sequence[Action], first: int = 0) -> tuple[Action, ...]:
    """Leave out the actions of whole stages that have no effect.

    These are: UNSHARD of a stage that is whole, RESHARD of one that is not, an UNSHARD and RESHARD between which no
    action needs the weights, and a REDUCE_GRAD without a weight gradient since the previous one. A row combined from
    two schedules has such actions.

    Args:
        row: The row of one rank.
        first: The first position whose action may be left out. Those before it are done.

    Returns:
        The row without them.
    """
    kept: list[Action | None] = []
    whole: dict[int | None, int] = {}  # by stage that is whole: the position of its UNSHARD
    used, made = set[int | None](), set[int | None]()  # stages, since their last UNSHARD or REDUCE_GRAD
    for index, action in enumerate(row):
        stage, op, _, _ = action
        idle = (
            (op is Op.UNSHARD and stage in whole)
            or (op is Op.RESHARD and stage not in whole)
            or (op is Op.REDUCE_GRAD and stage not in made)
        )
        if op is Op.UNSHARD and not idle:
            whole[stage] = index
            used.discard(stage)
        elif op is Op.RESHARD and not idle:
            opened = whole.pop(stage)
            if opened >= first and stage not in used:
                kept[opened], idle = None, True
        elif op is Op.REDUCE_GRAD:
            made.discard(stage)
        if op in USES_WEIGHTS:
            used.add(stage)
        if op in MAKES_GRADIENTS:
            made.add(stage)
        kept.append(action if index < first or not idle else None)
    return tuple(action for action in kept if action is not None)
