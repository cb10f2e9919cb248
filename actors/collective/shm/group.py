"""The CPU group of members on one node: tensors move through shared memory.

Every op is a Flow: it posts the segments that this member gives and takes the segments that the others posted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.group import Finish, Group, GroupMember
from raypar.actors.collective.reductions import ReduceOp
from raypar.actors.collective.shm.flow import FlowStep, OpInProgress, Segments, always, nothing
from raypar.actors.collective.shm.links import INLINE, PeerConnection
from raypar.actors.collective.shm.mailbox import SHARED, Mailbox, Parts, Use
from raypar.actors.collective.shm.ops import Swap, by_parts, by_shares, reduce_parts, reduce_spans
from raypar.actors.collective.shm.slabs import SLAB
from raypar.actors.tensors import nbytes, row_size

Fold = Callable[[slice, Parts], object]  # uses a range of elements and the peers' segments of it
WHOLE = slice(None)  # a tensor in one segment, which need not be sliced: that takes 3 us


class ShmGroup(Group):
    """A group whose members can all exchange memory (``memory_domain``). See ``Group`` for the other arguments.

    An op in progress advances whenever any op of the group is started or waited for.

    Args:
        connect: Connects this member within so many seconds, and returns a link per other member, by rank.
    """

    def __init__(self, member: GroupMember, connect: Callable[[float], dict[int, PeerConnection]]) -> None:
        super().__init__(member)
        self._others = [peer for peer in range(member.size) if peer != member.rank]
        self._issued, self._box = 0, Mailbox(member.rank, {})
        deadline = time.monotonic() + member.connect_timeout
        try:
            self._box = Mailbox(member.rank, connect(member.connect_timeout))
            self._barrier()(max(0.0, deadline - time.monotonic()))
        except (OSError, RuntimeError) as error:
            raise self.fault("connect", None, str(error) or type(error).__name__) from error

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._box.window(count * dtype.itemsize).view(dtype)

    def abort(self) -> None:
        self._closed = True
        self._box.abort()

    # --- ops: what this member gives to whom, and what it does with what it gets ---

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        return (self.size - 1) * nbytes(tensor) if self._is_direct(tensor) else super()._all_reduce_bytes(tensor)

    def _is_direct(self, tensor: Tensor) -> bool:
        """Return whether an all_reduce of the tensor is direct: every member sends its whole tensor to every other.

        That takes one round, and between two members no more bytes. Otherwise each member reduces one share, which
        takes two rounds. For a large window that is less work, because nothing is copied to be sent.
        """
        pair = self.size == 2 and (nbytes(tensor) <= SLAB or not self._box.is_window(tensor))
        return nbytes(tensor) <= INLINE or pair

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        flat = tensor.view(-1)
        if not self._is_direct(tensor):
            channels = self._channel(), self._channel()
            return self._start(by_shares(self._box, self.rank, self.size, flat, op, channels))
        take = self._from_all(flat.numel())
        return self._exchange([(flat, self._others)], take, flat.dtype, self._fold(flat, flat, op), shares=False)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        rows, part = out.view(self.size, tensor.numel()), tensor.view(-1)
        rows[self.rank].copy_(part)
        return self._exchange([(part, self._others)], self._from_all(part.numel()), part.dtype, _fill(rows))

    def _all_gather_parts(self, out: Tensor, tensor: Tensor, counts: Sequence[int]) -> Finish:
        parts = out.split(list(counts))
        parts[self.rank].copy_(tensor)
        take = {peer: counts[peer] for peer in self._others}
        return self._exchange([(tensor, self._others)], take, tensor.dtype, _fill(parts))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        flat, rows = out.view(-1), tensor.view(self.size, out.numel())
        if self.size == 1:
            flat.copy_(rows[0])
        give = [(rows[peer], [peer]) for peer in self._others]
        fold = self._fold(flat, rows[self.rank], op)
        return self._exchange(give, self._from_all(flat.numel()), flat.dtype, fold)

    def _reduce_scatter_cut(self, out: Tensor | None, flat: Tensor, cut: FlatCut) -> Finish:
        """Add this rank's spans. Peers read a window, or a copy of a small tensor, as a whole; else packed parts."""
        reduce = partial(reduce_spans, out, flat, cut, self.rank)
        if self.size == 1:
            reduce(0, {})
            return nothing
        if nbytes(flat) > SLAB and not self._box.is_window(flat):
            return self._start(by_parts(self._box, self.rank, flat, cut, self._channel(), reduce))
        receivers = [peer for peer in self._others if cut.counts[peer]]
        senders = self._others if cut.counts[self.rank] else []

        def use(wholes: Parts) -> None:
            reduce(0, {peer: cut.views(whole, self.rank) for peer, whole in wholes.items()})

        return self._swap_flat(flat, receivers, senders, use)

    def _all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Finish:
        """Copy the others' spans. Peers read a window as a whole; else packed parts."""
        if part is None and self._box.is_window(flat):
            senders = [peer for peer in self._others if cut.counts[peer]]
            receivers = self._others if cut.counts[self.rank] else []

            return self._swap_flat(flat, receivers, senders, partial(cut.take, flat))
        if part is None:
            part = cut.part(flat, self.rank)
        else:
            cut.put(flat, self.rank, part)

        def fill(segment: slice, parts: Parts) -> None:
            for peer, other in parts.items():
                cut.put(flat, peer, other, segment.start or 0)

        take = {peer: cut.counts[peer] for peer in self._others}
        return self._exchange([(part, self._others)], take, flat.dtype, fill)

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        row = row_size(out)
        targets = out.view(-1).split([count * row for count in outs])
        sources = tensor.view(-1).split([count * row for count in ins])
        targets[self.rank].copy_(sources[self.rank])
        give = [(sources[peer], [peer]) for peer in self._others]
        take = {peer: targets[peer].numel() for peer in self._others}
        return self._exchange(give, take, out.dtype, _fill(targets))

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        flat = tensor.view(-1)
        if self.rank == root:
            return self._exchange([(flat, self._others)], {}, flat.dtype, nothing, self._box.block(flat))
        return self._exchange([], {root: flat.numel()}, flat.dtype, _fill({root: flat}), self._box.block(flat))

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        flat = tensor.view(-1)
        if self.rank != root:
            return self._exchange([(flat, [root])], {}, flat.dtype, nothing, self._box.block(flat))
        take, fold = self._from_all(flat.numel()), self._fold(flat, flat, op)
        return self._exchange([], take, flat.dtype, fold, self._box.block(flat))

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        part = tensor.view(-1)
        if out is None:
            return self._exchange([(part, [root])], {}, part.dtype, nothing)
        rows = out.view(self.size, part.numel())
        rows[root].copy_(part)
        return self._exchange([], self._from_all(part.numel()), part.dtype, _fill(rows))

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        flat = out.view(-1)
        if tensor is None:
            return self._exchange([], {root: flat.numel()}, flat.dtype, _fill({root: flat}))
        rows = tensor.view(self.size, flat.numel())
        flat.copy_(rows[root])
        return self._exchange([(rows[peer], [peer]) for peer in self._others], {}, flat.dtype, nothing)

    def _barrier(self) -> Finish:
        token = torch.zeros(1)
        return self._exchange([(token, self._others)], self._from_all(1), token.dtype, nothing)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        flat = tensor.detach().view(-1)
        segment = SLAB // flat.element_size()
        with self._box.lock:  # keeps the segments of concurrent sends with this tag apart
            for start in range(0, flat.numel(), segment):
                self._box.post(tag, nbytes(flat), flat[start : start + segment], (dst,))

        def sent(k: int) -> bool:
            return self._box.sent((dst,)) and self._box.given(flat)

        return nothing if sent(0) else self._start(Segments(1, [FlowStep(sent, nothing)], peers=[dst]))

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        flat, totals = tensor.view(-1), {src: nbytes(tensor)}
        fill, queue, segment = _fill({src: flat}), (src, tag), SLAB // flat.element_size()

        def use(k: int) -> None:
            self._box.take(tag, totals, flat.dtype, partial(fill, slice(k * segment, (k + 1) * segment)))

        if 0 < flat.numel() <= segment:
            flow: OpInProgress = Swap(
                self._box, tag, [], totals, flat.dtype, partial(fill, WHOLE), peers=(src,), queue=queue
            )
        else:
            step = FlowStep(lambda _: self._box.have(tag, totals), use)
            flow = Segments(-(-flat.numel() // segment), [step], peers=(src,), queue=queue)
        self._box.await_segments(flow)
        return partial(self._box.wait, flow)

    # --- internal ---

    def _exchange(
        self,
        give: Sequence[tuple[Tensor, Sequence[int]]],
        take: Mapping[int, int],
        dtype: torch.dtype,
        fold: Fold,
        block: int = SLAB,
        shares: bool = True,
    ) -> Finish:
        """Send flat tensors to peers and use what they send, segment by segment.

        Args:
            give: Flat tensors, each with the ranks of its receivers.
            take: Number of elements to receive, by the sender's rank.
            dtype: dtype of all tensors.
            fold: Called with each range of elements and the peers' segments of it.
            block: Bytes of a segment.
            shares: Whether peers may read windows in place; not if ``fold`` writes to them.

        Returns:
            The function that completes the op.
        """
        channel = self._channel()
        segment = block // dtype.itemsize
        counts = [*take.values(), *[flat.numel() for flat, _ in give]]
        longest = max(counts, default=0)
        totals = {peer: count * dtype.itemsize for peer, count in take.items() if count}
        involved = {*take, *chain.from_iterable(peers for _, peers in give)}
        if longest <= segment:
            some = give if all(counts) else [(flat, peers) for flat, peers in give if flat.numel()]
            swap = Swap(self._box, channel, some, totals, dtype, partial(fold, WHOLE), peers=involved, shares=shares)
            return self._start(swap)
        copies = not (shares and all(self._box.is_window(flat) for flat, _ in give))

        def sources(k: int) -> dict[int, int]:
            return {peer: total for peer, total in totals.items() if take[peer] > k * segment}

        def post(k: int) -> None:
            for flat, peers in give:
                if flat.numel() > k * segment:
                    # Only the last shared segment rings: later ones are copied.
                    last = nbytes(flat[(k + 1) * segment :]) < SHARED
                    self._box.post(
                        channel, nbytes(flat), flat[k * segment : (k + 1) * segment], peers, shares=shares, ring=last
                    )

        def use(k: int) -> None:
            where = slice(k * segment, (k + 1) * segment)
            self._box.take(channel, sources(k), dtype, lambda parts: fold(where, parts))

        steps = [
            FlowStep(always, post),
            FlowStep(lambda k: self._box.have(channel, sources(k)), use),
            FlowStep(lambda k: self._box.sent(involved) and all(self._box.given(flat) for flat, _ in give), nothing),
        ]
        return self._start(Segments(-(-longest // segment), steps, peers=involved, copies=copies))

    def _swap_flat(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int], use: Use) -> Finish:
        """Let peers read all of a flat tensor, and use the whole flat tensors of peers."""
        give = [(flat, receivers)] if receivers else []
        totals = dict.fromkeys(senders, nbytes(flat))
        return self._start(
            Swap(self._box, self._channel(), give, totals, flat.dtype, use, peers={*receivers, *senders})
        )

    def _start(self, flow: OpInProgress) -> Finish:
        self._box.start(flow)
        return partial(self._box.wait, flow)

    def _fold(self, out: Tensor, own: Tensor, op: ReduceOp) -> Fold:
        """Return the fold that reduces this member's own tensor and the peers' segments into ``out``."""

        def fold(segment: slice, parts: Parts) -> None:
            reduce_parts(_at(out, segment), _at(own, segment), parts, self.rank, op)

        return fold

    def _channel(self) -> int:
        """Return a new channel for a collective, the same on every member.

        Tags, from 0, are the channels of point-to-point ops.
        """
        self._issued += 1
        return -self._issued

    def _from_all(self, count: int) -> dict[int, int]:
        return dict.fromkeys(self._others, count)


def _at(flat: Tensor, segment: slice) -> Tensor:
    return flat if segment is WHOLE else flat[segment]


def _fill(targets: Mapping[int, Tensor] | Sequence[Tensor] | Tensor) -> Fold:
    def fold(segment: slice, parts: Parts) -> None:
        for peer, part in parts.items():
            _at(targets[peer], segment).copy_(part)

    return fold
