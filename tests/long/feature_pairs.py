"""The array of every two features on threads: does each row compute what the oracle does?

    python -m tests.long.feature_pairs [--seed 0] [--rows N] [--processes 2]

Prints the rows that differ or fail, and at the end how many pairs were covered, refused by the checks of runs, or have
no place in one run. Exit code 1 if a row differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from tests.support.covering import Row
from tests.support.features import differences_of, drawn, run_of_row, words_of

_WAITING = 8  # rows that are drawn ahead of those under way


def found_in(row: Row) -> tuple[list[str], float]:
    """Return what the run of a row has that the oracle has not, a line each, and the CPU seconds it took."""
    warnings.simplefilter("ignore")
    start = time.process_time()
    try:
        found = differences_of(run_of_row(row))
    except Exception:
        found = traceback.format_exc().splitlines()
    return found, time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="at most so many rows; without it, until each pair is covered")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    array, start = drawn(given.seed), time.perf_counter()
    waiting: list[tuple[int, Row, Future[tuple[list[str], float]]]] = []
    wrong = number = 0

    def is_wrong() -> bool:
        at, row, future = waiting.pop(0)
        found, took = future.result()
        if found:
            print(f"row {at}, {took:.1f} s of CPU, {words_of(row)}", *found, sep="\n    ", flush=True)
        return bool(found)

    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for number, row in enumerate(islice(array.rows(), given.rows), start=1):
            waiting.append((number - 1, row, pool.submit(found_in, row)))
            while len(waiting) > _WAITING:
                wrong += is_wrong()
        while waiting:
            wrong += is_wrong()
    pairs, refused, unwritable = len(array.pairs), len(array.refused), len(array.unwritable)
    print(
        f"{number - wrong} of {number} rows agree with the oracle, {time.perf_counter() - start:.0f} s: of {pairs:,} "
        f"pairs {len(array.covered):,} were computed, {refused:,} are refused with a reason, and "
        f"{unwritable:,} have no place in one run"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
