"""Every schedule of the catalog for 1 to 4 ranks and 1 to 8 microbatches: the bits of one process?

    python -m tests.long.schedule_matrix

Backwards are as written, split where that helps, and all split; each also holds as many activations as the schedule
says. Each size is then performed as tasks and by hand, with the same bits, and in a dynamic order, with two tensor
ranks, and with two replicas, within 1e-6. Prints how many were tried of each schedule, and every one that differs.
Exit code 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import product

import raypar as rp
from tests.actors.pipeline.test_catalog import one
from tests.raypar.job.test_executors_in_threads import CLOSE, agrees
from tests.support.schedules import SYNCHRONOUS

BACKWARDS = "whole", "auto", "split"
GPT = rp.GPT(layers=8, hidden=16, heads=2, seq=8, vocab=256, tied=False, dropout=0.0)
WAYS = {  # what is changed, and how far the numbers of one process may be
    "tasks": ({"executor": "tasks"}, 0.0),
    "by hand": ({}, 0.0),
    "dynamic": ({"executor": "tasks", "order": "dynamic"}, CLOSE),
    "tp 2": ({"tp": 2}, CLOSE),
    "dp 2": ({"dp": 2}, CLOSE),
}


def another(name: str, ranks: int, microbatches: int, backward: str, way: str) -> None:
    """Train a GPT in another way than as compiled rows on one row of actors. Raises AssertionError if it differs."""
    changes, bound = WAYS[way]
    fields = {"backward": backward, "schedule": name, "microbatches": microbatches, **changes}
    sizes = {axis: fields.pop(axis, 1) for axis in ("dp", "tp")}
    if name == "dualpipe":  # its two replicas sum their gradients; with dp 2 it would have four
        fields["microbatches"], bound, tp = 2 * microbatches, CLOSE, (sizes["tp"],) * ranks
        mesh = rp.Mesh(pp=ranks, rank_dp=(2,) * ranks, rank_tp=tp if sizes["tp"] > 1 else ())
    else:
        mesh = rp.Mesh(pp=ranks, **sizes)
    run = rp.Run(model=GPT, mesh=mesh, steps=1, optim=rp.SGD(lr=0.1), device="cpu", timeout=60.0, **fields)
    agrees(run, bound, by_hand=way == "by hand")


def main() -> int:
    start, wrong = time.perf_counter(), 0
    for name in SYNCHRONOUS:
        number = 0
        for ranks, microbatches in product(range(1, 5), range(1, 9)):
            tried = [(backward, partial(one, backward=backward)) for backward in BACKWARDS]
            for place, way in enumerate(WAYS):
                backward = BACKWARDS[(microbatches + place) % 3]
                tried.append((f"{backward}, {way}", partial(another, backward=backward, way=way)))
            for told, case in tried:
                number += 1
                try:
                    case(name, ranks, microbatches)
                except AssertionError as error:
                    wrong += 1
                    print(f"{name} {ranks} x {microbatches} {told}: {error}")
        print(f"{name:15} {number} runs, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
