"""A module that is given the whole of what its group has in parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raypar.actors.collective.autograd import Move, all_gather
from raypar.actors.collective.group import Group


class Entrance:
    """Gives layers that are given the same tensor, one after the other, the same copy of it: their gradients are added
    up here before they are summed over the group, in one message (those of queries, keys and values, say).

    The last tensor is kept until another one comes.

    enter  ``copy_to`` the group
    """

    def __init__(self, enter: Move) -> None:
        self._enter = enter
        self._last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        state = x._version, x.requires_grad, torch.is_grad_enabled()  # of a tensor that was written into, another copy
        if self._last is None or self._last[0] is not x or self._last[1] != state:
            self._last = x, state, self._enter(x)
        return self._last[2]


class Kept(NamedTuple):
    """Stands for a view of the whole among what is kept for the backward."""

    part: Tensor
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


class Gathering:
    """Gathers a module's input along a dim before it is called; the module has it as ``gathering``.

    With ``again`` only the own part is kept, and the backward gathers it anew (Korthikanti et al. 2022, section 4.2.2).
    """

    def __init__(self, module: nn.Module, group: Group, dim: int) -> None:
        self._group, self._dim = group, dim
        self._open: list[ExitStack] = []  # calls under way: of a module that is entered again before it has returned
        self.again = False
        vars(module)["gathering"] = self
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        part, stack = inputs[0], ExitStack()
        self._open.append(stack)
        whole = all_gather(part, self._group, self._dim)
        if self.again and torch.is_grad_enabled():
            stack.enter_context(saved_tensors_hooks(*self._hooks(part.detach(), whole)))
        return whole, *inputs[1:]

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._open:
            self._open.pop().close()

    def _hooks(self, part: Tensor, whole: Tensor) -> tuple[Any, Any]:
        """What is kept instead of a tensor, and the tensor again; the whole stays for as long as somebody wants it."""
        memory, wanted = whole.untyped_storage().data_ptr(), 0
        made: Tensor | None = None

        def pack(tensor: Tensor) -> Tensor | Kept:
            nonlocal wanted
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            wanted += 1
            return Kept(part, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: Tensor | Kept) -> Tensor:
            nonlocal made, wanted
            if isinstance(kept, Tensor):
                return kept
            here = all_gather(part, self._group, self._dim) if made is None else made
            wanted -= 1
            made = here if wanted else None
            return here.as_strided(kept.shape, kept.stride, kept.offset)

        return pack, unpack
