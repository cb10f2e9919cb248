"""What raypar and Ray cost by themselves: a step without work, a launch without a model, an actor without a task.

python -m tests.bench.overhead
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import ray
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.types import ExecutorName, TaskOrder
from tests.bench.arguments import parse_words, parser_of
from tests.bench.local_ray import local_ray, quiet
from tests.bench.tables import Table

_WARM = 20  # steps before those that count
_TIMEOUT = 60.0  # seconds
_MEMORY = "import torch; from raypar.actors.machine.device import PeakMemory; print(PeakMemory().read())"


@dataclass(frozen=True)
class EmptySteps:
    """
    step_ms     milliseconds of each step of an empty model, pp=2, m=8
    tasks_ms    likewise, where each action is a Ray task
    dynamic_ms  likewise, where arrival decides which task comes next
    num_tasks   how many tasks such a step is
    launch      seconds from launch to the end of the first step of that model, in a Ray that is there already
    """

    step_ms: list[float]
    tasks_ms: list[float]
    dynamic_ms: list[float]
    num_tasks: int
    launch: float


@dataclass(frozen=True)
class Overhead:
    """
    steps           of an empty model
    actor_memory    bytes: the most that an idle Ray actor has held that has imported torch
    process_memory  bytes: the same of a plain process
    """

    steps: EmptySteps
    actor_memory: int
    process_memory: int


class Idle:
    """An actor that has imported torch and does nothing."""

    def memory(self) -> int:
        from raypar.actors.machine.device import PeakMemory

        return PeakMemory().read()


def measure_overhead(steps: int) -> Overhead:
    """In the Ray that this process is connected to; ``steps`` of the empty model."""
    remote: Any = ray.remote(num_cpus=1)(Idle)
    idle = remote.remote()
    actor_memory = ray.get(idle.memory.remote(), timeout=_TIMEOUT)
    ray.kill(idle)
    alone = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True, timeout=_TIMEOUT
    )
    return Overhead(measure_steps(steps), actor_memory, int(alone.stdout))


def measure_steps(steps: int, warm: int = _WARM) -> EmptySteps:
    """In the Ray that this process is connected to; ``steps`` of the empty model, after ``warm`` that do not count."""
    start = time.perf_counter()
    with rp.launch(_empty()) as job:
        job.step()
        launch = time.perf_counter() - start
        took = [_measured(job, steps, warm)]
        for order in get_args(TaskOrder):
            job.reset(_empty("tasks", order))
            took.append(_measured(job, steps, warm))
        return EmptySteps(*took, job.schedule.num_actions, launch)


def executor_table(found: EmptySteps) -> Table:
    """What an action costs that is a Ray task, beside one of a compiled step."""
    compiled, rows = statistics.median(found.step_ms), []
    named = {"compiled": found.step_ms, "tasks": found.tasks_ms, "tasks, dynamic order": found.dynamic_ms}
    for name, took in named.items():
        more = 1e3 * (statistics.median(took) - compiled) / max(1, found.num_tasks)
        apiece = f"{1e3 * compiled / max(1, found.num_tasks):,.0f}" if took is found.step_ms else f"+{more:,.0f}"
        rows.append([name, f"{statistics.median(took):.2f}", f"{min(took):.2f}", apiece])
    title = f"A step of an empty model (pp=2, m=8) of {found.num_tasks} actions, {len(found.step_ms)} times"
    return Table(title, ["executor", "median ms", "least ms", "us an action"], rows)


def _measured(job: rp.Job, steps: int, warm: int) -> list[float]:
    for _ in range(warm):
        job.step()
    return [job.step().step_ms for _ in range(steps)]


def _empty(executor: ExecutorName = "compiled", order: TaskOrder = "row") -> rp.Run:
    nothing = torch.zeros(1)
    return rp.Run(
        model=rp.Layers(lambda: [nn.Identity(), nn.Identity()], loss=lambda output, _: output),
        mesh=rp.Mesh(pp=2),
        microbatches=8,
        data=rp.Batches(lambda step, microbatch, dp: (nothing, nothing)),
        optim=rp.SGD(lr=1e-4),
        device="cpu",
        executor=executor,
        order=order,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table of executors."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=_WARM, help="steps before those that count")
    asked = parse_words(parser, words, "--steps 2 --warm 1")
    quiet()
    with local_ray():
        print(executor_table(measure_steps(asked.steps, asked.warm)).text())


if __name__ == "__main__":
    main()
