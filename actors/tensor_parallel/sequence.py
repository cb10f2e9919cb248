"""Inputs of sharded modules: copied once for several layers, or gathered along the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raypar.actors.autograd.recompute import SelectiveRecompute
from raypar.actors.autograd.torch_private import num_writes
from raypar.actors.collective.autograd import Move, all_gather
from raypar.actors.collective.group import Group


class SharedCopy:
    """Copy a tensor to a group, once for all layers that take the same tensor in succession.

    The layers' gradients are added up before they are summed over the group, so that one message serves all of them
    (the projections to queries, keys and values, for example). The last tensor is kept until another one comes.

    Args:
        copy: ``copy_to`` the group.
    """

    def __init__(self, copy: Move) -> None:
        self._copy = copy
        self._last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the copy of a tensor. A tensor that was written to since its last copy is copied again."""
        state = num_writes(x), x.requires_grad, torch.is_grad_enabled()
        if self._last is None or self._last[0] is not x or self._last[1] != state:
            self._last = x, state, self._copy(x)
        return self._last[2]


class GatheredView(NamedTuple):
    """A view of the gathered input, as autograd saves it.

    Attributes:
        part: This member's part of the input.
        shape: The view's shape.
        stride: The view's strides.
        offset: The view's storage offset in the gathered input.
    """

    part: Tensor
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


class Gathering(nn.Module, SelectiveRecompute):
    """Gathers the input of the module that it is attached to, along one dim.

    With selective recomputation only the member's part is saved, and the backward gathers it again (Korthikanti et
    al. 2022, section 4.2.2). It is a child of its module, without parameters, so that a stage finds it.

    Args:
        group: The members.
        dim: The dim along which the input is sharded.
    """

    def __init__(self, group: Group, dim: int) -> None:
        super().__init__()
        self._group, self._dim = group, dim
        self._open: list[ExitStack] = []  # of the module's running calls, which may be nested

    def attach(self, module: nn.Module) -> None:
        """Gather the first input of every call of a module."""
        module.add_module("gathering", self)
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        part, stack = inputs[0], ExitStack()
        self._open.append(stack)
        whole = all_gather(part, self._group, self._dim)
        if self.recomputes and torch.is_grad_enabled():
            stack.enter_context(saved_tensors_hooks(*self._hooks(part.detach(), whole)))
        return whole, *inputs[1:]

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._open:
            self._open.pop().close()

    def _hooks(self, part: Tensor, whole: Tensor) -> tuple[Any, Any]:
        """Return autograd's pack hook, which saves the part, and its unpack hook, which gathers the input again.

        The input is gathered once in the backward, and kept until the last view of it has been unpacked.

        Args:
            part: This member's part of the input.
            whole: The gathered input.
        """
        memory, wanted = whole.untyped_storage().data_ptr(), 0
        gathered: Tensor | None = None

        def pack(tensor: Tensor) -> Tensor | GatheredView:
            nonlocal wanted
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            wanted += 1
            return GatheredView(part, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Tensor | GatheredView) -> Tensor:
            nonlocal gathered, wanted
            if isinstance(saved, Tensor):
                return saved
            again = all_gather(part, self._group, self._dim) if gathered is None else gathered
            wanted -= 1
            gathered = again if wanted else None
            return again.as_strided(saved.shape, saved.stride, saved.offset)

        return pack, unpack
