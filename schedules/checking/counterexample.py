"""Small counterexamples: when a check fails on a large schedule, find a small one that breaks the same rule."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

from raypar.schedules.action import RECVS, SENDS, Action
from raypar.schedules.checking.check import CheckBounds, check
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.drawing.cells import ACTIONS, RANKS
from raypar.schedules.passes.without_idle import without_idle
from raypar.schedules.rules import partner
from raypar.schedules.schedule import Schedule

Generate = Callable[[int, int, int], Schedule]

MOST_TRIES = 120  # checks in the search over sizes, and as many in the search over rows
MOST_SECONDS = 0.35  # for each of the two searches
MOST_MICROBATCHES = 12  # a fault that needs more microbatches is left to the search over rows

_NAMED = re.compile(r"[A-Z](\d+)\b|\bmicrobatch ([\d, ]+)")


def demand_sound(schedule: Schedule, generate: Generate | None = None, **bounds: Unpack[CheckBounds]) -> None:
    """Check a schedule; on failure the error also shows the smallest schedule found that breaks the same rule.

    Args:
        schedule: The schedule to check.
        generate: Generates the same schedule for other numbers ``(ranks, microbatches, chunks)``, with the same passes
            applied. None if the schedule exists only as rows.
        **bounds: ``send_capacity``, ``max_in_flight`` and ``max_versions``, as in ``check``.

    Raises:
        CheckError: If the schedule breaks a rule. Its faults are those of ``schedule``; its text also shows the small
            schedule if one is found within the time limit.
    """
    try:
        check(schedule, **bounds)
    except CheckError as error:
        found = generate and _Search(error.faults, bounds).sizes(schedule, generate)
        found = found or _Search(error.faults, bounds).rows(schedule)
        if not found:
            raise
        raise CheckError(f"{error}\n{found}", error.faults) from None


class _Search:
    """A search for small schedules that break the rule of the first fault, and no rule that the large one keeps."""

    def __init__(self, faults: Sequence[Fault], bounds: CheckBounds) -> None:
        self._fault, self._rules = faults[0], {fault.rule for fault in faults}
        self._tidy = self._rules.isdisjoint({"reduce", "weights"})  # else an idle action may be the fault
        self._bounds = bounds
        self._tries, self._end = 0, time.monotonic() + MOST_SECONDS

    def sizes(self, schedule: Schedule, generate: Generate) -> str | None:
        """Describe the smallest sizes that fail: fewest ranks, then fewest microbatches, then fewest chunks."""
        for ranks, microbatches, chunks in _smaller(schedule):
            if not self._time_left:
                return None
            try:
                error = self._error(generate(ranks, microbatches, chunks))
            except Exception:  # the generator does not accept these sizes, which is another fault
                continue
            if error is not None:
                counts = [_count(ranks, "rank"), _count(microbatches, "microbatch", "es")]
                counts += [_count(chunks, "chunk")] if chunks > 1 else []
                return f"It also fails with {_and(counts)}, the smallest:\n{error.picture}"
        return None

    def rows(self, schedule: Schedule) -> str | None:
        """Describe a part of the rows that still fails, after leaving out microbatches and outer ranks."""
        # Updates belong to microbatches, replicas take these in turn, and slices are parts: none can be left out alone.
        if schedule.stream or schedule.replicas or schedule.slices > 1:
            return None
        kept, ranks = list(range(schedule.num_microbatches)), (0, schedule.num_ranks)
        for start in self._starts(schedule):
            if self._breaks(schedule, ranks, start):
                kept = start
                break
        before = None
        while before != (kept, ranks):
            before = kept, ranks
            ranks = self._fewer_ranks(schedule, ranks, kept)
            kept = self._fewer_microbatches(schedule, ranks, kept)
        small = part_of(schedule, ranks, kept, tidy=self._tidy)
        most = min(schedule.num_actions, RANKS * ACTIONS)
        if small is None or small.num_actions >= most or (error := self._error(small)) is None:
            return None
        which = _and([str(microbatch) for microbatch in kept])
        several = f"ranks {ranks[0]} to {ranks[1] - 1}" if ranks[1] - ranks[0] > 1 else f"rank {ranks[0]}"
        where = f" on {several}" if ranks != (0, schedule.num_ranks) else ""
        plural = "es" if len(kept) > 1 else ""
        part = f"microbatch{plural} {which}{where}"
        return f"The same fault is in a part of it, {part}, counted from 0 here:\n{error.picture}"

    @property
    def _time_left(self) -> bool:
        return self._tries < MOST_TRIES and time.monotonic() < self._end

    def _error(self, candidate: Schedule) -> CheckError | None:
        """Return the candidate's error if it breaks the searched rule and no rule that the large schedule keeps."""
        self._tries += 1
        try:
            check(candidate, **self._bounds)
        except CheckError as error:
            rules = {fault.rule for fault in error.faults}
            return error if self._fault.rule in rules and rules <= self._rules else None
        return None

    def _breaks(self, schedule: Schedule, ranks: tuple[int, int], kept: Sequence[int]) -> bool:
        part = part_of(schedule, ranks, kept, tidy=self._tidy) if kept and self._time_left else None
        return part is not None and self._error(part) is not None

    def _starts(self, schedule: Schedule) -> Iterator[list[int]]:
        """Yield sets of microbatches to start from: those that the fault names, then the first ones of the step."""
        whole = schedule.num_microbatches
        found = (
            int(number) for one, many in _NAMED.findall(self._fault.sentence) for number in (one or many).split(",")
        )
        named = sorted({number for number in found if number < whole})
        yield from ([microbatch] for microbatch in named)
        yield named
        yield list(range(min(named, default=0), max(named, default=0) + 1))
        yield from (list(range(min(number, whole))) for number in (4, 16))

    def _fewer_ranks(self, schedule: Schedule, ranks: tuple[int, int], kept: Sequence[int]) -> tuple[int, int]:
        """Leave out ranks at both ends while the part still fails: half of them, a quarter, ..., one."""
        first, last = ranks
        number = (last - first) // 2
        while number:
            if last - first > number and self._breaks(schedule, (first, last - number), kept):
                last -= number
            elif last - first > number and self._breaks(schedule, (first + number, last), kept):
                first += number
            else:
                number //= 2
        return first, last

    def _fewer_microbatches(self, schedule: Schedule, ranks: tuple[int, int], kept: list[int]) -> list[int]:
        """Leave out microbatches while the part still fails: half of them, a quarter, ..., one.

        Source: Zeller, Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input" (delta debugging by
        complements).
        """
        number = (len(kept) + 1) // 2
        while number and len(kept) > 1:
            for start in range(0, len(kept), number):
                rest = kept[:start] + kept[start + number :]
                if self._breaks(schedule, ranks, rest):
                    kept = rest
                    break
            else:
                number //= 2
        return kept


