"""torch's optimizers over named parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raypar.actors.specs import SGD, AdamW


def build_optimizer(spec: AdamW | SGD, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer for parameters by logical name; None if there are none. Only tensors of 2 dims or more decay."""
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    if isinstance(spec, AdamW):
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    # not fused: on CPUs torch 2.13's fused SGD leaves half-precision weights as they are, and fails for a parameter
    # that gets its first gradient in a later step
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(parameter: nn.Parameter) -> Tensor:
    """The 2-norm of a parameter's gradient (0 without one), a scalar."""
    if parameter.grad is None:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(parameter.grad)
    return norm
