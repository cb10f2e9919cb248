"""How far predictions from the calibration are from what runs take: step time and peak memory of 20 layouts.

    python -m tests.long.prediction_error [--rounds 20] [--turns 2] [--steps 4] [--seconds 60] [--only 5]

Each round calibrates this machine anew, and takes steps of all layouts in turns, each on as many actors as it has: on a
machine whose speed comes and goes, many short turns say more than a long one. Then each layout takes some steps on
actors of its own, since memory once taken stays. None of the layouts is one of the calibration's short runs. Prints a
line for each layout and round, then the means of all: what was predicted beside what was measured, and which pairs of
layouts whose steps are more than 3 % apart are predicted in the wrong order, with how far rounds leave that in doubt.
They are means since what is predicted is a sum: the sum of parts' medians is not the median of their sum. Exit code 1
if a step is off by more than 10 %, the median by more than 5 %, a peak by more than 5 %, or a pair without doubt in the
wrong order. For a machine that does nothing else: other programs on its cores are in no prediction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.calibration.calibrate import calibrate
from raypar.config.run import check_run
from raypar.job.job import Job
from raypar.job.launch import launch
from raypar.planner.calibrated.calibration import Calibration
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import from_calibration, from_flops
from raypar.planner.sizes.sized_run import SizedRun

_MOST, _MOST_MEDIAN, _MOST_MEMORY, _ALIKE = 0.10, 0.05, 0.05, 0.03
GPT_S = GPT(layers=4, hidden=128, heads=4, seq=128)
GPT_M = GPT(layers=4, hidden=192, heads=6, seq=192)
LLAMA = Llama(layers=4, hidden=128, heads=4, kv_heads=2, seq=128)
EXPERTS = GPT(layers=2, hidden=128, heads=4, seq=128, moe=MoE(experts=4, top_k=2))


def layouts() -> dict[str, Run]:
    """The runs by name."""
    one = Run(model=GPT_S, microbatches=4, micro_batch_size=2, steps=1000, device="cpu")
    wide = Run(model=GPT_M, microbatches=4, micro_batch_size=2, steps=1000, device="cpu")
    llama = Run(model=LLAMA, microbatches=4, micro_batch_size=2, steps=1000, device="cpu")
    moe = Run(model=EXPERTS, microbatches=2, micro_batch_size=2, steps=1000, device="cpu")

    def on(run: Run, mesh: Mesh | None = None, **changed: object) -> Run:
        return replace(run, mesh=mesh or Mesh(), **changed)

    return {
        "pp2 dp2": on(one, Mesh(pp=2, dp=2)),
        "pp4": on(one, Mesh(pp=4), microbatches=8),
        "dp2 tp2": on(one, Mesh(dp=2, tp=2)),
        "one, small": on(one),
        "one, wide": on(wide),
        "one, recomputed": on(wide, recompute="full"),
        "one, llama": on(llama),
        "dp2": on(one, Mesh(dp=2)),
        "dp2, wide": on(wide, Mesh(dp=2)),
        "dp2 zero2": on(one, Mesh(dp=2), zero=2),
        "dp2 zero3": on(one, Mesh(dp=2), zero=3),
        "pp2 1f1b": on(one, Mesh(pp=2), microbatches=8),
        "pp2 gpipe": on(wide, Mesh(pp=2), schedule="gpipe"),
        "pp2 interleaved": on(one, Mesh(pp=2), schedule="interleaved"),
        "pp2 zb-h1": on(wide, Mesh(pp=2), schedule="zb-h1", microbatches=8),
        "pp2 llama": on(llama, Mesh(pp=2)),
        "tp2": on(wide, Mesh(tp=2)),
        "tp2 sequence": on(wide, Mesh(tp=2), sequence_parallel=True),
        "cp2": on(wide, Mesh(cp=2)),
        "dp2 ep2": on(moe, Mesh(dp=2, ep=2)),
    }


@dataclass(frozen=True)
class Error:
    """What a layout was predicted to take, by FLOPs too, and what it took in several turns: seconds."""

    name: str
    flops: float
    predicted: float
    turns: tuple[float, ...]

    @property
    def measured(self) -> float:
        """What it took in a turn, on average."""
        return statistics.fmean(self.turns)

    @property
    def relative(self) -> float:
        """The relative error."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        measured, predicted = 1e3 * self.measured, 1e3 * self.predicted
        return (
            f"{self.name:16} {measured:8.1f} ms  predicted {predicted:8.1f} ({self.relative:+5.0%}), "
            f"by FLOPs {1e3 * self.flops:7.1f}"
        )


