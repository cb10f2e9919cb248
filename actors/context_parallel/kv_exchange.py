"""Exchange keys and values between the ranks of a context-parallel group, and return their gradients to their owners.

Every rank computes with the keys and values of each rank, its own included. In the backward it computes a gradient for
each of these tensors, and the rank that owns a tensor needs the sum of all ranks' gradients for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle

Contribute = Callable[[int, Tensor], Tensor]  # (owner's rank, owner's tensor) -> this rank's gradient for that tensor

_THERE, _BACK = 0, 1  # tags of tensors and of their gradients


class Carrier(Protocol):
    """Brings the tensor of every rank to all ranks, and gradients back; all tensors have one shape and one dtype."""

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
    """Pass tensors from each rank to the next, and compute with one while the next one is on its way.

    A rank sends size - 1 tensors in ``visit``, and twice as many in ``back``, where their gradients follow them.

    Args:
        group: The context-parallel group.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._next, self._before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        here = own.contiguous()
        for hop in range(self._group.size):
            under_way, coming = ([], here) if hop == self._group.size - 1 else self._shift(here, _THERE, "kv")
            yield (self._group.rank - hop) % self._group.size, here
            for handle in under_way:
                handle.wait()
            here = coming

    def back(self, own: Tensor, contribute: Contribute) -> Tensor:
        """Return the gradient of this rank's tensor.

        The gradient of each tensor goes round the ring behind the tensor. Each rank adds its own part to it and passes
        it on, so that it arrives at the tensor's owner complete.
        """
        under_way: list[Handle] = []
        visits = self.visit(own)
        home = contribute(*next(visits))
        carried: Tensor | None = None
        for source, here in visits:
            made = contribute(source, here)
            if carried is not None:
                self._settle(under_way)
                made += carried
            under_way, carried = self._shift(made, _BACK, "gradient of kv")
        if carried is not None:
            self._settle(under_way)
            home += carried
        return home

    def _shift(self, here: Tensor, tag: int, what: str) -> tuple[list[Handle], Tensor]:
        """Start to send a tensor to the next rank and to receive one from the previous rank.

        Returns:
            The handles of both ops, and the tensor that is being received.
        """
        coming = torch.empty_like(here)
        sent = self._group.send(here, self._next, tag, f"send {what}")
        return [sent, self._group.recv(coming, self._before, tag, f"recv {what}")], coming

    @staticmethod
    def _settle(handles: list[Handle]) -> None:
        for handle in handles:
            handle.wait()


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
        for source, here in self.visit(own):
            made[source] = contribute(source, here)
        total = torch.empty_like(made[0])
        self._group.reduce_scatter(total, made).wait()
        return total
