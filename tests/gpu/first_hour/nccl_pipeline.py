"""A pipeline of two stages on one GPU whose groups go over NCCL, beside what one process computes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

import raypar as rp
from tests.gpu.first_hour.outcome import NotPossibleError, Report
from tests.gpu.members import group_classes

_STEPS = 3


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
    if device == "cuda":
        run = replace(run, shared_gpu="nccl", resources=rp.Resources(gpus=0.5))
    report(doing="starting Ray")
    with local_ray(num_gpus=1):
        logging.getLogger("raypar").setLevel(logging.ERROR)  # that actors share the GPU is known
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
