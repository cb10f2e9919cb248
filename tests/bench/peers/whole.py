"""The loop over a whole model: in one process, or in a replica that DistributedDataParallel wraps."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import raypar as rp
from raypar.actors.models.base import Model
from raypar.actors.optim.optimizer import build_optimizer
from raypar.actors.tensors import dtype_of
from tests.bench.trainer import Step
from tests.bench.workload import batches_of, model_of

Objective = Callable[[Tensor, Tensor], Tensor]  # tokens (B, S) and labels (B, S) -> the mean loss, a scalar


def whole_model(
    run: rp.Run,
    dp: int,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    alone: Callable[[Any], AbstractContextManager[object]] = lambda replica: replica.no_sync(),
    *,
    compiler: str | None = None,
    autocast: bool = True,
) -> Step:
    """Training steps of one replica, the ``dp``-th: gradients accumulated over the microbatches, clipped, AdamW.

    ``wrap`` makes the model a replica of several, which average their gradients in the last microbatch's backward;
    ``alone`` gives the context of the others. ``compiler`` is the backend of torch.compile for forward and loss, None
    does not compile; see ``training_loop`` for ``autocast``.
    """
    model = model_of(run)
    module = nn.Sequential(*_tied(model, model.materialize(range(len(model.names)), run.seed)))
    _cast(module, run.precision)
    module = module.to(device)
    replica: Any = module if wrap is None else wrap(module)

    def objective(tokens: Tensor, labels: Tensor) -> Tensor:
        return model.loss((replica(tokens),), (labels,))

    if compiler is not None:
        objective = torch.compile(objective, backend=compiler)
    early = nullcontext if wrap is None else lambda: alone(replica)
    return training_loop(run, dp, device, module, objective, early, autocast=autocast)


def training_loop(
    run: rp.Run,
    dp: int,
    device: torch.device,
    module: nn.Module,
    objective: Objective,
    early: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    autocast: bool = True,
) -> Step:
    """The loop of a user of torch, in the run's precision: autocast for half precision, and a GradScaler for fp16.

    ``early`` gives the context of all microbatches but the last. ``autocast`` is False where the module casts its
    weights itself.
    """
    learning = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimizer = build_optimizer(run.optim, learning)
    assert optimizer is not None, "a model has parameters"
    batches, precision = batches_of(run), run.precision
    casts = autocast and precision.is_half and precision.is_mixed
    scaler = torch.amp.GradScaler(device.type, enabled=precision.compute == "fp16")

    def moved(value: Tensor) -> Tensor:
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

    def step(number: int) -> float:
        optimizer.zero_grad()
        losses = []
        for microbatch in range(run.microbatches):
            with early() if microbatch < run.microbatches - 1 else nullcontext():
                tokens = moved(batches.tokens("train", number, microbatch, dp))
                labels = moved(batches.labels("train", number, microbatch, dp))
                with torch.autocast(device.type, dtype_of(precision.compute)) if casts else nullcontext():
                    loss = objective(tokens, labels)
                scaler.scale(loss / run.microbatches).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(learning.values(), run.clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        return sum(loss.item() for loss in losses) / run.microbatches  # read at the end: on a GPU that waits

    return step


def _tied(model: Model, layers: list[nn.Module]) -> list[nn.Module]:
    """Make each pair of tied weights one parameter."""
    named = dict(zip(model.names, layers, strict=True))
    for home, copy in model.ties:
        (its_layer, its_name), (layer, name) = (path.split(".", 1) for path in (home, copy))
        owner, _, last = name.rpartition(".")
        setattr(named[layer].get_submodule(owner), last, named[its_layer].get_parameter(its_name))
    return layers


def _cast(module: nn.Module, precision: rp.Precision) -> None:
    """Cast frozen weights to the dtype that the model computes in, and all weights if their masters have it."""
    for parameter in module.parameters():
        if precision.is_half and not (parameter.requires_grad and precision.is_mixed):
            parameter.data = parameter.data.to(dtype_of(precision.compute))
