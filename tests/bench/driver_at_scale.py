"""What the driver's own work takes with 1,000 actors: plans, groups, the dispatch of a step, and its commit.

    python -m tests.bench.driver_at_scale [--actors 1024]

The actors are fakes without torch, a few Ray processes that answer for all of them: what is timed is the driver's side,
which does not know the difference. Times are those of the driver's process: CPU time, and wall time of the dispatch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.cluster.calls import Calls
from raypar.config.run import check_run, world_of
from raypar.job.plans import plans_of
from raypar.reporting.report import reports_of
from tests.bench.local_ray import local_ray

T = TypeVar("T")
_PROCESSES, _STEPS = 4, 5
_PP, _TP = 16, 8


class Fake:
    """An actor that answers at once for many."""

    def run(self, program: str, step: int, epoch: int, copy_within: int, stream: int) -> StepResult:
        """Take no step."""
        return StepResult((2.0,) * 4, (256,) * 4, 1.0, 1e-3, 0.5, 0.0, 1.0, None, 4, 1 << 30, 4)

    def progress(self) -> None:
        """Answer that nothing is known."""


def timed(what: str, work: Callable[[], T]) -> T:
    """Print the CPU time and the wall time of some work, and return what it returns."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{what:44} {1e3 * cpu:9.1f} ms of CPU {1e3 * wall:9.1f} ms", flush=True)
    return found


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=1024, help=f"a multiple of {_PP * _TP}")
    actors = parser.parse_args().actors
    mesh = Mesh(pp=_PP, tp=_TP, dp=actors // (_PP * _TP))
    run = Run(model=GPT(layers=32, hidden=256, heads=8), mesh=mesh, microbatches=32, micro_batch_size=1, device="cuda")
    programs = timed("schedules, proved", lambda: check_run(run))
    world = world_of(run)
    timed("groups of all ranks", lambda: [list(world.memberships(rank)) for rank in range(world.size)])
    timed("plans of all ranks", lambda: plans_of(run, programs, "bench"))
    with local_ray():
        remote: Any = ray.remote(num_cpus=0, concurrency_groups={"ctl": 1})(Fake)
        fakes = [remote.remote() for _ in range(_PROCESSES)]
        calls = Calls([fakes[rank % _PROCESSES] for rank in range(actors)], world, 60.0)
        ray.get(calls.submit("run", "train", 0, 0, 0, 0))
        for step in range(_STEPS):
            refs = timed(f"step {step}: dispatch", lambda step=step: calls.submit("run", "train", step, 0, 0, 0))
            results = timed(f"step {step}: gather", lambda refs=refs: calls.gather(refs, "a step"))
            timed(f"step {step}: report", lambda step=step, results=results: reports_of(step, 1.0, results, world))


if __name__ == "__main__":
    main()
