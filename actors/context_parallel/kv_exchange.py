"""Exchange keys and values between the ranks of a context-parallel group, and return their gradients to their owners.

Every rank computes with the keys and values of each rank, including itself. In the backward it computes a gradient for
each of these tensors, and the rank that owns a tensor needs the sum of all ranks' gradients for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle, wait_all

Contribute = Callable[[int, Tensor], Tensor]  # (owner's rank, owner's tensor) -> this rank's gradient for that tensor

_TENSOR_TAG, _GRADIENT_TAG = 0, 1  # tags of tensors and of their gradients


class Carrier(Protocol):
    """Sends the tensor of every rank to all ranks, and gradients back. All tensors have one shape and one dtype."""

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor of every rank, this rank's own first.

        Args:
            own: This rank's tensor.

        Yields:
            The owner's rank, and its tensor, which is valid until the next one is requested.
        """

    def back(self, own: Tensor, contribute: Contribute) -> Tensor:
        """Return the gradient of this rank's tensor, summed over the gradients that all ranks compute for it.

        Args:
            own: This rank's tensor.
            contribute: Computes this rank's gradient for the tensor of one rank. It is called once for every rank.
        """


class Ring:
    """Pass tensors from each rank to the next, and compute with one while the next one is received.

    A rank sends size - 1 tensors in ``visit``, and twice as many in ``back``, where their gradients follow them.

    Args:
        group: The context-parallel group.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._next, self._before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor of every rank; while it is used, the next one is received."""
        current = own.contiguous()
        for hop in range(self._group.size):
            handles, incoming = (
                ([], current) if hop == self._group.size - 1 else self._shift(current, _TENSOR_TAG, "kv")
            )
            yield (self._group.rank - hop) % self._group.size, current
            wait_all(handles)
            current = incoming

    def back(self, own: Tensor, contribute: Contribute) -> Tensor:
        """Return the gradient of this rank's tensor.

        The gradient of each tensor follows the tensor round the ring. Each rank adds its part and sends it on; the
        owner receives the sum of the other ranks and adds its part.
        """
        handles: list[Handle] = []
        visits = self.visit(own)
        own_total = contribute(*next(visits))
        received: Tensor | None = None
        for source, current in visits:
            made = contribute(source, current)
            if received is not None:
                wait_all(handles)
                made += received
            handles, received = self._shift(made, _GRADIENT_TAG, "gradient of kv")
        if received is not None:
            wait_all(handles)
            own_total += received
        return own_total

    def _shift(self, current: Tensor, tag: int, what: str) -> tuple[list[Handle], Tensor]:
        """Start to send a tensor to the next rank and to receive one from the previous rank.

        Returns:
            The handles of both ops, and the tensor that is being received.
        """
        incoming = torch.empty_like(current)
        sent = self._group.send(current, self._next, tag, f"send {what}")
        return [sent, self._group.recv(incoming, self._before, tag, f"recv {what}")], incoming


class AllGather:
    """Gather the tensors of all ranks with one all_gather, and sum their gradients with one reduce_scatter.

    Args:
        group: The context-parallel group.

    Source: Llama 3 team 2024, "The Llama 3 Herd of Models", section 3.3.2.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        every = own.new_empty((self._group.size, *own.shape))
        self._group.all_gather(every, own.contiguous()).wait()
        for hop in range(self._group.size):
            source = (self._group.rank - hop) % self._group.size
            yield source, every[source]

    def back(self, own: Tensor, contribute: Contribute) -> Tensor:
        made = own.new_empty((self._group.size, *own.shape))
        for source, current in self.visit(own):
            made[source] = contribute(source, current)
        total = torch.empty_like(made[0])
        self._group.reduce_scatter(total, made).wait()
        return total
