"""Several replicas on one GPU: raypar's actors, and DDP and FSDP2 in processes of their own, all with NCCL's variables.

    python -m tests.gpu.first_hour.replicas WORKLOAD DTYPE CONTESTANT REPLICAS CACHE [--small]

is one process of a contestant: of raypar the driver. It takes its first step, then serves requests.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import raypar as rp
from raypar.actors.collective.gpu.shared_gpu import allow_shared_gpu
from raypar.actors.machine.device import ComputeDevice, device_of
from tests.bench.processes import Processes
from tests.bench.trainer import Trainer, serve
from tests.gpu.first_hour.contestants import raypar_trainer
from tests.gpu.first_hour.outcome import NotPossibleError, Report
from tests.gpu.first_hour.rows import RAYPAR
from tests.gpu.first_hour.workloads import FULL, SMALL, run_of, tokens_of

_FIRST, _ANSWER = 150.0, 60.0  # seconds until the first step is done, and those of a round
_ROUNDS, _STEPS = 3, 3
_HALVINGS = 2  # of the microbatch of one actor, so that those of four fit


def _peer(contestant: str, run: rp.Run, place: ComputeDevice) -> Trainer:
    """Return the training of one of torch's processes. Only what it needs is imported."""
    if contestant == "ddp":
        from tests.bench.peers.ddp import ddp

        return ddp(run, place)
    from tests.bench.peers.fsdp import fsdp

    return fsdp(run, place)


def measure_replicas(
    workload: str, dtype: str, contestant: str, replicas: int, small: bool, report: Report, cache: str
) -> None:
    """Measure a contestant's replicas on one GPU; on a CPU they are processes on it.

    Args:
        workload: Name of the workload.
        dtype: What it computes in.
        contestant: Who trains.
        replicas: Number of replicas.
        small: Whether it is the small workload of that name.
        report: Takes the figures.
        cache: Folder for the converted text.
    """
    if torch.cuda.is_available():
        report(note="one GPU, NCCL over sockets: kernels of the replicas take turns")
    run = _run(workload, dtype, contestant, replicas, cache, small=small)
    processes = 1 if contestant in RAYPAR else replicas
    words = [sys.executable, "-m", "tests.gpu.first_hour.replicas", workload, dtype, contestant, str(replicas), cache]
    with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        listener.close()
        env = {"WORLD_SIZE": str(replicas), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        report(doing="taking its first step")
        command = [*words, *(["--small"] if small else [])]
        team = Processes(contestant, [command] * processes, Path(folder), env)
        try:
            team.answers(_FIRST)
            speeds = []
            for number in range(1 if small else _ROUNDS):
                taken = team.ask("train", 1 + number * _STEPS, _STEPS, seconds=_ANSWER)
                seconds = max(one["seconds"] for one in taken)
                speeds.append(replicas * tokens_of(run) * _STEPS / seconds)
                report(doing="taking steps", tokens_per_s=statistics.median(speeds), rounds=list(speeds))
            peaks = [byte for one in team.ask("peak", seconds=_ANSWER) for byte in one["found"]]
            report(peak_memory_gib=max(peaks) / 2**30)
            team.close()
        finally:
            team.kill()


def _run(workload: str, dtype: str, contestant: str, replicas: int, cache: str, *, small: bool) -> rp.Run:
    """Return the run of all replicas; of the others' it gives the model, the batches and the optimizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = run_of((SMALL if small else FULL)[workload], dtype, device, cache, _HALVINGS)
    run = replace(run, mesh=rp.Mesh(dp=replicas))
    if contestant in RAYPAR:
        run = replace(run, zero=RAYPAR[contestant])
        if device == "cuda":
            run = replace(run, shared_gpu="nccl", resources=rp.Resources(gpus=1 / replicas))
    return run


def main() -> None:
    """Train as one process of a contestant."""
    parser = argparse.ArgumentParser("python -m tests.gpu.first_hour.replicas")
    for name in ("workload", "dtype", "contestant"):
        parser.add_argument(name)
    parser.add_argument("replicas", type=int)
    parser.add_argument("cache")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to the log
    torch.set_num_threads(1)
    run = _run(asked.workload, asked.dtype, asked.contestant, asked.replicas, asked.cache, small=asked.small)
    if asked.contestant in RAYPAR:
        trainer = raypar_trainer(run)
    else:
        if run.device == "cuda":
            allow_shared_gpu()
        trainer = _peer(asked.contestant, run, device_of("cuda" if run.device == "cuda" else "cpu"))
    serve(trainer, ['["train", 0, 1]'], answers)
    serve(trainer, sys.stdin, answers)
    trainer.close()


if __name__ == "__main__":
    try:
        main()
    except NotPossibleError as error:
        sys.exit(str(error))
