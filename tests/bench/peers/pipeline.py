"""torch.distributed.pipelining over Gloo: GPipe, 1F1B, Interleaved1F1B, and its zero-bubble schedules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import raypar as rp
from raypar.actors.optim.optimizer import build_optimizer
from tests.bench.trainer import LocalTrainer
from tests.bench.workload import batches_of, model_of

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-interleaved": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
_V = ("zb-v", "dualpipe-v")


def pipeline(run: rp.Run, schedule: str, chunks: int) -> LocalTrainer:
    """One of two ranks, which the environment tells of; it holds every second stage, or those of a V."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = model_of(run)
    parts = model.stages("even", ranks * chunks)
    stages: list[Any] = []
    named: dict[str, nn.Parameter] = {}
    for number in (rank, len(parts) - 1 - rank) if schedule in _V else range(rank, len(parts), ranks):
        module = nn.Sequential(*model.materialize(parts[number], run.seed))
        named |= {f"{number}.{name}": parameter for name, parameter in module.named_parameters()}
        stages.append(PipelineStage(module, number, len(parts), torch.device("cpu")))
    optimizer = build_optimizer(run.optim, named)
    assert optimizer is not None, "a model has parameters"
    batches = batches_of(run)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return model.loss((logits,), (labels,))

    held = stages if chunks > 1 else stages[0]
    pipe: Any = _SCHEDULES[schedule](held, n_microbatches=run.microbatches, loss_fn=loss_fn)
    is_last = any(stage.is_last for stage in stages)

    def step(number: int) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        every = range(run.microbatches)
        tokens, told = (), {}
        if rank == 0:
            tokens = (torch.cat([batches.tokens("train", number, microbatch) for microbatch in every]),)
        if is_last:
            labels = torch.cat([batches.labels("train", number, microbatch) for microbatch in every])
            told = {"target": labels, "losses": losses}
        pipe.step(*tokens, **told)
        _clip(list(named.values()), run.clip or math.inf)
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return LocalTrainer(step, dist.destroy_process_group)


def _clip(parameters: list[nn.Parameter], largest: float) -> None:
    """Clip by the norm over both ranks' gradients: torch's clip_grad_norm_ sees this rank's only."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(parameters, largest, total.sqrt())
