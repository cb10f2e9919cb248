"""DeepSpeed-MoE's layer over Gloo: each rank has a share of the experts, whose rows are padded to a capacity."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.moe import MixtureOfExperts
from tests.bench.peers.deepspeed_engine import deepspeed_engine
from tests.bench.trainer import LocalTrainer


class _Output(nn.Module):
    """DeepSpeed's layer, of which a block gets the output; the auxiliary loss and the counts are left out."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def deepspeed_moe(run: rp.Run, place: ComputeDevice, capacity: float | None) -> LocalTrainer:
    """One of the ranks that the environment tells of. An expert takes ``capacity`` times its even share.

    None drops nothing: then an expert takes as much as the busiest one of a microbatch has.
    """

    def change(module: nn.Module) -> None:
        for block in module:
            if isinstance(getattr(block, "mlp", None), MixtureOfExperts):
                block.mlp = _Output(_layer_of(block.mlp, capacity))

    return deepspeed_engine(run, place, 0, change)


def _layer_of(moe: MixtureOfExperts, capacity: float | None) -> Any:
    """DeepSpeed's layer with a rank's share of the experts of ours, the same router, and their weights."""
    from deepspeed.moe.layer import MoE as Layer

    ranks, count = dist.get_world_size(), len(moe.experts)
    hidden = moe.router.weight.shape[1]
    layer = Layer(
        hidden,
        copy.deepcopy(moe.experts[0]),
        num_experts=count,
        ep_size=ranks,
        k=moe.spec.top_k,
        capacity_factor=capacity or 1.0,
        drop_tokens=capacity is not None,
        use_rts=False,
        top2_2nd_expert_sampling=False,  # the second expert is the second best, as ours
    )
    first = count // ranks * dist.get_rank()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(moe.router.weight)
        for place, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.load_state_dict(moe.experts[first + place].state_dict())
    return layer
