"""torch's FSDP2 (fully_shard) over Gloo, as torchrun starts it: each layer a unit, freed after its forward."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raypar as rp
from raypar.actors.device import Place
from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer


def fsdp(run: rp.Run, place: Place) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    place.enter()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def wrap(module: nn.Module) -> nn.Module:
        for layer in module.children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    step = whole_model(run, dist.get_rank(), place.device, wrap, alone=lambda replica: nullcontext())
    return LocalTrainer(step, dist.destroy_process_group, place)
