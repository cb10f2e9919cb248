"""fp16 with an overflow forced on any actor in any microbatch: the step is skipped on all of them, bit for bit.

    python -m tests.long.overflows

Threads are the actors. Prints a line for each layout. Exit code 1 if a step was not skipped as it should be.
"""

from __future__ import annotations

import sys
from itertools import product

import raypar as rp
from tests.support.overflows import LAYOUTS, SHARDED, laid_out, not_skipped

SCHEDULES = "1f1b", "gpipe", "interleaved"
OTHERS = [
    {"tp": 2, "sequence_parallel": True},
    {"tp": "2d:2x2"},
    {"dp": 2, "zero": 3, "tile": 2},
    {"dp": 2, "offload": "optimizer"},
    {"pp": 2, "offload": "parameters"},
    {"pp": 2, "tp": 2},
    {"dp": 2, "recompute": "full"},
]


def main() -> int:
    failed = 0
    for layout in LAYOUTS + SHARDED + OTHERS:
        fields, found = laid_out(layout), []
        schedules = SCHEDULES if "pp" in layout else SCHEDULES[:1]
        cases = list(product(schedules, range(fields["mesh"].size), range(4)))
        for schedule, rank, microbatch in cases:
            run = rp.Run(
                model=rp.GPT(layers=4, hidden=32, heads=2, seq=16, dropout=0.0),
                optim=rp.AdamW(lr=2e-3, decay="linear"),
                precision=rp.Precision("fp16"),
                loss_scale=rp.LossScale(init=2.0**8),
                schedule=schedule,
                microbatches=4,
                steps=6,
                timeout=20.0,
                **fields,
            )
            found += [
                f"{schedule}, actor {rank}, microbatch {microbatch}: {each}"
                for each in not_skipped(run, rank, microbatch)
            ]
        failed += len(found)
        print(layout, f"{len(cases)} overflows", *(found or ["all skipped"]), sep=", ", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
