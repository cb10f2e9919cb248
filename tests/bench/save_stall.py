"""What a save beside the training costs it: a run of two actors that saves some 500 MB every so many steps.

python -m tests.bench.save_stall [SAVES]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import raypar as rp
from tests.bench.local_ray import local_ray, quiet

EVERY = 12  # steps from one save to the next


def main(saves: int) -> None:
    """Print a line a save: its size and own time, and what its steps took beyond the median of steps without one."""
    quiet()
    with TemporaryDirectory() as folder, local_ray():
        run = rp.Run(
            model=rp.GPT(layers=12, hidden=512, heads=8, seq=128),
            mesh=rp.Mesh(pp=2),
            microbatches=4,
            micro_batch_size=1,
            steps=EVERY * (saves + 1) + 1,
            save_every=EVERY,
            keep_last=2,
            folder=f"{folder}/run",
            device="cpu",
        )
        ends, took = list[float](), list[float]()

        def note(outcome: rp.Report | rp.Evaluation) -> None:
            if isinstance(outcome, rp.Report):
                ends.append(time.time())
                took.append(outcome.step_ms / 1e3)

        seen = dict[int, tuple[float, int]]()
        with rp.launch(run) as job:
            for _ in range(run.steps - 1):
                job.train(1, on=note)
                for path in sorted(Path(folder, "run", "checkpoints").glob("step-*")):
                    size = sum(file.stat().st_size for file in path.iterdir())
                    seen.setdefault(int(path.name.removeprefix("step-")), (path.stat().st_mtime, size))
    report(ends, took, seen)


def report(ends: list[float], took: list[float], seen: dict[int, tuple[float, int]]) -> None:
    """Compare the steps in which a save was under way with the others."""
    during = {
        saved: [n for n in range(saved, len(ends)) if ends[n] - took[n] < done] for saved, (done, _) in seen.items()
    }
    busy = {number for numbers in during.values() for number in numbers}
    usual = statistics.median(took[n] for n in range(2, len(took)) if n not in busy)
    print(f"a step without a save takes {usual:.3f} s (median of {len(took) - 2 - len(busy)})")
    for saved, numbers in during.items():
        done, size = seen[saved]
        own, lost = done - ends[saved - 1], sum(took[n] - usual for n in numbers)
        print(
            f"step {saved}: {size / 1e6:.0f} MB in {own:.2f} s; its {len(numbers)} steps lost {lost:.3f} s, "
            f"{lost / own:.1%} of that; the first of them {took[saved] - usual:.3f} s"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
