"""The CPU backend across nodes: one private torch ProcessGroupGloo per group, built over any torch Store.

It adds what torch's Gloo lacks: a real abort, a deadline on every wait, reduce_scatter through all-to-all with
additions in rank order, and sums and gathers of cut tensors in slices that take little memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from raypar.actors.autograd.torch_private import gloo_options
from raypar.actors.collective.exchange import ExchangedStore
from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.gloo.op_thread import OpThread
from raypar.actors.collective.group import Finish, Group, GroupMember
from raypar.actors.collective.reductions import ReduceOp, reduce_in_order
from raypar.actors.collective.torch_options import member_parts, options_of
from raypar.actors.machine.system_features import has_feature
from raypar.actors.tensors import nbytes, row_size

_ABORT_TAG = (1 << 31) - 1
_SMALL_TAG = _ABORT_TAG - 1
_SMALL = 1 << 15  # bytes, summed over the members, up to which an all_reduce exchanges tensors directly
_CUT_TAGS = (1 << 30, 1 << 20)  # the first tag of ops on cuts, and how many they use in turn
_SLICE = 8 << 20  # bytes of all members' parts of a cut that are exchanged at once
# Torch's own timeout of an op, which also runs before anybody waits for it; our deadlines are those of the waits.
_NEVER = timedelta(days=1)
NEVER = _NEVER.total_seconds()  # the timeout of a step of an op, whose deadline is that of its wait
_SHORTEST = 0.001  # seconds; torch would take a shorter timeout as none
_LOOK = 0.05  # seconds between two checks for an abort, where a late wait closes no connection
_LATE = "imed out"  # of "Timed out waiting 50ms for recv operation to complete" and "Operation timed out!"


class GlooGroup(Group):
    """A group over ``torch.distributed.ProcessGroupGloo``. See ``Group`` for the other arguments.

    Args:
        store: Where the members exchange addresses.
        device: The process's Gloo device (event loop and listener), shared by all its groups.
    """

    def __init__(self, member: GroupMember, store: Store, device: Any) -> None:
        super().__init__(member)
        self._thread: OpThread | None = None
        self._cuts = 0  # ops on cuts so far
        rank, size, seconds = member.rank, member.size, member.connect_timeout
        gloo: Any = dist.ProcessGroupGloo  # torch types only a part of it
        options = gloo_options(device, timedelta(seconds=seconds))
        self._pg: Any = None
        self._closes_late = has_feature("closing_connections")
        try:
            exchanged = ExchangedStore(PrefixStore("gloo", store), rank, size, seconds)
            self._pg = gloo(exchanged, rank, size, options)
            self._pg.barrier().wait(timedelta(seconds=seconds))
        except (RuntimeError, TimeoutError) as error:
            raise self.fault("connect", None, str(error).splitlines()[0]) from error
        self._pg.set_timeout(_NEVER)

    def abort(self) -> None:
        """Close every connection of the group, which takes a few milliseconds; else make the waits here raise."""
        # ProcessGroupGloo.abort() and shutdown() do nothing (torch 2.13), but an expired wait closes every
        # connection of the group, at both ends. A receive from a lost peer fails without closing the rest: try all.
        self._closed = True
        if self._thread is not None:
            self._thread.end()
        for peer in range(self.size if self._pg is not None and self._closes_late else 0):
            if peer != self.rank:
                try:
                    self._pg.recv([torch.zeros(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        return (self.size - 1) * nbytes(tensor) if self._is_small(tensor) else super()._all_reduce_bytes(tensor)

    def _is_small(self, tensor: Tensor) -> bool:
        return self.size * nbytes(tensor) <= _SMALL

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        if self._is_small(tensor):
            return self._all_reduce_directly(tensor, op)
        return self._waiter(self._pg.allreduce([tensor], options_of("Allreduce", op=op)), tensor)

    def _all_reduce_directly(self, tensor: Tensor, op: ReduceOp) -> Finish:
        """Send to every member and add in rank order.

        It has a third of the latency of Gloo's ring, where every step wakes one more thread.
        """
        parts = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
        parts[self.rank] = tensor.view(-1)
        others = self._others()
        give, take = dict.fromkeys(others, parts[self.rank]), {rank: parts[rank] for rank in others}
        arrived = self._swap(give, take, _SMALL_TAG)

        def finish(timeout: float) -> None:
            arrived(timeout)
            reduce_in_order(list(parts), op, tensor)

        return finish

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        if not out.numel():
            return self._barrier()
        return self._waiter(self._pg.allgather(member_parts(out, self.size), [tensor.view(-1)]), out, tensor)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        # Gloo's own reduce_scatter takes three times as long and adds in the ring's order, not in rank order.
        parts = torch.empty(tensor.numel(), dtype=tensor.dtype)
        arrived = self._waiter(self._pg.alltoall_base(parts, tensor.view(-1), [], []), parts, tensor)

        def finish(timeout: float) -> None:
            arrived(timeout)
            if out.numel():
                reduce_in_order(list(parts.view(self.size, -1)), op, out)

        return finish

    def _reduce_scatter_cut(self, out: Tensor | None, flat: Tensor, cut: FlatCut) -> Finish:
        def begin(start: int, stop: int, tag: int) -> Finish:
            own = cut.part(flat, self.rank, start, stop)
            if out is None:
                own = own.clone()  # so that an interrupted wait can be repeated
            take = {peer: torch.empty_like(own) for peer in self._others() if own.numel()}
            give = {peer: cut.part(flat, peer, start, stop) for peer in self._others() if cut.counts[peer] > start}
            arrived = self._swap(give, take, tag)

            def finish(timeout: float) -> None:
                arrived(timeout)
                if own.numel():
                    total = torch.empty_like(own) if out is None else out[start:stop]
                    reduce_in_order(
                        [own if rank == self.rank else take[rank] for rank in range(self.size)], "sum", total
                    )
                    if out is None:
                        cut.put(flat, self.rank, total, start)

            return finish

        return self._in_slices(cut, flat.element_size(), begin)

    def _all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Finish:
        return self._gather_cut(flat, part, cut, self._others(), self._others())

    def _gather_cut(
        self, flat: Tensor, part: Tensor | None, cut: FlatCut, to: Sequence[int], of: Sequence[int]
    ) -> Finish:
        """Send this rank's part to some members and fill a flat tensor with the parts of some.

        Args:
            flat: The result; see ``Group.all_gather_cut``.
            part: This rank's packed part, or None.
            cut: Whose spans are where.
            to: The ranks that get this rank's part.
            of: The ranks whose parts come.
        """
        if part is not None:
            cut.put(flat, self.rank, part)

        def begin(start: int, stop: int, tag: int) -> Finish:
            own = cut.part(flat, self.rank, start, stop) if part is None else part[start:stop]
            give = {peer: own for peer in to if own.numel()}
            take = {peer: cut.part(flat, peer, start, stop) for peer in of if cut.counts[peer] > start}
            arrived = self._swap(give, take, tag)

            def finish(timeout: float) -> None:
                arrived(timeout)
                for peer, other in take.items():
                    if len(cut.views(flat, peer, start, stop)) > 1:  # else it came into the flat tensor itself
                        cut.put(flat, peer, other, start)

            return finish

        return self._in_slices(cut, flat.element_size(), begin)

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        if not row_size(tensor):
            return self._barrier()
        return self._waiter(self._pg.alltoall_base(out, tensor, outs, ins), out, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._waiter(self._pg.broadcast([tensor], options_of("Broadcast", root=root)), tensor)

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        own = tensor if self.rank == root else tensor.clone()  # Gloo uses the members' buffers as scratch space
        return self._waiter(self._pg.reduce([own], options_of("Reduce", root=root, op=op)), own)

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        if not tensor.numel():
            return self._barrier()
        work = self._pg.gather(member_parts(out, self.size), [tensor.view(-1)], options_of("Gather", root=root))
        return self._waiter(work, out, tensor)

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        if not out.numel():
            return self._barrier()
        work = self._pg.scatter([out.view(-1)], member_parts(tensor, self.size), options_of("Scatter", root=root))
        return self._waiter(work, out, tensor)

    def _barrier(self) -> Finish:
        return self._waiter(self._pg.barrier())

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        return self._waiter(self._pg.send([tensor], dst, tag), tensor)

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        return self._waiter(self._pg.recv([tensor], src, tag), tensor)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _in_slices(self, cut: FlatCut, itemsize: int, begin: Callable[[int, int, int], Finish]) -> Finish:
        """Start an op on a cut, slice by slice of the packed parts, of which two at a time take memory.

        A thread performs an op of several slices. If a wait did, members that wait in different orders would wait for
        each other forever.

        Args:
            cut: The cut.
            itemsize: Bytes of an element.
            begin: Starts a slice, given its first element, the element after its last and the op's tag.
        """
        first, most = _CUT_TAGS
        tag, self._cuts = first + self._cuts % most, self._cuts + 1
        length = max(1, _SLICE // (itemsize * self.size))
        starts = range(0, max(cut.counts), length)
        if len(starts) <= 1:
            return begin(0, length, tag)

        def perform() -> None:
            before = begin(0, length, tag)
            for start in starts[1:]:
                now = begin(start, start + length, tag)
                before(NEVER)
                before = now
            before(NEVER)

        return self._on_thread(perform)

    def _on_thread(self, work: Callable[[], None]) -> Finish:
        """Perform an op in the group's thread, one after the other, and return the function that waits for it."""
        if self._thread is None:
            self._thread = OpThread(self.name)
        return self._thread.put(work)

    def _swap(self, give: Mapping[int, Tensor], take: Mapping[int, Tensor], tag: int) -> Finish:
        """Send tensors to members and receive tensors of members, by rank."""
        works = [self._pg.recv([tensor], rank, tag) for rank, tensor in take.items()]
        works += [self._pg.send([tensor], rank, tag) for rank, tensor in give.items()]

        def finish(timeout: float) -> None:
            deadline = time.monotonic() + timeout
            for work in works:
                self._wait(work, deadline - time.monotonic())
            del keep_alive[:]

        keep_alive = [*give.values(), *take.values()]
        return finish

    def _waiter(self, work: Any, *keep: object) -> Finish:
        """Return a Finish that waits for Gloo's ``work``.

        ``keep`` stays alive until then: Gloo closes the connection when a tensor in use is freed.
        """

        def finish(timeout: float) -> None:
            self._wait(work, timeout)
            del keep_alive[:]

        keep_alive = list(keep)
        return finish

    def _wait(self, work: Any, timeout: float) -> None:
        """Wait for Gloo's ``work``, for so many seconds.

        Raises:
            RuntimeError: It failed, or the group was aborted.
            TimeoutError: It is not complete in time, where a late wait closes no connection.
        """
        if self._closes_late:
            work.wait(timedelta(seconds=max(_SHORTEST, timeout)))
            return
        end = time.monotonic() + timeout
        while True:
            try:
                work.wait(timedelta(seconds=min(_LOOK, max(_SHORTEST, end - time.monotonic()))))
                return
            except RuntimeError as error:
                if self._closed:
                    raise RuntimeError("the group was aborted") from error
                if _LATE not in str(error):
                    raise
                if time.monotonic() >= end:
                    raise TimeoutError(str(error)) from error


def create_device(host: str) -> Any:
    """Create a Gloo device bound to an IP address of this node.

    The device's event loop runs as a batch thread (SCHED_BATCH). Otherwise it preempts the computing thread in the
    middle of a send, finds the connection locked by that thread, and spins until the scheduler's next tick:
    milliseconds where cores are few.

    Args:
        host: The IP address. Without one torch would resolve the host name, often to loopback.
    """
    before = _threads()
    device = dist.ProcessGroupGloo.create_device(hostname=host)
    for thread in _threads() - before:
        with suppress(OSError):  # the thread has ended, or the system forbids it: then it is only slower
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return device


def _threads() -> set[int]:
    """Return the ids of this process's threads; empty where none can be a batch thread."""
    if not has_feature("batch_threads"):
        return set()
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}
