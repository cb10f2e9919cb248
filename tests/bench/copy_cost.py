"""What copies of snapshots on another node take from the training: steps with copies and without, in one run.

python -m tests.bench.copy_cost [BLOCKS]

Two hosts of one CPU each are made on this machine, so copies have no core of their own; the network between them is as
fast as the machine at first, and has 1 Gbit/s then. As root, on Linux.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.snapshot_cost import MODELS
from tests.support.clusters import cluster_of_hosts
from tests.support.hosts import missing

RUNS = {"a pipeline": (rp.Mesh(pp=2), 1), "two replicas, zero=3": (rp.Mesh(dp=2), 3)}
NETWORKS = {"": 1, "1gbit": 4}  # by rate, the steps between two copies, in which one should fit
BLOCK = 8  # steps with copies, then as many without
WARM = 2  # blocks that are not counted


def main(words: Sequence[str] | None = None) -> None:
    """Measure both runs over both networks, and print what a copy costs."""
    parser = parser_of(__doc__)
    parser.add_argument("blocks", type=int, nargs="?", default=40)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--one", nargs=2, metavar=("TITLE", "EVERY"), help="a run alone, on the Ray that is here")
    asked = parse_words(parser, words, "2 --model tiny")
    if asked.one:
        title, steps = asked.one
        measure(title, MODELS[asked.model], asked.blocks, int(steps))
        return
    if lacks := missing():
        print(f"skipped: {lacks}")
        return
    with cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster:
        for rate, every in NETWORKS.items():
            if rate:
                cluster.network.limit(rate)
            for title in RUNS:
                alone = (str(asked.blocks), "--model", asked.model, "--one", title, str(every))
                answer = cluster.drive("-m", "tests.bench.copy_cost", *alone, timeout=900)
                took, size = json.loads(answer.splitlines()[-1])
                report(f"{title}, {rate or 'no limit'}", took, size, every)


def measure(title: str, model: rp.GPT, blocks: int, every: int) -> None:
    """Print the seconds of every block, with copies and without in turn, and the bytes of an actor's snapshot."""
    mesh, zero = RUNS[title]
    run = rp.Run(
        model=model,
        mesh=mesh,
        zero=zero,
        microbatches=2 // mesh.dp,
        micro_batch_size=1,
        steps=(WARM + blocks) * BLOCK,
        max_failures=1,
        buddy_every=every,
        device="cpu",
    )
    with rp.launch(run) as job:
        pace, took = job._starter.active.snapshots.pace, list[float]()
        assert pace is not None, "the actors are on one host"
        for block in range(WARM + blocks):
            pace.every, start = every if block % 2 == 0 else 10**9, time.perf_counter()
            job.train(BLOCK, ahead=0)
            took.append(time.perf_counter() - start)
            assert pace.every in (every, 10**9), "steps waited for copies"
        size = (next(iter(job.memory().values()))["snapshots"].formula or 0) // 2
    print(json.dumps([took[WARM:], size]))


def report(title: str, took: list[float], size: int, every: int) -> None:
    """Compare each block with copies with the block after it."""
    step = statistics.median(took[1::2]) / BLOCK
    costs = [(copied - plain) * every / BLOCK for copied, plain in zip(took[::2], took[1::2], strict=True)]
    low, cost, high = statistics.quantiles(costs, n=4)
    print(
        f"{title}: a copy of {size / 2**20:.0f} MiB of each actor takes {cost * 1e3:.0f} ms of steps of "
        f"{step * 1e3:.0f} ms (quarters {low * 1e3:.0f} to {high * 1e3:.0f} of {len(costs)} blocks), which is "
        f"{cost / step / 10:.1%} of ten steps; the machine's load is {os.getloadavg()[0]:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
