"""Random and damaged schedules: does ``check`` say what ranks that perform them find out?

    python -m tests.long.schedule_fuzz [--number 20000] [--seed 0]

Of each seed there is a synchronous schedule and an asynchronous one. Each is judged for sends without a limit, sends
that block, and two sends under way; of an asynchronous one the versions that it keeps are counted, too, and bounded.
Prints how many are sound, by what was done to them, and every disagreement with its rows. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

from raypar.schedules import CheckError, Schedule, check
from raypar.schedules.checking.counterexample import demand_sound
from raypar.schedules.versions import most_versions
from tests.support.event_check import unsound
from tests.support.mutants import mutated, random_schedule
from tests.support.stream_mutants import mutated_stream, random_stream
from tests.support.version_check import most_kept

CAPACITIES = (None, 0, 2)


def case(seed: int, *, stream: bool = False) -> tuple[list[str], Schedule]:
    """A schedule, and what was done to it."""
    draw = Random(seed)
    schedule, kinds = random_stream(draw) if stream else random_schedule(draw), []
    for _ in range(draw.randint(0, 3)):
        kind, schedule = (mutated_stream if stream else mutated)(schedule, draw)
        kinds.append(kind)
    return kinds, schedule


def refusal(
    schedule: Schedule, capacity: int | None, *, max_versions: int | None = None, shrink: bool = False
) -> str | None:
    """Why ``check`` refuses a schedule; None if it does not."""
    try:
        (demand_sound if shrink else check)(schedule, send_capacity=capacity, max_versions=max_versions)
    except CheckError as error:
        return str(error)
    return None


def disagreements(seed: int, counts: Counter[tuple[str, str]], *, stream: bool = False) -> list[str]:
    """What the two say where they do not say the same."""
    kinds, schedule = case(seed, stream=stream)
    found = []
    for capacity in CAPACITIES:
        ours, theirs = refusal(schedule, capacity, shrink=seed % 10 == 0), unsound(schedule, capacity)
        verdict = "unsound" if theirs else "sound"
        for kind in set(kinds) or {"untouched"}:
            counts[kind, verdict] += 1
        counts["all", verdict] += 1
        if (ours is None) != (theirs is None):
            found.append(_told(seed, kinds, schedule, f"capacity {capacity}", ours, theirs))
    if schedule.stream:
        found += _of_versions(seed, kinds, schedule, counts)
    return found


def _of_versions(seed: int, kinds: list[str], schedule: Schedule, counts: Counter[tuple[str, str]]) -> list[str]:
    """Disagreements about how many versions an asynchronous schedule keeps, and whether a bound on them holds."""
    bound, why, found = 1 + seed % 3, unsound(schedule), []
    if why is None:
        kept = tuple(most_kept(schedule, stage) for stage in range(schedule.num_stages))
        if kept != most_versions(schedule):
            found.append(_told(seed, kinds, schedule, "versions kept", str(most_versions(schedule)), str(kept)))
        why = f"keeps {kept} versions" if max(kept) > bound else None
    counts["versions bounded", "unsound" if why else "sound"] += 1
    ours = refusal(schedule, None, max_versions=bound)
    if (ours is None) != (why is None):
        found.append(_told(seed, kinds, schedule, f"{bound} versions at most", ours, why))
    return found


def _told(seed: int, kinds: list[str], schedule: Schedule, of: str, ours: str | None, theirs: str | None) -> str:
    rows = "\n".join(" ".join(map(str, row)) for row in schedule.rows)
    what = f"lowered={schedule.lowered} forward_only={schedule.forward_only} placement={schedule.placement}"
    what += f" microbatches={schedule.num_microbatches} stream={schedule.stream}"
    return f"seed {seed}, {kinds}, {of}, {what}\n{rows}\ncheck: {ours}\nevents: {theirs}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    told = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    start, number = time.perf_counter(), 0
    for seed in range(told.seed, told.seed + told.number):
        for text in (*disagreements(seed, counts), *disagreements(seed, counts, stream=True)):
            number += 1
            print(text)
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind:22} {counts[kind, 'sound']:7} sound {counts[kind, 'unsound']:7} unsound")
    print(f"{2 * told.number} schedules, {number} disagreements, {time.perf_counter() - start:.0f} s")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
