"""Random small models of one's own: is verify right of all of them, and of those with a fault in a gradient?

    python -m tests.long.verify_own_models [--number 2000] [--faults 200] [--actors 50] [--seed 0]

Prints each model of which verify is wrong, and how many there were of each kind. Exit code 1 if it is of one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, islice

import torch

import raypar as rp
from raypar.actors.specs.worlds import world_of
from tests.support.own_models import fault_missed, run_of, wrongly_judged


def one(judge, seed):
    """What is wrong with what verify says of a model, and what kind of model it is."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    run = run_of(draw, dropout=judge is wrongly_judged)
    wrong, kinds = judge(run, draw)
    return wrong and f"seed {seed}: {wrong}\n{run}", kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in ("number", 2000), ("faults", 200), ("actors", 50), ("seed", 0):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    failed = 0
    for what, judge, number in (("models", wrongly_judged, args.number), ("faults", fault_missed, args.faults)):
        start, counts, wrong = time.perf_counter(), Counter(), 0
        with ProcessPoolExecutor(2) as pool:
            for fault, kinds in pool.map(partial(one, judge), range(args.seed, args.seed + number), chunksize=5):
                counts.update(kinds)
                if fault:
                    wrong += 1
                    print(fault, flush=True)
        print(f"{number} {what}, {wrong} wrong, {time.perf_counter() - start:.0f} s")
        print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())), flush=True)
        failed += wrong
    failed += on_actors(args.actors, args.seed)
    return 1 if failed else 0


def on_actors(number, seed):
    """How many of the first models that four actors can have are wrong there, with dropout in every second one."""
    start, wrong = time.perf_counter(), 0
    runs = (run_of(random.Random(at), shares_draws=False) for at in count(seed))
    chosen = [*islice((run for run in runs if world_of(run).size <= 4), number)]
    if chosen:
        with rp.launch(replace(chosen[0], mesh=rp.Mesh(dp=4))) as job:
            for run in chosen:
                if not (verdict := rp.verify(run, job)).ok:
                    wrong += 1
                    print(f"{verdict}\n{run}", flush=True)
    print(f"{len(chosen)} models on actors, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
