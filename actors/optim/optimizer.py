"""torch's optimizers over parameters with logical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import unwrap

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.tensors import is_dense

KEPT = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}  # state keys of each parameter


class _AdamW(torch.optim.AdamW):
    # unwrap removes torch's decorators, which would import its compiler (the cost: autograd/torch_private.py)
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class _SGD(torch.optim.SGD):
    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


def build_optimizer(spec: AdamW | SGD, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    """Build the optimizer for some parameters. Weight decay applies only to tensors of 2 or more dims.

    Args:
        spec: Kind and settings of the optimizer.
        parameters: The parameters by logical name.

    Returns:
        The optimizer, or None if there are no parameters.
    """
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    if isinstance(spec, AdamW):
        # The fused kernel assumes that every weight is dense; for one that isn't it would update memory outside the
        # weight. It doesn't support complex weights.
        fused = all(is_dense(p) and p.is_floating_point() for p in parameters.values())
        return _AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
    # Not fused: on CPUs torch 2.13's fused SGD doesn't update half-precision weights, and fails for a parameter that
    # gets its first gradient in a later step.
    return _SGD(groups, lr=spec.lr, momentum=spec.momentum)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def kept_by(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every state tensor that an optimizer keeps: (parameter's logical name, state key, tensor)."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield name, key, value


def keep(optimizer: torch.optim.Optimizer, kind: str, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
    """Replace an optimizer's state by a saved one.

    Args:
        optimizer: The optimizer whose state is replaced.
        kind: "adamw" or "sgd".
        parameters: Its parameters by logical name.
        read: Returns the saved tensor for (logical name, state key), or None if none was saved. A parameter without
            saved tensors starts without state.
    """
    optimizer.state.clear()
    for name, parameter in parameters.items():
        found = {key: read(name, key) for key in KEPT[kind]}
        state = {key: value.to(parameter.device) for key, value in found.items() if value is not None}
        if state:
            optimizer.state[parameter] = state


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each of n gradients: (n,) float32, on the gradients' device."""
    return torch.stack([torch.linalg.vector_norm(gradient).float() for gradient in gradients])
