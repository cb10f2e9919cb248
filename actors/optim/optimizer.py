"""Optimizers over parameters with logical names: torch's AdamW and SGD, Muon, and any with weights off the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.machine.offload_storage import PORTION, DeviceStorage, OffloadStorage
from raypar.actors.models.tiles.tile_names import untiled
from raypar.actors.optim.groups import Rule, rule_of
from raypar.actors.optim.muon.matrix_exchange import DividedMatrices
from raypar.actors.optim.muon.muon_with_adamw import MuonWithAdamW, Optimizer
from raypar.actors.portions import portions
from raypar.actors.sharding import Shape, Shard
from raypar.actors.specs.optim import SGD, AdamW, AnyOptimizer, Muon
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.tensors import is_dense, nbytes

# State keys of a parameter, by optimizer: see ``Rule.kind``.
STATE_KEYS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "muon": ("momentum_buffer",)}
_UPDATERS = {"adamw": ("adamw",), "sgd": ("sgd",), "muon": ("muon", "adamw")}  # by kind of a run's optimizer


class _AdamW(torch.optim.AdamW):
    # unwrap removes torch's decorators, which would import its compiler (the cost: autograd/torch_private.py)
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class _SGD(torch.optim.SGD):
    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


_WHOLE = DividedMatrices(ShardedGradients({}, {}, None, watched=False))
_ON_DEVICE = DeviceStorage(torch.device("cpu"))  # of any device: an optimizer allocates nothing in it


def build_optimizer(
    spec: AnyOptimizer,
    parameters: Mapping[str, nn.Parameter],
    divided: DividedMatrices = _WHOLE,
    parts: Mapping[str, Shard] = MappingProxyType({}),
    storage: OffloadStorage = _ON_DEVICE,
) -> Optimizer | None:
    """Build the optimizer for some parameters. Those with the same ``Rule`` are one parameter group.

    Args:
        spec: Kind and settings of the optimizer.
        parameters: The parameters by logical name.
        divided: How several actors divide the parameters; by default all are whole here.
        parts: The spans of weights that parameters are, by logical name.
        storage: Storage of the parameters, their gradients and states.

    Returns:
        The optimizer, or None if there are no parameters, here or on other replicas.
    """
    shapes = {name: parts[name].whole if name in parts else tuple(p.shape) for name, p in parameters.items()}
    alike = defaultdict[Rule, list[nn.Parameter]](list)
    for name, parameter in parameters.items():
        alike[rule_of(spec, untiled(name), len(shapes[name]))].append(parameter)
    if not alike and not divided.cuts:
        return None
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for rule, members in alike.items():
        lr = spec.lr * rule.rate
        groups[rule.kind].append({"params": members, "lr": lr, "rate": rule.rate, "weight_decay": rule.weight_decay})
    if isinstance(spec, AdamW):
        return _stored(_adamw(groups["adamw"], spec.betas, spec.eps), storage)
    if isinstance(spec, Muon):
        others = None
        if groups["adamw"]:
            others = _stored(_adamw(groups["adamw"], spec.adamw_betas, spec.adamw_eps), storage)
        names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        exchanges = divided.exchanges(shapes, parts, partial(_is_of_muon, spec))
        return MuonWithAdamW(spec, groups["muon"], others, names, exchanges, storage)
    # Not fused: on CPUs torch 2.13's fused SGD doesn't update half-precision weights, and fails for a parameter that
    # gets its first gradient in a later step.
    return _stored(_SGD(groups["sgd"], momentum=spec.momentum), storage)


def _stored(optimizer: Optimizer, storage: OffloadStorage) -> Optimizer:
    """Return an optimizer that updates each weight independently, for weights in a storage."""
    return OffloadedOptimizer(optimizer, storage) if storage.is_off_device else optimizer


def _is_of_muon(spec: Muon, name: str, shape: Shape) -> bool:
    return rule_of(spec, untiled(name), len(shape)).kind == "muon"


def _adamw(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    # The fused kernel assumes that every weight is dense; for one that isn't it would update memory outside the
    # weight. It doesn't support complex weights.
    fused = all(is_dense(p) and p.is_floating_point() for group in groups for p in group["params"])
    return _AdamW(groups, betas=betas, eps=eps, fused=fused)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the run's learning rate, from the next update on, times the factor of each parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every state tensor of an optimizer: (parameter's logical name, state key, tensor)."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield name, key, value


def load_state(
    optimizer: Optimizer, kind: str, parameters: Mapping[str, nn.Parameter], storage: OffloadStorage, read: Read
) -> None:
    """Replace an optimizer's state by a saved one.

    Args:
        optimizer: The optimizer whose state is replaced.
        kind: Kind of the run's optimizer: "adamw", "sgd" or "muon".
        parameters: Its parameters by logical name.
        storage: Storage of the state.
        read: Returns the saved tensor for (logical name, state key), or None if none was saved. A parameter without
            saved tensors starts without state.
    """
    keys = [key for updater in _UPDATERS[kind] for key in STATE_KEYS[updater]]
    for name, parameter in parameters.items():
        before, state = optimizer.state.pop(parameter, {}), {}
        for key in keys:
            if (value := read(name, key)) is not None:
                state[key] = value.to(parameter.device) if key == "step" else laid_out(value, parameter)
                if storage.is_off_device and key != "step":
                    state[key] = storage.moved(state[key], before.get(key))
        if state:
            optimizer.state[parameter] = state


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a value with dtype, device and strides of a parameter; torch's fused kernels need equal strides."""
    if value.stride() == parameter.stride():
        return value.to(parameter)
    return torch.empty_like(parameter).copy_(value)


