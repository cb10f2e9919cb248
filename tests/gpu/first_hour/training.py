"""A row of training: speed, utilisation, memory, and the kernels of three steps."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import raypar as rp
from tests.bench.trainer import Trainer
from tests.gpu.first_hour.card import peak_flops
from tests.gpu.first_hour.contestants import build, record_step
from tests.gpu.first_hour.outcome import Report
from tests.gpu.first_hour.workloads import FULL, SMALL, flops_per_token, run_of, tokens_of

GIB = 2**30


class Steps(NamedTuple):
    """How many steps a row takes after its first one.

    warm_up   so that compilers and allocators settle
    rounds    that are timed, each of ``each`` steps
    recorded  whose kernels are recorded, each by itself
    """

    warm_up: int
    rounds: int
    each: int
    recorded: int


_FULL, _SMALL = Steps(2, 3, 2, 3), Steps(1, 1, 1, 1)
_SHARE = 0.6  # of a row's seconds after which no further round begins


def measure_training(
    workload: str,
    dtype: str,
    contestant: str,
    small: bool,
    report: Report,
    halvings: int = 0,
    seconds: float = 30.0,
    cache: str = "",
    card: str = "",
) -> None:
    """Measure a contestant on a workload, and report each figure once it is known.

    Args:
        workload: Name of the workload.
        dtype: What it computes in: bf16, fp16 or fp32.
        contestant: Who trains.
        small: Whether it is the small workload of that name, on CPUs where there is no GPU.
        report: Takes the figures.
        halvings: How often the microbatch is halved.
        seconds: What the row may take, about.
        cache: Folder for the converted text.
        card: What torch calls the GPU.
    """
    import torch

    begin, steps = time.perf_counter(), _SMALL if small else _FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = run_of((SMALL if small else FULL)[workload], dtype, device, cache, halvings)
    peak, why = peak_flops(card, dtype)
    if peak is None:
        report(note=why)
    report(doing="launching", micro_batch_size=run.micro_batch_size, tokens_a_step=tokens_of(run))
    if device == "cpu":
        torch.set_num_threads(1)
    if device == "cpu" and contestant in ("torch-compiled", "nanochat-like"):
        report(note='torch.compile with its backend "eager", which makes no kernels')
    trainer = build(contestant, run)
    try:
        report(doing="taking its first step")
        trainer.train(0, 1)
        report(doing="warming up", first_step_s=time.perf_counter() - begin)
        trainer.train(1, steps.warm_up)
        report(doing="taking steps")
        next_step = _rounds(trainer, run, steps, peak, begin + _SHARE * seconds, report)
        report(doing="recording kernels", peak_memory_gib=max(trainer.peak()) / GIB)
        _kernels(trainer, range(next_step, next_step + steps.recorded), device, report)
    finally:
        trainer.close()


def _rounds(trainer: Trainer, run: rp.Run, steps: Steps, peak: float | None, end: float, report: Report) -> int:
    """Take the steps that are timed, and return the number of the next one."""
    step, speeds = 1 + steps.warm_up, list[float]()
    while len(speeds) < steps.rounds and (not speeds or time.perf_counter() < end):
        start = time.perf_counter()
        losses = trainer.train(step, steps.each)
        speeds.append(tokens_of(run) * steps.each / (time.perf_counter() - start))
        step += steps.each
        speed = statistics.median(speeds)
        report(tokens_per_s=speed, rounds=list(speeds), step_ms=1e3 * tokens_of(run) / speed, loss=losses[-1])
        if peak is not None:
            report(mfu=speed * flops_per_token(run.model) / peak)
    return step


def _kernels(trainer: Trainer, steps: range, device: str, report: Report) -> None:
    """Record steps, each by itself."""
    found = [record_step(trainer, number) for number in steps]
    if device == "cpu":
        assert not any(one.count for one in found), "a CPU runs no kernels"
        report(note="kernels and gaps: a CPU has none")
        return
    middle = sorted(found, key=lambda one: one.gap)[len(found) // 2]
    report(kernels=middle.count, gap_ms=1e3 * middle.gap, gap_share=middle.gap / middle.span if middle.span else 0.0)
    report(longest_kernels_ms={name: 1e3 * seconds for name, seconds in middle.longest.items()})
