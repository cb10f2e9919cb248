"""Runs with one to five planted faults: is each one named at once, and do the fixes work as they are printed?

    python -m tests.long.wrong_runs [--cases 300] [--first 0]

The faults are of single fields that a run and its parts declare, and of fields that do not go together. A program reads
the messages and does what they say, which has to lead to a run without faults. All of these are planned, as ``raypar
train --dry-run`` does, and every tenth is launched for a step. Exit code 1 if a fault is not named, or a fix does not
work.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace

import raypar as rp
from raypar.config.run import check_run
from raypar.reporting.summary import plan_rows
from tests.support.fixes import repaired
from tests.support.wrong_runs import Wrong, rule_of, wrong_run

LAUNCHED = 10  # every so many cases one is launched


def wrong_with(case: int, wrong: Wrong) -> tuple[list[str], int]:
    """Return what is wrong with the messages of a case, a line each, and how often they were applied."""
    found = [f"not named: {fault}" for fault in wrong.missing()]
    run, rounds = repaired(wrong.run, wrong.before)
    if not rounds:
        found.append("no fault is found")
    if faults := rp.faults(run):
        return [*found, *(f"not mended by its fix: {fault}" for fault in faults)], rounds
    plan_rows(run, check_run(run)["train"])
    if case % LAUNCHED == 0:
        try:
            with rp.launch(replace(run, folder=None, save_every=0, track=())) as job:
                job.train(1)
        except (rp.ConfigError, rp.JobError) as error:
            found.append(f"launched: {type(error).__name__}: {error}")
    return found, rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # not the progress of each run
    warnings.simplefilter("ignore")
    rounds, rules, wrongs, start, launched = Counter[int](), set[str](), 0, time.perf_counter(), 0
    here = tempfile.TemporaryDirectory(prefix="raypar-wrong-runs-")
    os.chdir(here.name)  # a fault may be a folder's name
    for case in range(given.first, given.first + given.cases):
        wrong = wrong_run(case)
        rules.update(rule_of(fault) for plant in wrong.plants for fault in plant.faults)
        found, times = wrong_with(case, wrong)
        rounds[times] += 1
        launched += case % LAUNCHED == 0
        if found:
            wrongs += 1
            print(f"case {case}", *found, sep="\n    ", flush=True)
    times_words = ", ".join(f"{count} after {times}" for times, count in sorted(rounds.items()))
    print(
        f"{given.cases - wrongs} of {given.cases} runs: each fault is named and its fix works; {len(rules)} kinds of "
        f"faults; without faults are {times_words} rounds of fixes; {launched} were launched; "
        f"{time.perf_counter() - start:.0f} s"
    )
    os.chdir("/")
    here.cleanup()
    return int(wrongs > 0)


if __name__ == "__main__":
    sys.exit(main())
