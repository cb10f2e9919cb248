"""Every schedule of the catalog for 1 to 4 ranks and 1 to 8 microbatches: the bits of one process?

    python -m tests.long.schedule_matrix

Backwards are as written, split where that helps, and all split; each also holds as many activations as the schedule
says. Prints how many were tried of each schedule, and every one that differs. Exit code 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from itertools import product

from tests.actors.pipeline.test_catalog import TRAINING, one


def main() -> int:
    start, wrong = time.perf_counter(), 0
    for name in TRAINING:
        number = 0
        for ranks, microbatches, backward in product(range(1, 5), range(1, 9), ("whole", "auto", "split")):
            number += 1
            try:
                one(name, ranks, microbatches, backward=backward)
            except AssertionError as error:
                wrong += 1
                print(f"{name} {ranks} x {microbatches} {backward}: {error}")
        print(f"{name:15} {number} runs, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
