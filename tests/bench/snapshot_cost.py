"""What a snapshot after a step takes from the training: steps with one and without take turns in one run.

python -m tests.bench.snapshot_cost [PAIRS]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.foreign import Foreign
from tests.bench.local_ray import local_ray, quiet

MODELS = {
    "small": rp.GPT(layers=8, hidden=256, heads=4, seq=256),
    "tiny": rp.GPT(layers=2, hidden=32, heads=2, seq=32),
}
RUNS = {
    "a pipeline": (rp.Mesh(pp=2), 1),
    "two replicas": (rp.Mesh(dp=2), 1),
    "two replicas, zero=3": (rp.Mesh(dp=2), 3),
}
WARM = 4  # steps that are not counted


def main(words: Sequence[str] | None = None) -> None:
    """Measure each run, and print what a snapshot of it costs."""
    parser = parser_of(__doc__)
    parser.add_argument("pairs", type=int, nargs="?", default=40)
    parser.add_argument("--model", choices=MODELS, default="small")
    asked = parse_words(parser, words, "2 --model tiny")
    quiet()
    with local_ray():
        for title, (mesh, zero) in RUNS.items():
            report(title, *measured(MODELS[asked.model], mesh, zero, asked.pairs))


def measured(model: rp.GPT, mesh: rp.Mesh, zero: int, pairs: int) -> tuple[list[float], float, int]:
    """Seconds of every step, how many cores others used meanwhile, and the bytes of an actor's snapshot."""
    run = rp.Run(
        model=model,
        mesh=mesh,
        zero=zero,
        microbatches=2 // mesh.dp,
        micro_batch_size=1,
        steps=WARM + 2 * pairs,
        max_failures=1,
        snapshot_every=2,
        device="cpu",
    )
    took, foreign = list[float](), Foreign()
    last = time.perf_counter()

    def note(_: rp.Report | rp.Evaluation) -> None:
        nonlocal last
        took.append((now := time.perf_counter()) - last)
        last = now

    with rp.launch(run) as job:
        job.train(WARM, on=note)
        foreign.cores()
        job.train(on=note)
        actor = job.memory()["pp=0" if mesh.pp > 1 else "pp=0 dp=0"]
    return took[WARM:], foreign.cores(), (actor["snapshots"].formula or 0) // 2


def report(title: str, took: list[float], others: float, size: int) -> None:
    """Compare the steps after which a snapshot is taken, every second one, with those before them."""
    ratios = [kept / plain for plain, kept in zip(took[::2], took[1::2], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    print(
        f"{title}: a step of {statistics.median(took[::2]) * 1e3:.0f} ms takes {statistics.median(ratios) - 1:.1%} "
        f"longer with a snapshot of {size / 2**20:.0f} MiB (quarters {quarters[0] - 1:.1%} to {quarters[2] - 1:.1%} "
        f"of {len(ratios)} pairs); others used {others:.2f} cores",
        flush=True,
    )


if __name__ == "__main__":
    main()
