"""Experts as one writes them with torch alone: all_to_all_single over Gloo, and DDP for the other weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.moe import MixtureOfExperts
from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer


class _Exchange(torch.autograd.Function):
    """Send rows to ranks; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: list[int], here: list[int]) -> Tensor:
        ctx.splits = there, here
        came = rows.new_empty((sum(here), rows.shape[1]))
        dist.all_to_all_single(came, rows.contiguous(), here, there)
        return came

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        there, here = ctx.splits
        back = gradient.new_empty((sum(there), gradient.shape[1]))
        dist.all_to_all_single(back, gradient.contiguous(), there, here)
        return back, None, None


class Mixture(nn.Module):
    """A rank's share of a layer's experts, (B, S, D) -> (B, S, D): softmax, top-k, nothing dropped."""

    def __init__(self, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.top_k, self.normalises = moe.router.weight, moe.spec.top_k, moe.spec.normalises
        self.each = len(moe.experts) // dist.get_world_size()
        first = self.each * dist.get_rank()
        self.experts = nn.ModuleList(list(moe.experts)[first : first + self.each])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, chosen = F.linear(tokens, self.router).softmax(-1).topk(self.top_k)
        if self.normalises:
            gates = gates / gates.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router)).view(-1, self.each)
        came_counts = torch.empty_like(counts)
        dist.all_to_all_single(came_counts, counts)
        there, here = counts.sum(1).tolist(), came_counts.sum(1).tolist()
        came = _Exchange.apply(tokens[order // self.top_k], there, here)
        owners = torch.arange(self.each).repeat(len(counts)).repeat_interleave(came_counts.flatten())
        by_expert = owners.argsort(stable=True)
        parts = came[by_expert].split(came_counts.sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = _Exchange.apply(made[by_expert.argsort()], here, there)
        weighed = back * gates.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, weighed).view_as(x)


def all_to_all(run: rp.Run, place: ComputeDevice) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    place.enter()
    dist.init_process_group("gloo")

    def wrap(module: nn.Module) -> nn.Module:
        for block in module:
            if isinstance(getattr(block, "mlp", None), MixtureOfExperts):
                block.mlp = Mixture(block.mlp)
        own = [name for name, _ in module.named_parameters() if ".experts." in name]
        for name in own:  # DDP takes the mean over ranks of the others, and these have the sum over all tokens
            module.get_parameter(name).register_hook(lambda gradient: gradient / dist.get_world_size())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, own)
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    return LocalTrainer(whole_model(run, dist.get_rank(), place.device, wrap), dist.destroy_process_group, place)
