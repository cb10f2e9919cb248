"""Reducing gradients over replicas: the positions of REDUCE_GRAD in the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from raypar.schedules.action import SENDS, Action, Op
from raypar.schedules.rules import MAKES_GRADIENTS
from raypar.schedules.schedule import Schedule

#: How often a stage reduces its gradients. "step": once, after its last backward, so that the sums of a whole step
#: travel once (ZeRO-1). "microbatch": after every backward, so that a rank holds the whole gradients of one microbatch,
#: and only its shard of all others (ZeRO-2), for as many times the communication.
ReduceWhen = Literal["step", "microbatch"]

_GOES_FIRST = SENDS | {Op.UNSHARD, Op.RESHARD}


def reduce_gradients(schedule: Schedule, when: ReduceWhen = "step") -> Schedule:
    """Add REDUCE_GRAD for every stage that has none, after a B or W.

    The SEND of that backward goes first, because the previous rank waits for it, and so do RESHARD and UNSHARD. In an
    asynchronous schedule it comes before every STEP of the stage.

    Args:
        schedule: The schedule, lowered or not. An evaluation is returned as it is.
        when: "step" for one REDUCE_GRAD after the last weight gradient of the stage, "microbatch" for one after each.

    Returns:
        The schedule with other rows.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
    """
    reduced = {action.stage for row in schedule.rows for action in row if action.op is Op.REDUCE_GRAD}
    add = (
        partial(_before_steps, reduced=reduced)
        if schedule.stream
        else partial(_with_reduce_grad, when=when, reduced=reduced)
    )
    rows = (tuple(add(row)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def _before_steps(row: Sequence[Action], reduced: Collection[int | None]) -> Iterator[Action]:
    for action in row:
        if action.op is Op.STEP and action.stage not in reduced:
            yield Action(action.stage, Op.REDUCE_GRAD, None)
        yield action


def _with_reduce_grad(row: Sequence[Action], when: ReduceWhen, reduced: Collection[int | None]) -> Iterator[Action]:
    last = {action.stage: index for index, action in enumerate(row) if action.op in MAKES_GRADIENTS}
    waiting: list[Action] = []
    for index, action in enumerate(row):
        if action.op not in _GOES_FIRST:
            yield from waiting
            waiting.clear()
        yield action
        stage = action.stage
        if action.op in MAKES_GRADIENTS and stage not in reduced and (when == "microbatch" or last[stage] == index):
            waiting.append(Action(stage, Op.REDUCE_GRAD, None))
    yield from waiting
