"""What the driver's own work takes with 1,000 actors: plans, groups, the dispatch of a step, and its commit.

    python -m tests.bench.driver_at_scale [--actors 1024]

The actors are fakes without torch, a few Ray processes that answer for all of them: what is timed is the driver's side,
which does not know the difference. Times are those of the driver's process: CPU time, and wall time of the dispatch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from raypar.actors.mesh.memberships import memberships
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.cluster.calls import Calls
from raypar.config.run import check_run, world_of
from raypar.job.executors import Compiled
from raypar.job.plans import plans_of
from raypar.reporting.report import reports_of
from tests.bench.local_ray import local_ray

T = TypeVar("T")
_PROCESSES, _STEPS = 4, 11
_PP, _TP = 16, 8


class Fake:
    """An actor that answers at once for many, on cores that the driver does not need: a thousand have their own."""

    def __init__(self) -> None:
        for thread in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)

    def train(self, order: bytes) -> StepResult:
        """Take no step."""
        return StepResult((2.0,) * 4, (256,) * 4, 1.0, 1e-3, 0.5, 0.0, 1.0, None, 4, 1 << 30, 4)

    def progress(self) -> None:
        """Answer that nothing is known."""


class Clock:
    """The CPU time of this process and the wall time of pieces of work, by name."""

    def __init__(self) -> None:
        self._taken = defaultdict[str, list[tuple[float, float]]](list)

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Time some work, and return what it returns."""
        cpu, wall = time.process_time(), time.perf_counter()
        found = work()
        self._taken[what].append((time.process_time() - cpu, time.perf_counter() - wall))
        return found

    def tell(self) -> None:
        """Print the medians of each piece, and between which wall times it was."""
        for what, taken in self._taken.items():
            cpus, walls = ([1e3 * one for one in times] for times in zip(*taken, strict=True))
            print(
                f"{what:20} {statistics.median(cpus):8.1f} ms of CPU {statistics.median(walls):8.1f} ms "
                f"({len(taken)}: {min(walls):.1f} to {max(walls):.1f})"
            )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=1024, help=f"a multiple of {_PP * _TP}")
    parser.add_argument("--groups", action="store_true", help="also work out the groups of all ranks, in 6 s")
    args = parser.parse_args()
    actors = args.actors
    mesh = Mesh(pp=_PP, tp=_TP, dp=actors // (_PP * _TP))
    run = Run(model=GPT(layers=32, hidden=256, heads=8), mesh=mesh, microbatches=32, micro_batch_size=1, device="cuda")
    clock = Clock()
    programs = clock.timed("schedules, proved", lambda: check_run(run))
    world = world_of(run)
    if args.groups:
        clock.timed("groups of all ranks", lambda: [list(memberships(world, rank)) for rank in range(world.size)])
    clock.timed("plans of all ranks", lambda: plans_of(run, programs, "bench"))
    with local_ray():
        remote: Any = ray.remote(num_cpus=0, concurrency_groups={"ctl": 1})(Fake)
        fakes = [remote.remote() for _ in range(_PROCESSES)]
        calls = Calls([fakes[rank % _PROCESSES] for rank in range(actors)], world, 60.0)
        executor = Compiled(calls)
        ray.get(executor.begin(0, 0, 0))
        for step in range(_STEPS):
            refs = clock.timed("dispatch of a step", lambda step=step: executor.begin(step, 0, 0))
            results = clock.timed("its answers", lambda refs=refs: executor.results(refs, "a step"))
            clock.timed("its report", lambda step=step, results=results: reports_of(step, 1.0, results, world))
    clock.tell()


if __name__ == "__main__":
    main()