class OffloadedOptimizer:
    """Updates weights in portions, so that only one portion's weights, gradients and states are mapped at a time.

    Optimizers update each weight independently, so the results have the same bits. The states that the optimizer
    creates in a weight's first update are moved to the storage.

    Args:
        optimizer: The optimizer of all weights.
        storage: Storage of weights, gradients and states.

    Attributes:
        param_groups: All parameter groups.
        state: The state of each parameter.

    Source: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training".
    """

    def __init__(self, optimizer: Optimizer, storage: OffloadStorage) -> None:
        self._optimizer, self._storage = optimizer, storage
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.state: defaultdict[Tensor, Any] = optimizer.state

    def step(self) -> None:
        """Update every weight that has a gradient."""
        members = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = []
            for group, params in zip(self.param_groups, members, strict=True):
                for portion in portions((one for one in params if one.grad is not None), nbytes, PORTION):
                    group["params"] = portion
                    self._update(portion)
                group["params"] = []
        finally:
            for group, params in zip(self.param_groups, members, strict=True):
                group["params"] = params

    def _update(self, weights: Sequence[nn.Parameter]) -> None:
        states = [value for weight in weights for value in self.state.get(weight, {}).values() if _is_large(value)]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        with self._storage.accessible([*weights, *states], writes=True), self._storage.accessible(gradients):
            self._optimizer.step()
        for weight in weights:
            state = self.state.get(weight, {})
            for key, value in state.items():
                if _is_large(value):
                    state[key] = self._storage.moved(value)


def reserve_states(
    storage: OffloadStorage, spec: AnyOptimizer, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, Shape]
) -> None:
    """Reserve space for the states that an optimizer creates in its first step.

    Args:
        storage: Storage of the states.
        spec: Kind and settings of the optimizer.
        parameters: The parameters by logical name.
        shapes: The shapes of the weights that they are or of which they are spans, by logical name.

    Raises:
        OffloadError: There is not enough space.
    """
    if isinstance(spec, SGD) and not spec.momentum:
        return
    storage.reserve(
        nbytes(parameter)
        for name, parameter in parameters.items()
        for key in STATE_KEYS[rule_of(spec, untiled(name), len(shapes[name])).kind]
        if key != "step"
    )


def _is_large(value: object) -> bool:
    """Return whether a value of a weight's state is a tensor with dims, and not a number."""
    return isinstance(value, Tensor) and value.dim() > 0
