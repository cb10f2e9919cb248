"""Rows of the array of every two features on real actors: do they compute what the oracle does?

    python -m tests.long.feature_runs [--runs 300] [--seed 0] [--actors 8]

One launch, and then a reset for each run; every second run has one Ray task for each action. Losses, norms, gradients
and weights are held against the oracle, by the bounds of the tests on threads. Prints the runs that differ and how many
agree. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import raypar as rp
from raypar.actors.specs.worlds import world_of
from raypar.job.job import Job
from tests.support.features import STEPS, drawn, oracle_settings, run_of_row, words_of
from tests.support.oracle_runs import Numbers, TieError, compared, drop_copy, frozen_weights, whole


def runs_of(seed: int, actors: int) -> Iterator[tuple[str, rp.Run]]:
    """Yield the runs of an array and of those of the next seeds that so many actors can have, each with its words."""
    while True:
        for number, row in enumerate(drawn(seed).rows()):
            run = run_of_row(row)
            if world_of(run).size > actors:
                continue
            tasks = replace(run, executor="tasks", order=("row", "dynamic")[number // 2 % 2])
            is_odd = number % 2 and not rp.faults(tasks)
            yield f"seed {seed}: {words_of(row)}" + ", executor=tasks" * bool(is_odd), tasks if is_odd else run
        seed += 1


def differences_on(job: Job, run: rp.Run) -> list[str]:
    """Train a run on the actors of a job, and return what it has that the oracle has not, a line each."""
    job.reset(run, keep_idle=True)
    first = whole(dict(job.weights()))
    if run.model.lora is not None:
        first |= frozen_weights(run.model, run.seed)
    reports = job.train(STEPS, ahead=0)
    losses, norms = [report.loss for report in reports], [report.grad_norm for report in reports]
    gradients, weights = whole(job.gradients()), whole(dict(job.weights()))
    if run.model.tied:
        for tensors in (first, gradients, weights):
            drop_copy(tensors)
    numbers = Numbers(losses, norms, gradients, weights, {})
    try:
        return compared(run, first, numbers, STEPS, **oracle_settings(run))
    except TieError:
        return differences_on(job, replace(run, seed=run.seed + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actors", type=int, default=8, help="the most actors of a run")
    given = parser.parse_args()
    logging.getLogger("raypar").setLevel(logging.ERROR)  # not the progress of each run
    job, wrong, start = None, 0, time.perf_counter()
    runs = list(islice(runs_of(given.seed, given.actors), given.runs))
    largest = max((run for _, run in runs), key=lambda run: world_of(run).size)
    for number, (words, run) in enumerate(runs):
        try:
            if job is None:
                job = rp.launch(largest)
            found = differences_on(job, run)
        except (rp.ConfigError, rp.JobError) as error:
            found = [f"{type(error).__name__}: {error}"]
            if isinstance(error, rp.JobError) and job is not None:
                job.close()
                job = None
        if found:
            wrong += 1
            print(f"run {number}, {words}", *found, sep="\n    ", flush=True)
    if job is not None:
        job.close()
    print(f"{len(runs) - wrong} of {len(runs)} runs agree with the oracle, {time.perf_counter() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
