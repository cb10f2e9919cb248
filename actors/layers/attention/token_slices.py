"""Attention over a sequence that is computed in slices: each attends to the keys and values of the slices before it.

Shapes: B microbatch, S tokens of a slice, T tokens up to its end, N query heads, K heads of keys and values, d width of
a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from raypar.actors.autograd.backward import GraphEnd
from raypar.actors.sharding import Pieces

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (B, N, S, d), keys and values (B, K, T, d)


class AttentionCore(Protocol):
    """The attention core of a layer.

    Attributes:
        recomputes: Whether its backward recomputes it, and no activations are kept.
        training: Whether its layer is trained.
    """

    recomputes: bool
    training: bool

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Compute the attention of the last S tokens over all T keys, (B, N, S, d)."""


@dataclass(frozen=True)
class Slice:
    """A slice of a microbatch.

    Attributes:
        sequence: The step, the microbatch in it and the replica.
        index: Its index in the microbatch, from 0.
        count: Number of slices of the microbatch.
    """

    sequence: tuple[int, int, int]
    index: int
    count: int

    @property
    def tokens(self) -> Pieces:
        """Its piece of the sequence."""
        return Pieces.at(self.index, self.count)

    def start(self, length: int) -> int:
        """Return the position of its first token, if it has ``length`` tokens."""
        return self.index * length


class TokenSlices:
    """The present slice, and the keys and values of the slices before; shared by the layers of an actor.

    Attributes:
        count: Number of slices of a microbatch.
        replicas: Number of replicas; microbatch numbers alternate between them.
        now: The present slice; None for values that are no batch, and if microbatches are not cut.
    """

    def __init__(self) -> None:
        self.count, self.replicas = 1, 1
        self.now: Slice | None = None
        self._kept: dict[tuple[tuple[int, int, int], AttentionCore], SlicedKeysValues] = {}

    def begin(self) -> None:
        """Begin a step: free the keys and values of an interrupted one."""
        self._kept.clear()

    def turn_to(self, step: int, number: int, *, of_batch: bool) -> None:
        """Set the present slice.

        Args:
            step: The step.
            number: The slice's number in the whole step, over all replicas.
            of_batch: Whether it is of a batch; else the values are whole sequences.
        """
        self.now = None
        if self.count > 1 and of_batch:
            position, replica = divmod(number, self.replicas)
            microbatch, index = divmod(position, self.count)
            self.now = Slice((step, microbatch, replica), index, self.count)

    def attend(self, core: AttentionCore, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        """Compute the attention of the present slice over all tokens up to its end, (B, N, S, d).

        Args:
            core: The core of a layer, by which keys and values are stored.
            q_BNSd: The slice's queries.
            k_BKSd: Its keys.
            v_BKSd: Its values.
        """
        assert self.now is not None
        key, attend = (self.now.sequence, core), partial(core.attend, starts_BS=None)
        kept = self._kept.setdefault(key, SlicedKeysValues())
        start, is_last = self.now.start(q_BNSd.shape[2]), self.now.index == self.now.count - 1
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BNSd, k_BKSd, v_BKSd))

        def free() -> None:
            self._kept.pop(key, None)

        kept.put(start, self.now.count, k_BKSd, v_BKSd)
        if learns:
            work = _SliceWork(attend, kept, start, free)
            out: Tensor = _OfSlice.apply(q_BNSd, k_BKSd, v_BKSd, work, core.recomputes)  # type: ignore[no-untyped-call]
            return out
        if is_last and (torch.is_grad_enabled() or not core.training):  # no backward follows
            free()
        return attend(q_BNSd, *kept.until(start + q_BNSd.shape[2]))


class SlicedKeysValues:
    """The keys and values of a microbatch in one layer, and their gradients as far as they are computed."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def put(self, start: int, count: int, *parts_BKSd: Tensor) -> None:
        """Keep the keys and values of a slice, one of ``count``, that begins at a position."""
        if not self._made:
            self._made = [part.new_empty(*part.shape[:2], count * part.shape[2], part.shape[3]) for part in parts_BKSd]
        for made_BKTd, part_BKSd in zip(self._made, parts_BKSd, strict=True):
            made_BKTd[:, :, start : start + part_BKSd.shape[2]] = part_BKSd.detach()

    def until(self, stop: int) -> list[Tensor]:
        """Return the keys and the values before a position, as tensors of the same memory.

        Later slices may be written there meanwhile, which autograd need not track.
        """
        return [made_BKTd[:, :, :stop].data for made_BKTd in self._made]

    def add(self, start: int, *gradients_BKTd: Tensor) -> list[Tensor]:
        """Add gradients of the keys and values up to a slice's end.

        Args:
            start: Where the slice begins.
            gradients_BKTd: Those of the slice's attention; those of all later slices were added before.

        Returns:
            The whole gradients of the slice's own keys and values, (B, K, S, d).
        """
        stop = gradients_BKTd[0].shape[2]
        if not self._gradients:
            self._gradients = [*gradients_BKTd]
        else:
            for sums, gradient in zip(self._gradients, gradients_BKTd, strict=True):
                sums[:, :, :stop] += gradient
        return [sums[:, :, start:stop].clone() for sums in self._gradients]


class _SliceWork(NamedTuple):
    """The work on a slice in one layer.

    Attributes:
        attend: Computes the attention.
        kept: The keys and values of the microbatch.
        start: Where the slice begins.
        free: Frees ``kept``.
    """

    attend: Attend
    kept: SlicedKeysValues
    start: int
    free: Callable[[], None]


class _OfSlice(torch.autograd.Function):
    """The attention of a slice, whose backward adds to the gradients of earlier slices' keys and values."""

    @staticmethod
    def forward(ctx: Any, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, work: _SliceWork, again: bool) -> Tensor:
        every = work.kept.until(work.start + q_BNSd.shape[2])
        leaves = [x.detach().requires_grad_() for x in (q_BNSd, *every)]
        ctx.work = work
        ctx.leaves, ctx.tail = leaves, None
        if again:
            return work.attend(*leaves)
        with torch.enable_grad():
            out = work.attend(*leaves)
            ctx.tail = GraphEnd((out,))
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tail, work = ctx.tail, ctx.work
        if tail is None:
            with torch.enable_grad():
                tail = GraphEnd((work.attend(*ctx.leaves),))
        dq, dk, dv = tail.gradients((gradient,), ctx.leaves)
        own = work.kept.add(work.start, dk, dv)
        ctx.leaves = ctx.tail = None
        if work.start == 0:
            work.free()
        return (dq, *own, None, None)
