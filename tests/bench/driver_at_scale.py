"""What thousands of actors cost the driver: launch, steps, evaluation, save, recovery, relayout and end of a job.

    python -m tests.bench.driver_at_scale [--actors 64 256 1024 4096]

The actors are stand-ins without torch (tests/support/stand_ins.py), of which a few processes have thousands; the driver
does not know the difference. Each line has the seconds that something took, and the CPU seconds of this process.
A step is timed from when the last stand-in has returned, by its own clock, and beside it a bare ``ray.get`` of the same
calls. Figures of a step are medians, without the first one.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

import raypar as rp
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.worlds import world_of
from tests.bench.arguments import parse_words, parser_of
from tests.bench.local_ray import local_ray, quiet
from tests.support.stand_in_cluster import StandInCluster, start_crowd
from tests.support.stand_ins import Pace

VICTIM = 5  # the rank that dies
MESHES = "dp", "pp x tp x dp"
PARTS = "launch", "step", "bare ray.get", "evaluation", "save", "recovery, 2 steps", "relayout", "end"
TASKS = {
    "tasks": {"executor": "tasks"},
    "dynamic tasks": {"executor": "tasks", "order": "dynamic"},
    "finish() by hand": {},
}


class Crowds(NamedTuple):
    """Processes of stand-ins, and how long these take."""

    pace: Pace
    processes: list[Any]


class Took(NamedTuple):
    """What a piece of work took.

    Attributes:
        wall: Seconds; of a step, those after the last stand-in has returned.
        cpu: CPU seconds of this process.
    """

    wall: float
    cpu: float


def timed(work: Callable[[], object], last: Callable[[], float] | None = None) -> Took:
    """Time some work; if ``last`` is given, from the time that it returns, of ``time.perf_counter``."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    cpu, end = time.process_time() - cpu, time.perf_counter()
    return Took(end - (start if last is None else last()), cpu)


def median(taken: Sequence[Took]) -> Took:
    """Return the medians of several times, each by itself."""
    return Took(*map(statistics.median, zip(*taken, strict=True)))


def batch(step: int, microbatch: int, dp: int) -> tuple[Any, Any]:
    """Return a batch of the least size, which no stand-in asks for."""
    ids = torch.full((1, 8), dp % 64)
    return ids, ids


