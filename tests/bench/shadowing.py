"""What shadows of popular experts gain: runs with and without them take turns, as threads of one process.

python -m tests.bench.shadowing [TURNS]

Two actors have two experts each, and nine of ten tokens go to the two experts of the first one. Prints for both kinds
of run the median of a step and what each actor computed in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

import raypar as rp
from raypar.actors.expert_parallel.router import Router
from tests.bench.arguments import parse_words, parser_of
from tests.bench.foreign import Foreign
from tests.support.thread_jobs import TeamJob

MODEL = rp.GPT(layers=2, hidden=256, heads=4, seq=512, mlp=4, moe=rp.MoE(experts=4, top_k=1, loss="none"))
RUN = rp.Run(
    model=MODEL, mesh=rp.Mesh(dp=2, ep=2), microbatches=1, micro_batch_size=4, steps=8, schedule="gpipe", device="cpu"
)
POPULAR = 0.9  # share of the tokens that go to the two experts of the first actor


@contextmanager
def skewed() -> Iterator[None]:
    """Let routers send most tokens to the first two experts, and the rest to the two others."""
    choose = Router._choose

    def chosen(router: Router, logits_TE: torch.Tensor, chance_T: torch.Tensor | None) -> object:
        tokens, experts = logits_TE.shape
        is_popular = torch.arange(tokens) < POPULAR * tokens
        is_first = torch.arange(experts) < 2
        return choose(router, logits_TE + 50.0 * (is_popular[:, None] == is_first), chance_T)

    Router._choose = chosen  # type: ignore[method-assign]
    try:
        yield
    finally:
        Router._choose = choose  # type: ignore[method-assign]


def turn(run: rp.Run) -> tuple[list[float], list[list[float]], rp.Report]:
    """The seconds of a run's steps but the first, which warms up, those that each actor computed in each, and the
    last report."""
    job = TeamJob(run)
    try:
        job.step()
        took, busy = list[float](), list[list[float]]()
        for _ in range(run.steps - 1):
            report = job.step()
            lanes = job.timelines()[: run.mesh.dp]
            took.append(max(lane.end for lane in lanes) - min(lane.start for lane in lanes))
            busy.append([lane.busy() for lane in lanes])
    finally:
        job.close()
    return took, busy, report


def main(words: Sequence[str] | None = None) -> None:
    """Let both kinds of run take turns, and print their medians."""
    parser = parser_of(__doc__)
    parser.add_argument("turns", type=int, nargs="?", default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, after one that warms up")
    asked = parse_words(parser, words, "1 --hidden 32 --seq 64 --steps 1")
    model = replace(MODEL, hidden=asked.hidden, seq=asked.seq)
    torch.set_num_threads(1)
    took: dict[int, list[float]] = {0: [], 2: []}
    busy: dict[int, list[list[float]]] = {0: [], 2: []}
    foreign = Foreign()
    with skewed():
        for _ in range(asked.turns):
            for shadows in took:
                run = replace(RUN, model=model, steps=1 + asked.steps, expert_shadows=shadows)
                seconds, computed, report = turn(run)
                took[shadows] += seconds
                busy[shadows] += computed
                assert all(sum(one.times) == shadows for one in report.shadows), report.shadows
    for shadows, seconds in took.items():
        actors = [f"{1e3 * statistics.median(of_one):.0f}" for of_one in zip(*busy[shadows], strict=True)]
        print(
            f"expert_shadows={shadows}: a step takes {1e3 * statistics.median(seconds):.0f} ms; "
            f"the actors compute {' and '.join(actors)} ms of it"
        )
    gain = statistics.median(took[0]) / statistics.median(took[2])
    print(f"{gain:.2f} times as fast with shadows; others used {foreign.cores():.2f} cores")


if __name__ == "__main__":
    main()
