"""A process of a contestant.

    python -m tests.bench.child CONTESTANT SIZE RANK

It takes its first step, says so, then serves requests until its standard input ends.
"""

from __future__ import annotations

import os
import sys

import torch

from raypar.actors.machine.device import ComputeDevice, Cuda
from tests.bench.contestants import CONTESTANTS, Contestant
from tests.bench.trainer import LocalTrainer, Trainer, serve
from tests.bench.workload import SIZES, Size, run_of


def build(contestant: Contestant, size: Size, rank: int) -> Trainer:
    """The contestant's training, ready for its first step. Only what it needs is imported: launches are measured."""
    settings = contestant.settings if contestant.ours else {}
    run = run_of(size, contestant.layout, **settings)
    if contestant.loop == "raypar":
        from tests.bench.ours import RayparTrainer

        return RayparTrainer(run)
    if contestant.loop == "ray-train":
        from tests.bench.peers.ray_train import RayTrainer

        return RayTrainer(size.name)
    if contestant.loop == "ddp":
        from tests.bench.peers.ddp import ddp

        return ddp(run, _place(size, rank))
    if contestant.loop == "all-to-all":
        from tests.bench.peers.all_to_all import all_to_all

        return all_to_all(run, _place(size, rank))
    if contestant.loop == "fsdp":
        from tests.bench.peers.fsdp import fsdp

        return fsdp(run, _place(size, rank))
    if contestant.loop == "deepspeed":
        from tests.bench.peers.deepspeed_zero import deepspeed_zero

        return deepspeed_zero(run, _place(size, rank), contestant.settings["zero"])
    if contestant.loop == "deepspeed-moe":
        from tests.bench.peers.deepspeed_moe import deepspeed_moe

        return deepspeed_moe(run, _place(size, rank), contestant.settings["capacity"])
    if contestant.loop == "pipelining":
        from tests.bench.peers.pipeline import pipeline

        return pipeline(run, contestant.settings["schedule"], contestant.chunks)
    if contestant.loop == "dtensor":
        from tests.bench.peers.dtensor import divided

        return divided(run, sequence=contestant.settings["sequence_parallel"])
    from tests.bench.peers.whole import whole_model

    place = _place(size, rank)
    step = whole_model(run, rank if contestant.layout == "replicas" else 0, place.device)
    return LocalTrainer(step, place=place)


def _place(size: Size, rank: int) -> ComputeDevice:
    """A GPU for each process of a heat of GPUs."""
    return Cuda(rank) if size.gpus else ComputeDevice()


def main() -> None:
    contestant, size, rank = CONTESTANTS[sys.argv[1]], SIZES[sys.argv[2]], int(sys.argv[3])
    # answers go where the bench reads; whatever else is printed in this process goes to its log
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    trainer = build(contestant, size, rank)
    serve(trainer, ['["train", 0, 1]'], answers)
    serve(trainer, sys.stdin, answers)
    trainer.close()


if __name__ == "__main__":
    main()