def in_turns(chosen: Mapping[str, Run], turns: int, steps: int) -> dict[str, list[float]]:
    """Return the median seconds of a step of each layout in each turn. The first step of a turn is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in chosen}
    with ExitStack() as stack:
        jobs: dict[int, Job] = {}  # one for each number of actors
        for run in chosen.values():
            if run.mesh.size not in jobs:
                jobs[run.mesh.size] = stack.enter_context(launch(run))
        for turn in range(turns + 1):  # the first one warms up
            for name, run in chosen.items():
                job = jobs[run.mesh.size]
                job.reset(run)
                each = [job.step().step_ms / 1e3 for _ in range(steps + 1 if turn else 2)][1:]
                if turn:
                    taken[name].append(statistics.median(each))
    return taken


def error_of(name: str, run: Run, taken: Sequence[float], calibration: Calibration) -> Error:
    """Return what a layout is predicted to take beside what it took."""
    schedule = check_run(run)["train"]
    sized = SizedRun.of(run, schedule)
    return Error(
        name,
        from_flops(sized).step,
        from_calibration(sized, calibration).step,
        tuple(taken),
    )


def of_rounds(errors: Sequence[Error]) -> Error:
    """Return what a layout was predicted to take on average, and what it took in all turns."""
    return Error(
        errors[0].name,
        errors[0].flops,
        statistics.fmean(one.predicted for one in errors),
        tuple(seconds for one in errors for seconds in one.turns),
    )


def peak_error(name: str, run: Run, calibration: Calibration) -> float:
    """Take three steps of a layout on actors of its own, and return how far its peak is from the forecast."""
    schedule = check_run(run)["train"]
    sized = SizedRun.of(run, schedule)
    predicted = from_calibration(sized, calibration)
    forecast = max(one.peak for one in worker_memory(sized, predicted.timeline, predicted.process))
    with launch(run) as job:
        peak = max(max(job.step().peak_memory) for _ in range(3))
    error = forecast / peak - 1
    print(f"{name:16} peak {peak >> 20:5} MiB  predicted {forecast >> 20:5} ({error:+5.1%})", flush=True)
    return abs(error)


def wrong_pairs(rounds: Sequence[Sequence[Error]]) -> tuple[list[str], list[str], int]:
    """Return which pairs of layouts are predicted in the wrong order, and how many are more than 3 % apart.

    Args:
        rounds: The errors of each layout, by round.

    Returns:
        Pairs that are more than 3 % apart beyond what rounds differ (one standard error of their mean), pairs that are
        so only within it, and the number of all that are more than 3 % apart.
    """
    wrong, doubtful, number = list[str](), list[str](), 0
    layouts = sorted(rounds, key=lambda each: of_rounds(each).measured)
    for ones, others in combinations(layouts, 2):
        one, other = of_rounds(ones), of_rounds(others)
        apart = other.measured / one.measured - 1
        if apart > _ALIKE:
            number += 1
            if other.predicted < one.predicted:
                ratios = [b.measured / a.measured for a, b in zip(ones, others, strict=True)]
                noise = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
                predicted = 1 - other.predicted / one.predicted
                told = f"{apart:.1%} apart, give or take {noise:.1%}; predicted {predicted:.1%} the other way"
                (wrong if apart - noise > _ALIKE else doubtful).append(f"{one.name} < {other.name} ({told})")
    return wrong, doubtful, number


def main(words: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=6, help="of each round")
    parser.add_argument("--steps", type=int, default=4, help="of each turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each calibration may take")
    parser.add_argument("--only", type=int, default=None, help="the first so many layouts")
    given = parser.parse_args(words)
    chosen = dict(list(layouts().items())[: given.only])
    found: dict[str, list[Error]] = {name: [] for name in chosen}
    for number in range(1, given.rounds + 1):
        calibration = calibrate(given.seconds, lambda told: print(f"# {told}", flush=True))
        taken = in_turns(chosen, given.turns, given.steps)
        for name, run in chosen.items():
            found[name].append(error_of(name, run, taken[name], calibration))
            print(f"round {number}: {found[name][-1]}", flush=True)
    memory = [peak_error(name, run, calibration) for name, run in chosen.items()]
    errors = [of_rounds(each) for each in found.values()]
    print(f"means of {given.rounds} rounds of {given.turns} turns:")
    for error in errors:
        print(error)
    times = [abs(error.relative) for error in errors]
    wrong, doubtful, number = wrong_pairs(list(found.values()))
    within = sum(one <= _MOST for one in times)
    print(f"step: median error {statistics.median(times):.1%}, largest {max(times):.1%}, {within} within {_MOST:.0%}")
    print(f"peak: median error {statistics.median(memory):.1%}, largest {max(memory):.1%}")
    print(f"order: {len(wrong) + len(doubtful)} of {number} pairs are wrong, {len(doubtful)} of them too near to tell")
    for told in wrong + doubtful:
        print(told)
    is_right = within == len(times) and statistics.median(times) <= _MOST_MEDIAN and max(memory) <= _MOST_MEMORY
    return 0 if is_right and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
