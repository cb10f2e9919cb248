"""The loop over a whole model: in one process, or in a replica that DistributedDataParallel wraps."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import raypar as rp
from raypar.actors.optim.optimizer import build_optimizer
from tests.bench.trainer import Step
from tests.bench.workload import batches_of, model_of


def whole_model(
    run: rp.Run,
    dp: int,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    alone: Callable[[Any], AbstractContextManager[object]] = lambda replica: replica.no_sync(),
) -> Step:
    """Training steps of one replica, the ``dp``-th: gradients accumulated over the microbatches, clipped, AdamW.

    ``wrap`` makes the model a replica of several, which average their gradients in the last microbatch's backward;
    ``alone`` gives the context of the others.
    """
    model = model_of(run)
    module = nn.Sequential(*model.materialize(range(len(model.names)), run.seed)).to(device)
    replica: Any = module if wrap is None else wrap(module)
    optimizer = build_optimizer(run.optim, dict(module.named_parameters()))
    assert optimizer is not None, "a model has parameters"
    batches = batches_of(run)

    def step(number: int) -> float:
        optimizer.zero_grad()
        losses = []
        for microbatch in range(run.microbatches):
            early = wrap is not None and microbatch < run.microbatches - 1
            with alone(replica) if early else nullcontext():
                tokens, labels = batches.train(number, microbatch, dp)
                loss = model.loss((replica(tokens.to(device)),), (labels.to(device),))
                (loss / run.microbatches).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(module.parameters(), run.clip or math.inf)
        optimizer.step()
        return sum(loss.item() for loss in losses) / run.microbatches  # read at the end: on a GPU that waits

    return step
