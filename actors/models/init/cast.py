"""Cast layers to half precision, after they were initialised in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import storage_id
from raypar.actors.expert_parallel.router import Router

# torch computes them in fp32 for inputs in half precision, if their weights and statistics are in fp32
_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@torch.no_grad()
def cast(layers: Iterable[nn.Module], dtype: torch.dtype, gradients: torch.dtype) -> None:
    """Cast the fp32 parameters and buffers of layers, in place.

    What shares memory before shares it afterwards. Batch norms and instance norms stay in fp32. Other norms of torch
    compute in fp32 inside, whatever the dtype of their weights. A router's bias stays in fp32, because its steps are
    smaller than what half precision can add.

    Args:
        layers: The layers.
        dtype: The new dtype of parameters and buffers.
        gradients: The dtype in which the gradients of the cast parameters are added up: of their ``grad``.
    """
    memory: dict[int, Tensor] = {}  # by storage: its elements in the new dtype
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    kept = {tensor for module in modules if isinstance(module, _BATCH_NORMS) for tensor in _tensors_of(module)}
    kept |= {buffer for module in modules if isinstance(module, Router) for buffer in module.buffers(recurse=False)}
    for tensor in dict.fromkeys(tensor for module in modules for tensor in _tensors_of(module)):
        if tensor.dtype != torch.float32 or tensor in kept:
            continue
        key = storage_id(tensor)
        if key not in memory:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            memory[key] = flat.to(dtype)
        tensor.data = memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor.requires_grad:
            tensor.grad_dtype = gradients


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """Return the parameters and buffers that a module has itself."""
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))
