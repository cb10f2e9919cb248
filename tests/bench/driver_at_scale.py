"""What the driver's own work takes with 1,000 actors: plans, groups, the dispatch of a step, and its commit.

    python -m tests.bench.driver_at_scale [--actors 1024]

The actors are fakes without torch, a few Ray processes that answer for all of them: what is timed is the driver's side,
which does not know the difference. Times are those of the driver's process: CPU time, and wall time of the dispatch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from tests.bench.arguments import parse_words, parser_of
from tests.bench.local_ray import local_ray, quiet

T = TypeVar("T")


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


def mesh_of(actors: int) -> Mesh:
    """Return the mesh of so many actors, a power of two from 8 on: 16 x 8 x 8 of 1,024, less of fewer."""
    pp = min(16, actors // 4)
    tp = min(8, actors // pp // 2)
    return Mesh(pp=pp, tp=tp, dp=actors // (pp * tp))


def main(words: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = parser_of(__doc__)
    parser.add_argument("--actors", type=int, default=1024, help="a power of two from 8 on")
    parser.add_argument("--groups", action="store_true", help="also work out the groups of all ranks, in 6 s")
    parser.add_argument("--processes", type=int, default=4, help="that answer for all actors")
    parser.add_argument("--steps", type=int, default=11)
    asked = parse_words(parser, words, "--actors 16 --groups --processes 1 --steps 2")
    actors, mesh = asked.actors, mesh_of(asked.actors)
    run = Run(model=GPT(layers=32, hidden=256, heads=8), mesh=mesh, microbatches=32, micro_batch_size=1, device="cuda")
    clock = Clock()
    programs = clock.timed("schedules, proved", lambda: check_run(run))
    world = world_of(run)
    if asked.groups:
        clock.timed("groups of all ranks", lambda: [list(memberships(world, rank)) for rank in range(world.size)])
    clock.timed("plans of all ranks", lambda: plans_of(run, programs, "bench"))
    quiet()
    with local_ray():
        remote: Any = ray.remote(num_cpus=0, concurrency_groups={"ctl": 1})(Fake)
        fakes = [remote.remote() for _ in range(asked.processes)]
        calls = Calls([fakes[rank % asked.processes] for rank in range(actors)], world, 60.0)
        executor = Compiled(calls)
        ray.get(executor.begin(0, 0, 0))
        for step in range(asked.steps):
            refs = clock.timed("dispatch of a step", lambda step=step: executor.begin(step, 0, 0))
            results = clock.timed("its answers", lambda refs=refs: executor.results(refs, "a step"))
            clock.timed("its report", lambda step=step, results=results: reports_of(step, 1.0, results, world))
    clock.tell()


if __name__ == "__main__":
    main()
