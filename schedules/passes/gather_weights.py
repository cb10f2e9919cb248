"""Gathering weights that are sharded over replicas: the positions of UNSHARD and RESHARD in the rows."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.passes.insertion import with_inserted
from raypar.schedules.rules import USES_WEIGHTS
from raypar.schedules.schedule import Schedule, ScheduleError

#: How long a stage's weights are whole. "step": from before its first forward until after its last action that needs
#: them, so that they travel once a step. "microbatch": around each forward and each backward, so that no other stage of
#: the rank need be whole; the actor may then gather them layer by layer.
GatherWhen = Literal["step", "microbatch"]

#: Whether the weights are freed between the forward and the backward of a microbatch, as in FSDP. True: they are freed,
#: and gathered again for the backward. False: they stay whole. "except_last": they stay whole in the last stage only,
#: whose backward follows its forward.
ReshardAfterForward = bool | Literal["except_last"]

_GATHERS = frozenset({Op.UNSHARD, Op.RESHARD})


def gather_weights(
    schedule: Schedule,
    when: GatherWhen,
    *,
    reshard_after_forward: ReshardAfterForward = True,
    resident: int | None = None,
) -> Schedule:
    """Add UNSHARD and RESHARD for every stage, so that weights are whole for each F, B and I; a W needs none.

    RESHARD comes after an action and its SENDs, and UNSHARD before the RECVs of the action that needs it, so that the
    gather runs while the rank waits for them. With "step" it comes one compute action earlier if memory allows, and
    runs during that action. At the STEP no stage is whole.

    With ``resident`` stages a rank, a stage whose weights are needed replaces the stage whose next use is furthest in
    the future, which takes the fewest gathers.

    Args:
        schedule: The schedule, lowered or not, for training or evaluation. One that has UNSHARD or RESHARD is returned
            as it is.
        when: How long the weights are whole, "step" or "microbatch".
        reshard_after_forward: For "microbatch": whether weights are freed between forward and backward. Where they
            are not, neighbouring windows are merged. With True they are not merged, because an actor that gathers
            layer by layer frees each layer in each window.
        resident: For "step": the most stages of a rank that are whole at once, or None for no limit.

    Returns:
        The schedule with other rows.

    Raises:
        ScheduleError: ``when`` is unknown, or ``resident`` is below 1 or given for "microbatch".

    Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3; Belady
    1966, "A study of replacement algorithms for a virtual-storage computer".
    """
    if when not in ("step", "microbatch"):
        raise ScheduleError(f"weights can't be gathered once a {when}: take 'step' or 'microbatch'")
    if resident is not None and when == "microbatch":
        raise ScheduleError(
            f"resident={resident} bounds what is whole during a step: gather once a step, or leave it out"
        )
    if resident is not None and resident < 1:
        raise ScheduleError(f"resident={resident}: a stage must be whole to compute, so let 1 or more be")
    if any(action.op in _GATHERS for row in schedule.rows for action in row):
        return schedule
    last = schedule.num_stages - 1
    stays_whole = {
        stage: not reshard_after_forward or (reshard_after_forward == "except_last" and stage == last)
        for stage in range(schedule.num_stages)
    }
    rows = []
    for row in schedule.rows:
        windows = _Windows([action for action in row if action.op in COMPUTE])
        if when == "step":
            windows.bounded(resident)
        else:
            windows.each_microbatch(stays_whole, forward_only=schedule.forward_only)
        rows.append(tuple(windows.written_to(row)))
    return replace(schedule, rows=tuple(rows))


class _Windows:
    """The times in which the stages of one rank are whole, as positions among its compute actions.

    Args:
        computes: The compute actions of the rank's row.
    """

    def __init__(self, computes: Sequence[Action]) -> None:
        self._stages = [action.stage if action.op in USES_WEIGHTS else None for action in computes]
        self._computes = computes
        self._opens: defaultdict[int, list[Action]] = defaultdict(list)  # by compute action: UNSHARDs before it
        self._closes: defaultdict[int, list[Action]] = defaultdict(list)  # by compute action: RESHARDs after it

    def bounded(self, resident: int | None) -> None:
        """Keep stages whole until their last use, or until another stage is needed and ``resident`` are whole."""
        uses: defaultdict[int, list[int]] = defaultdict(list)
        for at, stage in enumerate(self._stages):
            if stage is not None:
                uses[stage].append(at)
        most, whole = resident or len(uses), set[int]()

        def next_use(stage: int, after: int) -> int:
            index = bisect_right(uses[stage], after)
            return uses[stage][index] if index < len(uses[stage]) else len(self._stages)

        # No stage is freed too early: the one replaced for the next action now would be replaced for it then.
        for at, stage in enumerate(self._stages):
            ahead = self._stages[at + 1] if at + 1 < len(self._stages) else None
            for wanted in (stage, ahead):
                if wanted is None or wanted in whole:
                    continue
                if len(whole) >= most:
                    furthest = max(whole, key=lambda one: (next_use(one, at), one))
                    if furthest == stage:  # its action comes first, then it is replaced
                        continue
                    self._close(furthest, at - 1)
                    whole.remove(furthest)
                self._open(wanted, at)
                whole.add(wanted)
            if stage is not None and next_use(stage, at) == len(self._stages):
                self._close(stage, at)
                whole.remove(stage)

    def each_microbatch(self, stays_whole: dict[int, bool], *, forward_only: bool) -> None:
        """Make stages whole around each use; those of ``stays_whole`` from a microbatch's forward to its backward."""
        whole, flying = set[int](), defaultdict[int, int](int)
        for at, stage in enumerate(self._stages):
            if stage is None:
                continue
            if stage not in whole:
                self._open(stage, at)
                whole.add(stage)
            if stays_whole[stage] and not forward_only:
                flying[stage] += 1 if self._computes[at].op is Op.F else -1
            goes_on = stays_whole[stage] and self._stages[at + 1 : at + 2] == [stage]
            if flying[stage] <= 0 and not goes_on:
                self._close(stage, at)
                whole.remove(stage)

    def written_to(self, row: Sequence[Action]) -> Iterator[Action]:
        """Yield a row with its UNSHARDs and RESHARDs."""
        return with_inserted(row, after=self._closes, before=self._opens)

    def _open(self, stage: int, at: int) -> None:
        self._opens[at].append(Action(stage, Op.UNSHARD, None))

    def _close(self, stage: int, at: int) -> None:
        self._closes[at].append(Action(stage, Op.RESHARD, None))
