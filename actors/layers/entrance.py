"""Where what is replicated enters layers that are divided."""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.actors.layers.ops import Move


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
