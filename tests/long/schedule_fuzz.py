"""Random and damaged schedules: does ``check`` say what ranks that perform them find out?

    python -m tests.long.schedule_fuzz [--number 20000] [--seed 0]

Each schedule is judged for sends without a limit, sends that block, and two sends under way. Prints how many are sound,
by what was done to them, and every disagreement with its rows. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

from raypar.schedules import CheckError, Schedule, check
from raypar.schedules.checking.counterexample import demand_sound
from tests.support.event_check import unsound
from tests.support.mutants import mutated, random_schedule

CAPACITIES = (None, 0, 2)


def case(seed: int) -> tuple[list[str], Schedule]:
    """A schedule, and what was done to it."""
    draw = Random(seed)
    schedule, kinds = random_schedule(draw), []
    for _ in range(draw.randint(0, 3)):
        kind, schedule = mutated(schedule, draw)
        kinds.append(kind)
    return kinds, schedule


def refusal(schedule: Schedule, capacity: int | None, *, shrink: bool = False) -> str | None:
    """Why ``check`` refuses a schedule; None if it does not."""
    try:
        (demand_sound if shrink else check)(schedule, send_capacity=capacity)
    except CheckError as error:
        return str(error)
    return None


def disagreements(seed: int, counts: Counter[tuple[str, str]]) -> list[str]:
    """What the two say where they do not say the same."""
    kinds, schedule = case(seed)
    found = []
    for capacity in CAPACITIES:
        ours, theirs = refusal(schedule, capacity, shrink=seed % 10 == 0), unsound(schedule, capacity)
        verdict = "unsound" if theirs else "sound"
        for kind in set(kinds) or {"untouched"}:
            counts[kind, verdict] += 1
        counts["all", verdict] += 1
        if (ours is None) != (theirs is None):
            rows = "\n".join(" ".join(map(str, row)) for row in schedule.rows)
            what = f"lowered={schedule.lowered} forward_only={schedule.forward_only} placement={schedule.placement}"
            what += f" microbatches={schedule.num_microbatches}"
            found.append(
                f"seed {seed}, {kinds}, capacity {capacity}, {what}\n{rows}\ncheck: {ours}\nevents: {theirs}\n"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    told = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    start, number = time.perf_counter(), 0
    for seed in range(told.seed, told.seed + told.number):
        for text in disagreements(seed, counts):
            number += 1
            print(text)
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind:20} {counts[kind, 'sound']:7} sound {counts[kind, 'unsound']:7} unsound")
    print(f"{told.number} schedules, {number} disagreements, {time.perf_counter() - start:.0f} s")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
