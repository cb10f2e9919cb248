"""torch's optimizers over named parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import unwrap

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.tensors import is_dense

KEPT = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}  # for each parameter with a gradient


class _AdamW(torch.optim.AdamW):
    # the decorators of these methods would import torch's compiler, which is not used here: 3 s and 80 MiB
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class _SGD(torch.optim.SGD):
    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


def build_optimizer(spec: AdamW | SGD, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer for parameters by logical name; None if there are none. Only tensors of 2 dims or more decay."""
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    if isinstance(spec, AdamW):
        # the fused one takes every weight for dense, and updates other memory where one isn't; it has no complex ones
        fused = all(is_dense(p) and p.is_floating_point() for p in parameters.values())
        return _AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
    # not fused: on CPUs torch 2.13's fused SGD leaves half-precision weights as they are, and fails for a parameter
    # that gets its first gradient in a later step
    return _SGD(groups, lr=spec.lr, momentum=spec.momentum)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def kept_by(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor]]:
    """Everything that it keeps for its parameters: the parameter's name, what it is, and the tensor itself."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield name, key, value


def keep(optimizer: torch.optim.Optimizer, kind: str, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
    """Go on with what was kept, as far as there is any, and with nothing else."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        found = {key: read(name, key) for key in KEPT[kind]}
        state = {key: value.to(parameter.device) for key, value in found.items() if value is not None}
        if state:
            optimizer.state[parameter] = state


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each gradient (n,) in fp32, where they are."""
    return torch.stack([torch.linalg.vector_norm(gradient).float() for gradient in gradients])
