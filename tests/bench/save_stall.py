"""What a save beside the training takes from it: runs of two actors that save every so many steps, on every core.

Three runs: a pipeline and two replicas of a model whose checkpoint has some 500 MB, and a tiny one, which shows what a
save costs whatever its size. Steps with a save and without take turns, so what else the machine does hits both.

python -m tests.bench.save_stall [SAVES]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.foreign import Foreign
from tests.bench.local_ray import local_ray, quiet

BIG = rp.GPT(layers=12, hidden=512, heads=8, seq=128)
TINY = rp.GPT(layers=2, hidden=32, heads=2, seq=32)
RUNS = {
    "pipeline": (BIG, rp.Mesh(pp=2)),
    "replicas": (BIG, rp.Mesh(dp=2)),
    "tiny-pipeline": (TINY, rp.Mesh(pp=2)),
    "tiny-replicas": (TINY, rp.Mesh(dp=2)),
}


class Took(NamedTuple):
    """A step: its end, its seconds from the end of the one before, and how many cores others used meanwhile."""

    end: float
    seconds: float
    others: float


class Saved(NamedTuple):
    """A checkpoint: when it was whole, and its bytes."""

    done: float
    size: int


def main(words: Sequence[str] | None = None) -> None:
    """Measure each run, and print what a save of it costs."""
    parser = parser_of(__doc__)
    parser.add_argument("saves", type=int, nargs="?", default=6)
    parser.add_argument("--every", type=int, default=12, help="steps from one save to the next")
    parser.add_argument("--runs", choices=RUNS, nargs="+", default=[*RUNS][:3], help="default: the first three")
    asked = parse_words(parser, words, "1 --every 4 --runs tiny-pipeline tiny-replicas")
    quiet()
    with local_ray():
        for title in asked.runs:
            model, mesh = RUNS[title]
            with TemporaryDirectory() as folder:
                report(title, asked.every, *measured(model, mesh, asked.saves, asked.every, f"{folder}/run"))


def measured(model: rp.GPT, mesh: rp.Mesh, saves: int, every: int, folder: str) -> tuple[list[Took], dict[int, Saved]]:
    """Every step of a run but the last, whose save is waited for; and what was saved after how many of them."""
    run = rp.Run(
        model=model,
        mesh=mesh,
        microbatches=4,
        micro_batch_size=1,
        steps=every * (saves + 1) + 1,
        save_every=every,
        keep_last=2,
        folder=folder,
        device="cpu",
    )
    steps, seen, foreign = list[Took](), dict[int, Saved](), Foreign()
    last = time.time()

    def note(outcome: rp.Report | rp.Evaluation) -> None:
        nonlocal last
        for path in Path(folder, "checkpoints").glob("step-*"):
            if (number := int(path.name.removeprefix("step-"))) not in seen:
                with suppress(FileNotFoundError):  # it may go while it is looked at
                    seen[number] = Saved(path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()))
        steps.append(Took(end := time.time(), end - last, foreign.cores()))
        last = end

    with rp.launch(run) as job:
        job.train(run.steps - 1, on=note)
    return steps, seen


def report(title: str, every: int, steps: list[Took], seen: dict[int, Saved]) -> None:
    """Compare the steps in which a save was under way with the others."""
    during = {
        saved: [n for n in range(saved, len(steps)) if steps[n - 1].end < done] for saved, (done, _) in seen.items()
    }
    busy = {number for numbers in during.values() for number in numbers}
    usual = [steps[n] for n in range(2, len(steps)) if n not in busy]
    plain, others = statistics.median(step.seconds for step in usual), statistics.median(step.others for step in usual)
    print(f"{title}: a step without a save takes {plain:.3f} s (median of {len(usual)}); others use {others:.2f} cores")
    took, lost = list[float](), list[float]()
    for saved, numbers in during.items():
        if not numbers or numbers[-1] - numbers[0] >= every:
            continue
        done, size = seen[saved]
        took.append(done - steps[saved - 1].end)
        lost.append(sum(steps[n].seconds - plain for n in numbers))
        others = statistics.mean(steps[n].others for n in numbers)
        print(
            f"  step {saved}: {size / 1e6:.1f} MB in {took[-1]:.3f} s; its {len(numbers)} steps lost {lost[-1]:.3f} s, "
            f"{lost[-1] / took[-1]:.1%} of that; others used {others:.2f} cores"
        )
    if took:
        ratio = statistics.median(one / whole for one, whole in zip(lost, took, strict=True))
        print(
            f"  median of {len(took)} saves: one takes {statistics.median(took):.3f} s, training loses "
            f"{statistics.median(lost):.3f} s by it, {ratio:.1%} of that",
            flush=True,
        )


if __name__ == "__main__":
    main()
