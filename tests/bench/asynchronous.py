"""What a pipeline without flushes gains: synchronous and asynchronous schedules take turns on the same actors.

python -m tests.bench.asynchronous [TURNS]

Two pipeline ranks train gpt-small. Prints the median time of a step by schedule and microbatches of a step.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import raypar as rp
from tests.bench.foreign import Foreign

RUN = rp.recipe("gpt-small", mesh=rp.Mesh(pp=2), micro_batch_size=1, clip=None, steps=10_000)
STREAM = 16  # steps of a turn, after as many that warm up
PAIRS = {  # by microbatches of a step: schedules
    1: ("1f1b", "pipedream"),
    2: ("1f1b", "pipedream", "pipedream-2bw"),
    4: ("1f1b", "pipedream", "pipedream-2bw"),
}


def main(turns: int) -> None:
    """Let the schedules take turns, and print their medians."""
    foreign = Foreign()
    found: dict[tuple[int, str], list[float]] = {}
    with rp.launch(replace(RUN, steps=1)) as job:
        for _ in range(turns):
            for microbatches, schedules in PAIRS.items():
                for schedule in schedules:
                    stream = None if schedule == "1f1b" else STREAM
                    job.reset(replace(RUN, schedule=schedule, microbatches=microbatches, flush_every=stream))
                    job.train(STREAM)
                    reports = job.train(STREAM)
                    found.setdefault((microbatches, schedule), []).append(
                        statistics.mean(report.step_ms for report in reports)
                    )
    for (microbatches, schedule), took in found.items():
        step, plain = statistics.median(took), statistics.median(found[microbatches, "1f1b"])
        print(f"m={microbatches} {schedule:<14} {step:7.1f} ms a step, {plain / step:.2f} times as fast as 1f1b")
    print(f"others used {foreign.cores():.2f} cores")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
