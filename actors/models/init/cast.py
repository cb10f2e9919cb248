"""Cast layers to half precision, after they were initialised in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import copy_each, storage_id
from raypar.actors.expert_parallel.router import Router
from raypar.actors.tensors import sum_dtype

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


class UsesOnce:
    """A module in half precision whose gradients are added into fp32 without a cast of their own.

    torch adds up the gradients of several uses of a parameter in one backward before it adds the sum to those of
    earlier backwards: in half precision, unless each is cast first. So each parameter may be used once at the most.

    Attributes:
        uses_once: Whether a forward uses every parameter in the module at most once.
    """

    uses_once: bool = False


@torch.no_grad()
def cast(layers: Iterable[nn.Module], dtype: torch.dtype, gradients: torch.dtype) -> None:
    """Cast the fp32 parameters and buffers of layers, in place.

    What shares memory before shares it afterwards. Batch norms and instance norms stay in fp32. Other norms of torch
    compute in fp32 inside, whatever the dtype of their weights. A router's bias stays in fp32, because its steps are
    smaller than what half precision can add.

    Gradients are cast to the dtype of ``grad`` one by one before they are added to it, but not those of modules that
    use every parameter once: these come in half precision, the first of which ``cast_gradients`` casts.

    Args:
        layers: The layers.
        dtype: The new dtype of parameters and buffers.
        gradients: The dtype in which the gradients of the cast parameters are added up: of their ``grad``.
    """
    memory: dict[int, Tensor] = {}  # by storage: its elements in the new dtype
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    kept = {tensor for module in modules if isinstance(module, _BATCH_NORMS) for tensor in _tensors_of(module)}
    kept |= {buffer for module in modules if isinstance(module, Router) for buffer in module.buffers(recurse=False)}
    owners = (module for module in modules if isinstance(module, UsesOnce) and module.uses_once)
    once = {parameter for module in owners for parameter in module.parameters()}
    for tensor in dict.fromkeys(tensor for module in modules for tensor in _tensors_of(module)):
        if tensor.dtype != torch.float32 or tensor in kept:
            continue
        key = storage_id(tensor)
        if key not in memory:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            memory[key] = tensor.detach().as_strided((count,), (1,), 0).to(dtype)
        tensor.data = memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor.requires_grad:
            tensor.grad_dtype = None if tensor in once and gradients != dtype else gradients


def cast_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Cast gradients that are the first ones of their parameters, and still in half precision, by one op.

    Args:
        parameters: Parameters with any gradients, or none.
    """
    first = [one for one in parameters if one.grad is not None and one.grad.dtype != sum_dtype(one)]
    gradients = [one.grad for one in first if one.grad is not None]
    sums = [torch.empty_like(gradient, dtype=sum_dtype(one)) for one, gradient in zip(first, gradients, strict=True)]
    copy_each(sums, gradients)
    for one, total in zip(first, sums, strict=True):
        one.grad = total


@contextmanager
def own_first_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Copy gradients that a backward makes as the first ones of parameters, by one op.

    autograd keeps the tensor that a backward returns, and so its memory, which the next one may write into.

    Args:
        parameters: The parameters.
    """
    without = [one for one in parameters if one.grad is None]
    yield
    made = [(one, one.grad) for one in without if one.grad is not None]
    copies = [torch.empty_like(gradient) for _, gradient in made]
    copy_each(copies, [gradient for _, gradient in made])
    for (parameter, _), copy in zip(made, copies, strict=True):
        parameter.grad = copy


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """Return the parameters and buffers that a module has itself."""
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))
