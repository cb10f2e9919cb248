"""The flows of shared-memory ops that fit in one segment, and the all_reduce in which each member reduces one share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.reductions import REDUCTIONS, ReduceOp, reduce_in_order
from raypar.actors.collective.shm.flow import FlowStep, OpInProgress, Segments, always, nothing
from raypar.actors.collective.shm.mailbox import Mailbox, Parts, Use
from raypar.actors.collective.shm.slabs import SLAB
from raypar.actors.tensors import nbytes

Spans = Mapping[int, Sequence[Tensor]]  # by peer, its views of spans of this member's part


@dataclass(eq=False)
class Swap(OpInProgress):
    """A flow that posts whole tensors to peers, each as one segment, and takes one segment from each of some peers.

    See ``OpInProgress`` for the other attributes.

    Attributes:
        box: The mailbox.
        channel: Channel of the op.
        give: Flat tensors, each with the ranks of its receivers.
        totals: Expected bytes, by the sender's rank.
        dtype: dtype of the tensors that this rank receives.
        use: Called with the segments by rank, once all are there.
        shares: Whether peers may read windows in place.
    """

    box: Mailbox
    channel: int
    give: Sequence[tuple[Tensor, Sequence[int]]]
    totals: Mapping[int, int]
    dtype: torch.dtype
    use: Use
    shares: bool = True

    def __post_init__(self) -> None:
        self._shared = [flat for flat, _ in self.give if self.shares and self.box.is_window(flat)]
        self._posted = not self.give
        self._used = not self.totals

    def needs(self, peer: int) -> bool:
        """Return whether ``peer`` still has to give something or to get it. If not, it may leave before the others."""
        gives = peer in self.totals and not self._used and not self.box.have(self.channel, [peer])
        gets = any(peer in peers for _, peers in self.give)
        return gives or (gets and not (self._posted and self.box.sent([peer]) and not self._shared))

    def _advance(self, most: int) -> bool:
        moved = False
        if not self._posted:
            if not most:
                return False
            for flat, peers in self.give:
                self.box.post(self.channel, nbytes(flat), flat, peers, shares=self.shares)
            self._posted = True
            self.ahead = int(len(self._shared) < len(self.give))
        if not self._used and self.box.have(self.channel, self.totals):
            self.box.take(self.channel, self.totals, self.dtype, self.use)
            self._used = moved = True
        if self._used and self.box.sent(self.peers) and all(map(self.box.given, self._shared)):
            self.over, self.ahead = True, 0
            return True
        return moved


def by_shares(box: Mailbox, rank: int, size: int, flat: Tensor, op: ReduceOp, channels: tuple[int, int]) -> Segments:
    """Create the flow of an all_reduce in which each member reduces its share and gives the result to all.

    Each of N members sends 2(N-1)/N of the tensor's bytes. Peers read a tensor in a window in place, so the op is then
    complete only when all have read it.

    Args:
        box: The mailbox.
        rank: Rank of this member.
        size: Number of members.
        flat: The tensor, contiguous and 1-d, reduced in place.
        op: The reduction.
        channels: Channels for the shares and for the reduced shares.
    """
    given, reduced = channels
    block = box.block(flat) // flat.element_size()
    others = [peer for peer in range(size) if peer != rank]

    def share(k: int, owner: int) -> Tensor:
        part = flat[k * block : (k + 1) * block]
        each = -(-part.numel() // size)
        return part[owner * each : (owner + 1) * each]

    total = nbytes(flat)  # sent with every share to check it: shares of different tensors may have one length
    totals = dict.fromkeys(others, total)

    def give(k: int) -> None:
        for peer in others:
            box.post(given, total, share(k, peer), [peer], ring=False)

    def reduce(k: int) -> None:
        own = share(k, rank)
        box.take(given, totals, own.dtype, lambda parts: reduce_parts(own, own, parts, rank, op))
        box.post(reduced, total, own, others)

    def collect(k: int) -> None:
        box.take(reduced, totals, flat.dtype, lambda parts: fill(k, parts))

    def fill(k: int, parts: Parts) -> None:
        for peer, part in parts.items():
            share(k, peer).copy_(part)

    steps = [
        FlowStep(always, give),
        FlowStep(lambda k: box.have(given, others), reduce),
        FlowStep(lambda k: box.have(reduced, others), collect),
        FlowStep(lambda k: box.sent(others) and box.given(flat), nothing),
    ]
    return Segments(-(-flat.numel() // block), steps, peers=others, copies=not box.is_window(flat))


def by_parts(
    box: Mailbox, rank: int, flat: Tensor, cut: FlatCut, channel: int, reduce: Callable[[int, Spans], None]
) -> Segments:
    """Create the flow of a reduction in which each member gets its packed part of the others' flat tensors.

    The parts are packed segment by segment, so that they take little memory.

    Args:
        box: The mailbox.
        rank: Rank of this member.
        flat: This member's flat tensor.
        cut: Whose spans are where.
        channel: Channel of the op.
        reduce: Called with the first element of each range of this member's part, and with the others' spans of it.
    """
    counts, size, block = cut.counts, flat.element_size(), SLAB // flat.element_size()
    others = [peer for peer in range(len(counts)) if peer != rank]
    totals = dict.fromkeys(others, counts[rank] * size)

    def give(k: int) -> None:
        for peer in others:
            if counts[peer] > k * block:
                part = cut.part(flat, peer, k * block, (k + 1) * block)
                box.post(channel, counts[peer] * size, part, [peer], shares=False)

    def is_over(k: int) -> bool:
        return counts[rank] <= k * block

    def use(k: int) -> None:
        if not is_over(k):
            lengths = [view.numel() for view in cut.views(flat, rank, k * block, (k + 1) * block)]
            box.take(
                channel,
                totals,
                flat.dtype,
                lambda parts: reduce(k * block, {peer: part.split(lengths) for peer, part in parts.items()}),
            )

    steps = [
        FlowStep(always, give),
        FlowStep(lambda k: is_over(k) or box.have(channel, others), use),
        FlowStep(lambda k: box.sent(others), nothing),
    ]
    return Segments(-(-max(counts) // block), steps, peers=others, copies=True)


def reduce_spans(out: Tensor | None, flat: Tensor, cut: FlatCut, rank: int, start: int, spans: Spans) -> None:
    """Add the others' spans of a range of this member's part to its own, in rank order.

    Args:
        out: The packed part that becomes the sum; None if the sum replaces this member's spans of ``flat``.
        flat: This member's flat tensor.
        cut: Whose spans are where.
        rank: Rank of this member.
        start: First element of the range, counted in the packed part.
        spans: By peer, its views of the spans of the range.
    """
    lengths = [view.numel() for view in next(iter(spans.values()), cut.views(flat, rank))]
    stop = start + sum(lengths)
    own = cut.views(flat, rank, start, stop)
    targets = own if out is None else out[start:stop].split(lengths)
    for number, (target, view) in enumerate(zip(targets, own, strict=True)):
        reduce_parts(target, view, {peer: views[number] for peer, views in spans.items()}, rank, "sum")


def reduce_parts(out: Tensor, own: Tensor, parts: Parts, rank: int, op: ReduceOp) -> None:
    """Reduce this member's ``own`` tensor and the others' ``parts`` into ``out``, in rank order."""
    everyone = [own if member == rank else parts[member] for member in range(len(parts) + 1)]
    if len(everyone) == 2:
        REDUCTIONS[op](*everyone, out=out)
    else:
        reduce_in_order(everyone, op, out)
