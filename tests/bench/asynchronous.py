"""What a pipeline without flushes gains: synchronous and asynchronous schedules take turns on the same actors.

python -m tests.bench.asynchronous [TURNS]

Two pipeline ranks train gpt-small. Prints the median time of a step by schedule and microbatches of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.foreign import Foreign
from tests.bench.local_ray import local_ray, quiet

PAIRS = {  # by microbatches of a step: schedules
    1: ("1f1b", "pipedream"),
    2: ("1f1b", "pipedream", "pipedream-2bw"),
    4: ("1f1b", "pipedream", "pipedream-2bw"),
}


def main(words: Sequence[str] | None = None) -> None:
    """Let the schedules take turns, and print their medians."""
    parser = parser_of(__doc__)
    parser.add_argument("turns", type=int, nargs="?", default=3)
    parser.add_argument("--recipe", default="gpt-small")
    parser.add_argument("--microbatches", type=int, choices=PAIRS, nargs="+", default=[*PAIRS], help="of a step")
    parser.add_argument("--stream", type=int, default=16, help="steps of a turn, after as many that warm up")
    asked = parse_words(parser, words, "1 --recipe gpt-tiny --microbatches 2 --stream 2")
    run = rp.recipe(asked.recipe, mesh=rp.Mesh(pp=2), micro_batch_size=1, clip=None, steps=10_000)
    quiet()
    foreign = Foreign()
    found: dict[tuple[int, str], list[float]] = {}
    with local_ray(), rp.launch(replace(run, steps=1)) as job:
        for _ in range(asked.turns):
            for microbatches in asked.microbatches:
                for schedule in PAIRS[microbatches]:
                    stream = None if schedule == "1f1b" else asked.stream
                    job.reset(replace(run, schedule=schedule, microbatches=microbatches, flush_every=stream))
                    job.train(asked.stream)
                    reports = job.train(asked.stream)
                    found.setdefault((microbatches, schedule), []).append(
                        statistics.mean(report.step_ms for report in reports)
                    )
    for (microbatches, schedule), took in found.items():
        step, plain = statistics.median(took), statistics.median(found[microbatches, "1f1b"])
        print(f"m={microbatches} {schedule:<14} {step:7.1f} ms a step, {plain / step:.2f} times as fast as 1f1b")
    print(f"others used {foreign.cores():.2f} cores")


if __name__ == "__main__":
    main()
