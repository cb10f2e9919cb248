"""Collective groups for tests: members that are threads of one process, and a group that fails on request."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from raypar.actors.collective.group import Finish, Group, GroupMember, Start
from raypar.actors.collective.reductions import ReduceOp, reduce_in_order


class LocalHub:
    """Mailboxes through which the threads of one local group exchange tensors, keyed by (source, destination, key).

    A message wakes the thread that waits for it and no other.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, object], SimpleQueue[Tensor | _Ended | None]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()
        self._aborted = False

    def put(self, src: int, dst: int, key: object, tensor: Tensor | None) -> None:
        """Store a copy of ``tensor`` for rank ``dst``. None is a message without a tensor, for barriers."""
        copy = None if tensor is None else tensor.detach().clone()
        with self._lock:
            self._boxes[src, dst, key].put(copy)

    def take(self, src: int, dst: int, key: object, deadline: float) -> Tensor | None:
        """Remove and return the oldest tensor in a mailbox; block until there is one.

        Args:
            src: Rank of the sender.
            dst: Rank of the receiver.
            key: Tag, or number of the collective.
            deadline: When to give up, in seconds of ``time.monotonic``.

        Raises:
            TimeoutError: Nothing came before the deadline.
            RuntimeError: The group was aborted.
        """
        with self._lock:
            box = self._boxes[src, dst, key]
            if self._aborted and box.empty():
                raise RuntimeError("the group was aborted")
        try:
            tensor = box.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        if isinstance(tensor, _Ended):
            raise RuntimeError("the group was aborted")
        with self._lock:
            if box.empty():
                self._boxes.pop((src, dst, key), None)
        return tensor

    def abort(self) -> None:
        """Make all current and later waits for an empty mailbox raise."""
        with self._lock:
            self._aborted = True
            for box in self._boxes.values():
                box.put(_Ended())


class _Ended:
    """The last message of a mailbox whose group was aborted."""


class LocalGroup(Group):
    """A group whose members are threads of one process. It adds in rank order. See ``Group`` for the other arguments.

    Args:
        hub: The mailboxes that all members share.
    """

    def __init__(self, hub: LocalHub, axis: str, rank: int, size: int, timeout: float = 30.0) -> None:
        self._hub, self._issued = hub, 0
        super().__init__(GroupMember(f"local/{axis}", axis, rank, size, timeout))

    def abort(self) -> None:
        self._closed = True
        self._hub.abort()

    def _exchange(
        self, parts: dict[int, Tensor | None], sources: list[int], done: Callable[[list[Tensor]], object]
    ) -> Finish:
        """Send tensors to some ranks and start to receive from some.

        Args:
            parts: The tensor for each receiver, by rank; None for a message without a tensor.
            sources: Ranks to receive from.
            done: Called at the end with the received tensors, in the order of ``sources``.
        """
        self._issued += 1
        key = ("collective", self._issued)
        for dst, part in parts.items():
            self._hub.put(self.rank, dst, key, part)

        def finish(timeout: float) -> None:
            deadline = time.monotonic() + timeout
            got = [self._hub.take(src, self.rank, key, deadline) for src in sources]
            done([tensor for tensor in got if tensor is not None])

        return finish

    def _everyone(self) -> list[int]:
        return list(range(self.size))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        parts: dict[int, Tensor | None] = dict.fromkeys(self._everyone(), tensor)
        return self._exchange(parts, self._everyone(), lambda got: reduce_in_order(got, op, tensor))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        parts: dict[int, Tensor | None] = dict.fromkeys(self._everyone(), tensor)
        return self._exchange(parts, self._everyone(), lambda got: _fill(out, got))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        pieces = tensor.reshape(self.size, -1)
        parts: dict[int, Tensor | None] = {rank: pieces[rank] for rank in self._everyone()}
        return self._exchange(parts, self._everyone(), lambda got: reduce_in_order(got, op, out))

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        parts: dict[int, Tensor | None] = dict(enumerate(tensor.split(ins)))
        return self._exchange(parts, self._everyone(), lambda got: _fill(out, got))

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        if self.rank == root:
            return self._exchange({rank: tensor for rank in self._everyone() if rank != root}, [], lambda got: None)
        return self._exchange({}, [root], lambda got: tensor.copy_(got[0]))

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        sources = self._everyone() if self.rank == root else []
        return self._exchange({root: tensor}, sources, lambda got: reduce_in_order(got, op, tensor) if got else None)

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        sources = self._everyone() if self.rank == root else []
        return self._exchange({root: tensor}, sources, lambda got: None if out is None else _fill(out, got))

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        parts: dict[int, Tensor | None] = {}
        if tensor is not None and self.rank == root:
            parts = dict(enumerate(tensor.reshape(self.size, -1)))
        return self._exchange(parts, [root], lambda got: out.copy_(got[0].view_as(out)))

    def _barrier(self) -> Finish:
        return self._exchange(dict.fromkeys(self._everyone()), self._everyone(), lambda got: None)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        self._hub.put(self.rank, dst, tag, tensor)
        return lambda timeout: None

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        def finish(timeout: float) -> None:
            got = self._hub.take(src, self.rank, tag, time.monotonic() + timeout)
            assert got is not None
            tensor.copy_(got)

        return finish


class FailingGroup(LocalGroup):
    """A local group in which one call of an op raises GroupError, like a backend that lost a peer.

    See ``LocalGroup`` for the other arguments.

    Args:
        op: Name of the op.
        nth: Number of the call that fails, from 1.
    """

    def __init__(
        self, hub: LocalHub, axis: str, rank: int, size: int, *, op: str, nth: int, timeout: float = 30.0
    ) -> None:
        super().__init__(hub, axis, rank, size, timeout)
        self._op, self._left = op, nth

    def _starter(self, op: str, peer: int | None, start: Start, args: tuple[object, ...]) -> Start:
        if op == self._op:
            self._left -= 1
            if self._left == 0:
                raise self.fault(op, peer, "injected fault")
        return start


def local_groups(axis: str, size: int, timeout: float = 30.0) -> list[LocalGroup]:
    """Create the members of one local group, in rank order; use each in a thread of its own.

    Args:
        axis: Mesh axis under which the ledgers count.
        size: Number of members.
        timeout: Default deadline of a wait, in seconds.
    """
    hub = LocalHub()
    return [LocalGroup(hub, axis, rank, size, timeout) for rank in range(size)]


def _fill(out: Tensor, parts: list[Tensor]) -> None:
    out.copy_(torch.cat([part.reshape(-1) for part in parts]).view_as(out))
