"""torch.distributed.pipelining over Gloo: GPipe, 1F1B and Interleaved1F1B."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import raypar as rp
from raypar.actors.optim.optimizer import build_optimizer
from tests.bench.trainer import LocalTrainer
from tests.bench.workload import batches_of, model_of


def pipeline(run: rp.Run, schedule: str, chunks: int) -> LocalTrainer:
    """One of the two ranks that the environment tells of; rank r holds every stage s with s % 2 == r."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = model_of(run)
    parts = model.stages("even", ranks * chunks)
    stages: list[Any] = []
    named: dict[str, nn.Parameter] = {}
    for number in range(rank, len(parts), ranks):
        module = nn.Sequential(*model.materialize(parts[number], run.seed))
        named |= {f"{number}.{name}": parameter for name, parameter in module.named_parameters()}
        stages.append(PipelineStage(module, number, len(parts), torch.device("cpu")))
    optimizer = build_optimizer(run.optim, named)
    assert optimizer is not None, "a model has parameters"
    batches = batches_of(run)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return model.loss((logits,), (labels,))

    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    held = stages if chunks > 1 else stages[0]
    pipe: Any = schedules[schedule](held, n_microbatches=run.microbatches, loss_fn=loss_fn)

    def step(number: int) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        every = range(run.microbatches)
        if rank == 0:
            pipe.step(torch.cat([batches.train_tokens(number, microbatch) for microbatch in every]))
        else:
            labels = torch.cat([batches.train_labels(number, microbatch) for microbatch in every])
            pipe.step(target=labels, losses=losses)
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