def meshes(actors: int) -> dict[str, tuple[Mesh, Mesh]]:
    """Return by name the meshes of so many actors, a power of two from 8 on, and those of their relayouts."""
    pp = min(16, max(2, actors // 16))
    tp = min(8, actors // pp // 2)
    dp = actors // (pp * tp)
    deep = Mesh(pp=pp, tp=tp, dp=dp), Mesh(pp=pp, tp=max(1, tp // 2), dp=dp * min(2, tp))
    return dict(zip(MESHES, ((Mesh(dp=actors), Mesh(tp=2, dp=actors // 2)), deep), strict=True))


def run_of(mesh: Mesh, **settings: Any) -> rp.Run:
    """Return a run on a mesh, which survives failures."""
    model = rp.GPT(layers=16, hidden=64, heads=8, seq=8, vocab=64)
    fields = {"microbatches": mesh.pp, "micro_batch_size": 1, "steps": 100, "eval_steps": 1}
    fields |= {"model": model, "data": rp.Batches(batch, batch), "device": "cpu", "timeout": 60.0, "mesh": mesh}
    return rp.Run(**(fields | settings))


@contextmanager
def crowds_of(pace: Pace, count: int) -> Iterator[Crowds]:
    """Within it there are so many processes of stand-ins."""
    crowds = Crowds(pace, [start_crowd(pace) for _ in range(count)])
    ray.get([process.last_return.remote() for process in crowds.processes])  # they have started
    try:
        yield crowds
    finally:
        for process in crowds.processes:
            ray.kill(process)


@contextmanager
def stand_ins(mesh: Mesh, crowds: Crowds, alone: tuple[int, ...] = ()) -> Iterator[StandInCluster]:
    """Within it launches get stand-ins, on as many nodes as they need and one more."""
    cluster = StandInCluster(mesh.actors + 8, crowds.processes, crowds.pace, alone)
    try:
        with cluster.serving():
            yield cluster
    finally:
        cluster.close()


def drive(mesh: Mesh, other: Mesh, crowds: Crowds, steps: int) -> Iterator[tuple[str, Took]]:
    """Drive a job from its launch to its end, and yield what each part took."""
    run = run_of(mesh, max_failures=2)
    victim = world_of(run).label(VICTIM)
    dies = rp.chaos.kill(victim, at="end", step=steps + 2)
    with stand_ins(mesh, crowds, (VICTIM,)) as cluster, tempfile.TemporaryDirectory() as folder:
        jobs = list[rp.Job]()
        yield "launch", timed(lambda: jobs.append(rp.launch(run, chaos=[dies])))
        (job,) = jobs
        taken = [timed(job.step, cluster.last_return) for _ in range(steps + 1)]
        yield "step", median(taken[1:])
        order = json.dumps([job.next_step - 1, 0, 0, 0]).encode()
        yield "bare ray.get", median([timed(lambda: bare(cluster, order), cluster.last_return) for _ in range(3)])
        yield "evaluation", timed(lambda: job.evaluate(1))
        yield "save", timed(lambda: job.save(Path(folder)))
        yield "recovery, 2 steps", timed(job.step)
        assert len(job.failures) == 1 and job.failures[0].source == "memory", job.failures
        yield "relayout", timed(lambda: job.relayout(mesh=other))
        yield "end", timed(job.close)


def bare(cluster: StandInCluster, order: bytes) -> None:
    """Take a step without raypar."""
    ray.get([handle.train.remote(order) for handle in cluster.handles.values()])


def drive_tasks(mesh: Mesh, crowds: Crowds, steps: int, **settings: Any) -> Took:
    """Return what a step costs whose actions are calls; by hand, if there is nothing else to set."""
    with stand_ins(mesh, crowds) as cluster, rp.launch(run_of(mesh, **settings)) as job:
        take = job.step if settings else lambda: job.stepper().finish()
        return median([timed(take, cluster.last_return) for _ in range(steps + 1)][1:])


def tell(actors: int, what: str, took: Took, mesh: str) -> None:
    """Print a line of the table."""
    print(f"{actors:>6,} actors, {mesh:12} {what:18} {took.wall:8.3f} s, {took.cpu:8.3f} s of CPU", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = parser_of(__doc__)
    parser.add_argument("--actors", type=int, nargs="*", default=[64, 256, 1024, 4096], help="powers of two from 16 on")
    parser.add_argument("--tasks", type=int, nargs="*", default=[64, 512], help="actors whose actions are calls")
    parser.add_argument("--meshes", nargs="*", default=MESHES, help="which meshes")
    parser.add_argument("--processes", type=int, default=4, help="that the stand-ins share")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a step lasts")
    parser.add_argument("--steps", type=int, default=5)
    asked = parse_words(parser, words, "--actors 16 --tasks 16 --meshes dp --processes 1 --seconds 0.2 --steps 1")
    pace = Pace(asked.seconds, asked.seconds / 100)
    logging.getLogger("raypar").setLevel(logging.ERROR)
    quiet()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; a step lasts {asked.seconds:g} s")
    with local_ray(), crowds_of(pace, asked.processes) as crowds:
        costs = dict[tuple[str, str], dict[int, float]]()
        for actors in asked.actors:
            for name, (mesh, other) in meshes(actors).items():
                if name in asked.meshes:
                    for what, took in drive(mesh, other, crowds, asked.steps):
                        tell(actors, what, took, name)
                        costs.setdefault((name, what), {})[actors] = took.cpu
        for actors in asked.tasks:
            mesh = Mesh(pp=4, tp=min(8, actors // 8), dp=actors // 4 // min(8, actors // 8))
            for what, settings in TASKS.items():
                took = drive_tasks(mesh, crowds, asked.steps, microbatches=4, **settings)
                tell(actors, what, took, "pp x tp x dp")
        for (name, what), cpu in costs.items():
            for before, last in pairwise(sorted(cpu)):
                ratio, more = cpu[last] / cpu[before], last / before
                print(f"{name:12} {what:18} {ratio:5.2f} times the CPU with {more:g} times the actors")


if __name__ == "__main__":
    main()
