"""Smallest counterexamples: what a check finds in a large schedule, shown in a small one that breaks the same rule."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from raypar.schedules.action import RECVS, SENDS, Action
from raypar.schedules.checking.check import check
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.drawing.cells import PLACES, RANKS
from raypar.schedules.rules import partner
from raypar.schedules.schedule import Schedule

Generate = Callable[[int, int, int], Schedule]

MOST_TRIES = 120  # of sizes, and as many of rows
MOST_SECONDS = 0.35  # for either
MOST_MICROBATCHES = 12  # what takes more of them to fail is looked for in the rows

_NAMED = re.compile(r"[A-Z](\d+)\b|\bmicrobatch ([\d, ]+)")


def demand_sound(
    schedule: Schedule,
    generate: Generate | None = None,
    *,
    send_capacity: int | None = None,
    max_in_flight: int | None = None,
) -> None:
    """``check``, but its error shows the smallest schedule that breaks the same rule, too, if one is found in time.

    ``generate`` makes the schedule of other numbers of ranks, microbatches and chunks, in the form that is checked;
    None for a schedule of which there are only the rows. The faults of the CheckError are those of ``schedule``.
    """
    try:
        check(schedule, send_capacity=send_capacity, max_in_flight=max_in_flight)
    except CheckError as error:
        bounds = error.faults, send_capacity, max_in_flight
        found = (generate and _Search(*bounds).sizes(schedule, generate)) or _Search(*bounds).rows(schedule)
        if not found:
            raise
        raise CheckError(f"{error}\n{found}", error.faults) from None


class _Search:
    """Looks for small schedules that break the rule of the first fault, and no rule that the large one keeps."""

    def __init__(self, faults: Sequence[Fault], send_capacity: int | None, max_in_flight: int | None) -> None:
        self._fault, self._rules = faults[0], {fault.rule for fault in faults}
        self._send_capacity, self._max_in_flight = send_capacity, max_in_flight
        self._tries, self._end = 0, time.monotonic() + MOST_SECONDS

    def sizes(self, schedule: Schedule, generate: Generate) -> str | None:
        """The smallest sizes for which the generator fails: fewest ranks, of those fewest microbatches, then chunks."""
        for ranks, microbatches, chunks in _smaller(schedule):
            if not self._time_left:
                return None
            try:
                error = self._error(generate(ranks, microbatches, chunks))
            except Exception:  # it does not take these sizes; what was found before is the news
                continue
            if error is not None:
                counts = [_count(ranks, "rank"), _count(microbatches, "microbatch", "es")]
                counts += [_count(chunks, "chunk")] if chunks > 1 else []
                return f"It also fails with {_and(counts)}, the smallest:\n{error.picture}"
        return None

    def rows(self, schedule: Schedule) -> str | None:
        """The rows without the microbatches and the outer ranks that the fault can do without."""
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
        small = part_of(schedule, ranks, kept)
        error = (
            self._error(small)
            if small is not None and small.num_actions < min(schedule.num_actions, RANKS * PLACES)
            else None
        )
        if error is None:
            return None
        which = _and([str(microbatch) for microbatch in kept])
        several = f"ranks {ranks[0]} to {ranks[1] - 1}" if ranks[1] - ranks[0] > 1 else f"rank {ranks[0]}"
        where = f" on {several}" if ranks != (0, schedule.num_ranks) else ""
        plural = "es" if len(kept) > 1 else ""
        return f"It takes no more than microbatch{plural} {which}{where}, numbered anew:\n{error.picture}"

    @property
    def _time_left(self) -> bool:
        return self._tries < MOST_TRIES and time.monotonic() < self._end

    def _error(self, candidate: Schedule) -> CheckError | None:
        """The error of a candidate, if it is of the same kind."""
        self._tries += 1
        try:
            check(candidate, send_capacity=self._send_capacity, max_in_flight=self._max_in_flight)
        except CheckError as error:
            rules = {fault.rule for fault in error.faults}
            return error if self._fault.rule in rules and rules <= self._rules else None
        return None

    def _breaks(self, schedule: Schedule, ranks: tuple[int, int], kept: Sequence[int]) -> bool:
        part = part_of(schedule, ranks, kept) if kept and self._time_left else None
        return part is not None and self._error(part) is not None

    def _starts(self, schedule: Schedule) -> Iterator[list[int]]:
        """What the fault may need, small sets first: the microbatches it names, and the first ones of the step."""
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
        """Ranks left out at both ends: half of them, a quarter, ..., one."""
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
        """Delta debugging (Zeller, Hildebrandt 2002) by complements: half of them left out, a quarter, ..., one."""
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


def part_of(schedule: Schedule, ranks: tuple[int, int], microbatches: Sequence[int]) -> Schedule | None:
    """The schedule of some of the microbatches on the ranks ``first`` to ``last - 1``, all numbered from 0.

    None where the stages of these ranks are not one stretch of the model. Numbers that the schedule does not have stay
    beyond those that it has.
    """
    first, last = ranks
    stages = [stage for stage, home in enumerate(schedule.placement) if first <= home < last]
    if not stages or stages[-1] - stages[0] >= len(stages):
        return None
    low, high, whole = stages[0], stages[-1] + 1, schedule.num_stages
    number = {microbatch: new for new, microbatch in enumerate(microbatches)}
    beyond = len(number) - schedule.num_microbatches

    def is_left(stage: int) -> bool:
        return low <= stage < high or (stage < 0 and low == 0) or (stage >= whole and high == whole)

    def renumbered(action: Action) -> Action | None:
        """The action with its new numbers; None if it is left out."""
        stage, op, microbatch = action
        if microbatch is not None:
            microbatch = number.get(microbatch) if microbatch < schedule.num_microbatches else microbatch + beyond
            if microbatch is None:
                return None
        if stage is None:
            return action
        across = partner(action).stage if op in SENDS or op in RECVS else stage
        assert across is not None
        return Action(stage - low, op, microbatch) if is_left(stage) and is_left(across) else None

    rows = (tuple(new for action in row if (new := renumbered(action))) for row in schedule.rows[first:last])
    placement = tuple(schedule.placement[stage] - first for stage in stages)
    return replace(schedule, rows=tuple(rows), placement=placement, num_microbatches=len(number))


def _smaller(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Sizes below those of the schedule, fewest ranks first; of microbatches and chunks as many as are tried."""
    chunks = max(1, schedule.num_stages // schedule.num_ranks)
    size = schedule.num_ranks, schedule.num_microbatches, chunks
    for ranks in range(1, size[0] + 1):
        for microbatches in range(1, min(size[1], MOST_MICROBATCHES) + 1):
            for stages in range(1, chunks + 1):
                if (ranks, microbatches, stages) != size:
                    yield ranks, microbatches, stages


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
