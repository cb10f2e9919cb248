"""A pipeline of two stages on one GPU whose groups go over NCCL, beside what one process computes."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any

import torch

import raypar as rp
from tests.gpu.first_hour.nccl_groups import one_gpu_environment
from tests.gpu.first_hour.outcome import NotPossibleError, Report

_STEPS = 3


def prefer_nccl() -> None:
    """Let the groups of this process go over NCCL also where members share a GPU. Ray calls it in every worker."""
    from raypar.actors.collective import connect

    os.environ.update(one_gpu_environment(os.getpid()))
    usual = connect.backend_for

    def chosen(name: str, everyone: list[connect.Capability]) -> connect.Backend:
        found = usual(name, everyone)
        return "nccl" if found == "staged" and all(member.nccl for member in everyone) else found

    connect.backend_for = chosen


def group_classes(actor: Any) -> list[str]:
    """Return the names of the classes of an actor's groups; ``actor`` is its instance.

    Raises RuntimeError if Ray has not called ``prefer_nccl`` in its process.
    """
    if "NCCL_HOSTID" not in os.environ:
        raise RuntimeError("Ray did not call the hook with which groups go over NCCL")
    return sorted({type(group).__name__ for group in actor._joined.values()})


def measure_pipeline(small: bool, report: Report, cache: str) -> None:
    """Compare two stages with one process, and report the speed of a small GPT in them.

    Args:
        small: Whether the GPT is tiny.
        report: Takes the figures.
        cache: Folder for the converted text.

    Raises:
        NotPossibleError: Ray is not here.
        RuntimeError: They compute something else than one process, or their groups are not NCCL's.
    """
    try:
        import ray

        from tests.bench.local_ray import local_ray, quiet
    except ImportError as error:
        raise NotPossibleError(f"Ray is not here: {error}") from error
    quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        report(note="no NCCL here: raypar's CPU group in its place")
    data = rp.Text(cache=cache)
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), data=data, steps=_STEPS, device=device)
    report(doing="starting Ray")
    with local_ray(num_gpus=1, runtime_env={"worker_process_setup_hook": prefer_nccl}):
        logging.getLogger("raypar").setLevel(logging.ERROR)  # that groups go through the host is not so here
        report(doing="comparing with one process")
        verdict = rp.verify(run)
        if not verdict.ok:
            raise RuntimeError(f"two stages compute something else than one process: {str(verdict).splitlines()[0]}")
        report(right=True, doing="taking steps")
        sizes = {"layers": 2, "hidden": 32} if small else {"layers": 12, "hidden": 768}
        model = rp.GPT(**sizes, heads=2 if small else 12, seq=16 if small else 1024)
        run = replace(run, model=model, precision=rp.Precision(compute="bf16"), microbatches=8, steps=2 * _STEPS)
        with rp.launch(run) as job:
            handles = job._lifetime.actors.handles
            classes, *_ = ray.get([one.__ray_call__.remote(group_classes) for one in handles], timeout=60.0)
            report(group=classes)
            if device == "cuda" and classes != ["NcclGroup"]:
                raise RuntimeError(f"its groups are {', '.join(classes)}")
            job.train(_STEPS)
            start = time.perf_counter()
            tokens = sum(one.tokens for one in job.train(_STEPS))
            report(tokens_per_s=tokens / (time.perf_counter() - start))
