"""Early sends: in the drain of a pipeline, a gradient leaves before the weights' gradients of its backward are made."""

from __future__ import annotations

from dataclasses import replace

from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule

_MOST = 4  # halved backwards of a rank, in multiples of the ranks


def with_early_sends(schedule: Schedule) -> Schedule:
    """A lowered schedule as actors perform it: behind a rank's last forward, ``2B7 2SEND_B7`` is ``2I7 2SEND_B7 2W7``.

    There the rank before has nothing left to do but to wait for the gradient, and gets it when half of the backward is
    done (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2). Every rank holds what it held, and adds up
    its gradients in the same order. Of p ranks that saves up to (p - 1) W, once a step, and a backward in halves costs
    about W / 9 on CPUs: so not before the last forward, nor in the long drain of a GPipe of many microbatches.
    """
    most = _MOST * schedule.num_ranks
    return replace(schedule, rows=tuple([_early(row, most) for row in schedule.rows]))


def _early(row: tuple[Action, ...], most: int) -> tuple[Action, ...]:
    forwards = [place for place, action in enumerate(row) if action.op is Op.F]
    drain = forwards[-1] + 1 if forwards else 0
    full = list(row[:drain])
    for action in row[drain:]:
        whole = action._replace(op=Op.B)
        if action.op is Op.SEND_B and full[-1] == whole:
            full[-1:] = whole._replace(op=Op.I), action, whole._replace(op=Op.W)
        else:
            full.append(action)
    halved = len(full) - len(row)
    return tuple(full) if halved <= most else row
