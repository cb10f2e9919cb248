"""torch's FSDP2 (fully_shard) over Gloo, on GPUs over NCCL, as torchrun starts it: each layer a unit, freed between."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.tensors import dtype_of
from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer


def fsdp(run: rp.Run, place: ComputeDevice) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Layers compute in the run's dtype, outputs are fp32. With ``run.offload``, weights, gradients and the optimizer are
    in host memory.
    """
    place.enter()
    dist.init_process_group("gloo" if place.kind == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(place.kind, (dist.get_world_size(),))
    compute, reduce = (dtype_of(word) for word in (run.precision.compute, run.precision.reduce))
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=place.kind == "cuda")} if run.offload != "none" else {}

    def casts(output: torch.dtype | None = None) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(compute, reduce, output) if run.precision.is_half else MixedPrecisionPolicy()

    def wrap(module: nn.Module) -> nn.Module:
        layers = list(module.children())
        tied = isinstance(run.model, rp.GPT | rp.Llama) and run.model.tied
        for layer in layers[1:-1] if tied else layers:  # the first and the last share a weight: the root has both
            fully_shard(layer, mesh=mesh, mp_policy=casts(), **policy)
        return fully_shard(module, mesh=mesh, mp_policy=casts(torch.float32), **policy)

    step = whole_model(run, dist.get_rank(), place.device, wrap, alone=lambda replica: nullcontext(), autocast=False)
    return LocalTrainer(step, dist.destroy_process_group, place)
