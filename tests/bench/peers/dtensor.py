"""torch.distributed.tensor.parallel over Gloo: parallelize_module with torch's own styles and loss_parallel."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import raypar as rp
from raypar.actors.optim.optimizer import build_optimizer
from tests.bench.trainer import LocalTrainer
from tests.bench.workload import batches_of, model_of


def divided(run: rp.Run, *, sequence: bool) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    dist.init_process_group("gloo")
    model = model_of(run)
    module = nn.Sequential(*model.materialize(range(len(model.names)), run.seed))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, _plan(len(model.names), sequence=sequence))
    named = dict(module.named_parameters())
    # an op over many tensors takes DTensors or others, not both
    kinds = [{name: p for name, p in named.items() if isinstance(p, DTensor) is kind} for kind in (True, False)]
    optimizers = [optimizer for kind in kinds if (optimizer := build_optimizer(run.optim, kind)) is not None]
    batches = batches_of(run)

    def step(number: int) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        for microbatch in range(run.microbatches):
            tokens, labels = batches.tokens("train", number, microbatch), batches.labels("train", number, microbatch)
            with loss_parallel():
                loss = model.loss((module(tokens),), (labels,))
                (loss / run.microbatches).backward()
            losses.append(_whole(loss.detach()))
        _clip([list(kind.values()) for kind in kinds if kind], run.clip or math.inf)
        for optimizer in optimizers:
            optimizer.step()
        return sum(loss.item() for loss in losses) / run.microbatches

    return LocalTrainer(step, dist.destroy_process_group)


def _plan(layers: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    """A style for every module that is divided; the first layer is the embedding, the last one the head.

    Between the blocks is what every rank has, or its part along the sequence.
    """
    between = Shard(1) if sequence else Replicate()
    last = layers - 1
    plan: dict[str, ParallelStyle] = {
        "0.tokens": RowwiseParallel(input_layouts=Replicate()),
        f"{last}.out": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["0"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
        plan[f"{last}.norm"] = SequenceParallel()
    for block in range(1, last):
        entered = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())  # once for q, k and v
        columns = (f"{block}.attn.q", f"{block}.attn.k", f"{block}.attn.v", f"{block}.mlp.up")
        plan |= {f"{block}.attn": entered, f"{block}.mlp": entered}
        plan |= {name: ColwiseParallel() for name in columns}
        plan |= {f"{block}.{row}": RowwiseParallel(output_layouts=between) for row in ("attn.out", "mlp.down")}
        if sequence:
            plan |= {f"{block}.norm1": SequenceParallel(), f"{block}.norm2": SequenceParallel()}
    return plan


def _clip(kinds: list[list[nn.Parameter]], largest: float) -> None:
    """Clip by the norm over DTensors and tensors: torch's clip_grad_norm_ takes one of them."""
    norms = [
        _whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])) for parameters in kinds
    ]
    total = torch.stack(norms).square().sum().sqrt()
    for parameters in kinds:
        nn.utils.clip_grads_with_norm_(parameters, largest, total)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