def part_of(
    schedule: Schedule, ranks: tuple[int, int], microbatches: Sequence[int], *, tidy: bool = False
) -> Schedule | None:
    """Cut out some microbatches on a range of ranks, and number ranks, stages and microbatches from 0.

    Args:
        schedule: The schedule, lowered or not.
        ranks: ``(first, last)``: the ranks ``first`` to ``last - 1``.
        microbatches: The microbatches to keep. A number in the rows that is out of the schedule's range stays out of
            the part's range, so that the fault is kept.
        tidy: Whether to leave out gathers and reductions of microbatches that are not kept.

    Returns:
        The part, or None if the stages of these ranks are not contiguous.
    """
    first, last = ranks
    stages = [stage for stage, rank in enumerate(schedule.placement) if first <= rank < last]
    if not stages or stages[-1] - stages[0] >= len(stages):
        return None
    low, high, whole = stages[0], stages[-1] + 1, schedule.num_stages
    number = {microbatch: new for new, microbatch in enumerate(microbatches)}
    beyond = len(number) - schedule.num_microbatches

    def is_left(stage: int) -> bool:
        return low <= stage < high or (stage < 0 and low == 0) or (stage >= whole and high == whole)

    def renumbered(action: Action) -> Action | None:
        """Return the action with its new numbers, or None if it is left out."""
        stage, op, microbatch, peer = action
        if microbatch is not None:
            microbatch = number.get(microbatch) if microbatch < schedule.num_microbatches else microbatch + beyond
            if microbatch is None:
                return None
        if stage is None:
            return action
        across = partner(action).stage if op in SENDS or op in RECVS else stage
        assert across is not None
        if not is_left(stage) or not is_left(across):
            return None
        return Action(stage - low, op, microbatch, None if peer is None else peer - low)

    parts = ([new for action in row if (new := renumbered(action))] for row in schedule.rows[first:last])
    rows = (without_idle(row) if tidy else tuple(row) for row in parts)
    placement = tuple(schedule.placement[stage] - first for stage in stages)
    skips = tuple((one - low, other - low) for one, other in schedule.skips if is_left(one) and is_left(other))
    return replace(schedule, rows=tuple(rows), placement=placement, num_microbatches=len(number), skips=skips)


def _smaller(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield ``(ranks, microbatches, chunks)`` below the schedule's, fewest ranks first."""
    ranks = schedule.num_pipeline_ranks
    chunks = max(1, schedule.num_stages // ranks)
    size = ranks, schedule.num_microbatches // schedule.slices, chunks
    for ranks in range(1, size[0] + 1):
        for microbatches in range(1, min(size[1], MOST_MICROBATCHES) + 1):
            for stages in range(1, chunks + 1):
                if (ranks, microbatches, stages) != size:
                    yield ranks, microbatches, stages


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
