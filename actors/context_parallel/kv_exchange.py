"""How every member of a group gets to see what each of them has, and how what they make of it comes home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle

Contribute = Callable[[int, Tensor], Tensor]  # (whose, what that member has) -> a gradient for it

_THERE, _BACK = 0, 1  # tags


class Carrier(Protocol):
    """Brings the members' tensors, all of one shape, to each of them."""

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose, tensor) for every member, the own one first. A tensor is good until the next one is asked for."""

    def back(self, own: Tensor, contribute: Contribute) -> Tensor:
        """The sum over the members of their contributions to ``own``; each is asked once for every member."""


class Ring:
    """Tensors go from neighbour to neighbour, each while the one before is worked on (Liu et al. 2023).

    A member sends size - 1 tensors in a visit, and in ``back`` twice as many: the contributions travel along.
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
        """The contributions for others are handed on, each with what was made of it so far; the own one stays."""
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
        """To the next member, and from the one before."""
        coming = torch.empty_like(here)
        sent = self._group.send(here, self._next, tag, f"send {what}")
        return [sent, self._group.recv(coming, self._before, tag, f"recv {what}")], coming

    @staticmethod
    def _settle(handles: list[Handle]) -> None:
        for handle in handles:
            handle.wait()


class AllGather:
    """All tensors at once, and all contributions back at once."""

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
