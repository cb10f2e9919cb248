"""torch.nn.parallel.DistributedDataParallel over Gloo, on GPUs over NCCL, as torchrun starts it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer


def ddp(run: rp.Run, place: ComputeDevice) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    place.enter()
    dist.init_process_group("nccl" if place.kind == "cuda" else "gloo")

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    return LocalTrainer(whole_model(run, dist.get_rank(), place.device, wrap), dist.destroy_process_group, place)
