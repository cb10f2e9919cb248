"""The speed of a pipeline step, side by side in one run.

    python tests/bench/step_speed.py [--rounds 9] [--steps 2]

- gpt-small, pp=2, m=8: raypar beside two plain processes that train at the same time (the limit, times m/(m+p-1) for
  the bubble) and torch.distributed.pipelining. Rounds are interleaved, and the medians of the ratios count.
- an empty model's step: what the executor itself costs.
- seconds from launch to the end of the first step.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import raypar as rp

CHILD = Path(__file__).with_name("child.py")


class Children:
    """Processes of child.py that step at the same time."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(CHILD), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command in commands
        ]
        for process in self._processes:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{process.args} did not start")

    def seconds(self, steps: int) -> list[float]:
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return [float(process.stdout.readline()) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def small(rounds: int, steps: int) -> None:
    run = rp.recipe("gpt-small")
    tokens = run.microbatches * run.micro_batch_size * run.model.seq
    bubble = run.microbatches / (run.microbatches + 1)
    children = {"two plain processes": Children([["plain"], ["plain"]])}
    for schedule in ("1f1b", "gpipe"):
        port = str(free_port())
        children[f"torch {schedule}"] = Children([["torch", rank, port, schedule] for rank in ("0", "1")])
    found: dict[str, list[float]] = {}
    with rp.launch(run) as job:
        for number in range(rounds):
            speeds = {}
            for name, child in children.items():
                each = child.seconds(steps)
                speeds[name] = sum(tokens / s for s in each) if "plain" in name else tokens / max(each)
            for schedule in ("1f1b", "gpipe"):
                job.reset(replace(run, schedule=schedule))
                job.step()
                start = time.perf_counter()
                for _ in range(steps):
                    job.step()
                speeds[f"raypar {schedule}"] = tokens * steps / (time.perf_counter() - start)
            for name, speed in speeds.items():
                found.setdefault(name, []).append(speed)
            print(
                f"round {number + 1}/{rounds}", {name: round(speed) for name, speed in speeds.items()}, file=sys.stderr
            )
    for child in children.values():
        child.close()
    ideal = [limit * bubble for limit in found["two plain processes"]]
    print(f"\ngpt-small, pp=2, m={run.microbatches}, 1 thread a process, {rounds} rounds of {steps} steps\n")
    print("| who | tokens/s (median) | min to max | share of the bubble-limited ideal |")
    print("|---|---|---|---|")
    for name, speeds in found.items():
        share = statistics.median(speed / limit for speed, limit in zip(speeds, ideal, strict=True))
        print(f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} | {share:.3f} |")


def empty(rounds: int) -> None:
    nothing = torch.zeros(1)

    run = rp.Run(
        model=rp.Layers(lambda: [nn.Identity(), nn.Identity()], loss=lambda output, _: output),
        mesh=rp.Mesh(pp=2),
        microbatches=8,
        data=rp.Batches(lambda step, microbatch, dp: (nothing, nothing)),
        optim=rp.SGD(lr=1e-4),
    )
    start = time.perf_counter()
    with rp.launch(run) as job:
        job.step()
        first = time.perf_counter() - start
        for _ in range(20):
            job.step()
        times = [job.step().step_ms for _ in range(100 * rounds)]
    median, least = statistics.median(times), min(times)
    print(f"empty model, pp=2, m=8: {median:.2f} ms a step (median of {len(times)}, least {least:.2f})")
    print(f"empty model, launch to the end of the first step: {first:.1f} s")


def launch() -> None:
    start = time.perf_counter()
    with rp.launch(rp.recipe("gpt-small")) as job:
        job.step()
        first = time.perf_counter() - start
    print(f"gpt-small, launch to the end of the first step: {first:.1f} s")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--steps", type=int, default=2)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    empty(chosen.rounds)
    launch()
    small(chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
