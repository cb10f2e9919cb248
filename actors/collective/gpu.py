"""What GPU groups share: edges for point-to-point, waits that do not block the host, and a watcher that lets none hang.

On a GPU an op is issued to a stream of its group, which first waits for torch's current stream. ``handle.wait()`` lets
the current stream wait for the op in turn and returns at once; what was issued after it sees the result, the host does
not wait. So a fault may come after the wait: the watcher looks for it, and closes the group as any fault does. Kernels
that waited for the op then go on with whatever is in its tensor, therefore nothing may be kept of a step before
``synchronize`` has said that every op before it succeeded. ``barrier().wait()`` does block the host.

Every pair (source, destination) of ranks has a communicator and a stream of its own, an edge. NCCL has no tags: what is
received over an edge comes in the order in which it was sent. One communicator would put all ops of a group in one row,
and a receive that was posted ahead would hold up the send that its answer depends on. A posted receive holds some
multiprocessors until it is over, and whatever waits for the whole GPU (``torch.cuda.synchronize``, freeing cached
memory) waits for it too.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from raypar.actors.collective.group import Edge, Finish, Group, GroupError, Handle
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.watcher import Issued, Transfer, Watcher, block_until_over
from raypar.actors.errors import first_line
from raypar.actors.tensors import staged


class Communicator(Protocol):
    """What ops are issued to, one after the other."""

    def abort(self) -> None:
        """End its ops now, those of which the GPU has begun included. Safe from any thread."""


class GpuGroup(Group):
    """A group whose tensors are on one device of this process.

    store   where the members meet; its keys must not have been used by an earlier group
    device  a GPU with its index; no two members may have the same one
    host    the group of the same members for tensors on the host; it is aborted with this one

    The constructor returns once every member is connected, or raises GroupError within ``connect_timeout`` seconds.
    Sums are in NCCL's order and in the tensors' own precision, unlike those of a CPU group. What an op needs is kept
    alive until the current stream waits for it, or the watcher saw it end; it has to come from that stream.
    """

    def __init__(
        self,
        name: str,
        axis: str,
        rank: int,
        size: int,
        timeout: float,
        *,
        store: Store,
        device: torch.device,
        host: Group | None = None,
        connect_timeout: float = 60.0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(name, axis, rank, size, timeout, ledger)
        self.device = device
        self.host = self if host is None else host
        self._reason = "the group was aborted"
        self._all: Any = None  # the communicator of the collectives
        self._edges: dict[Edge, Any] = {}
        self._open_ones: list[Communicator] = []  # of both kinds
        self._watcher = Watcher(self.fault)
        self._prepare()
        self._open(store, connect_timeout)

    def _prepare(self) -> None:
        """What a backend needs before it connects."""

    def _open(self, store: Store, seconds: float) -> None:
        """Connect to everybody within so many seconds.

        Raises GroupError. NCCL can't be interrupted while it connects, so all members first say that they are there.
        """
        self._store, self._seconds = store, seconds
        try:
            store.set(f"here/{self.rank}", "1")
            store.wait([f"here/{peer}" for peer in range(self.size)], timedelta(seconds=seconds))
            with self._on_device():
                self._all = self._opened("all", self.rank, self.size, edge=False)
                self._barrier()(seconds)
        except (RuntimeError, TimeoutError) as error:
            raise self.fault("connect", None, first_line(error)) from error

    def connect(self, edges: Iterable[Edge]) -> None:
        """Connect over these edges now: the first op over any other waits for its peer. Every member names the same.

        Raises GroupError.
        """
        ordered = sorted(edges)  # in one order everywhere, so nobody waits in a circle
        if ordered and self.host is not self:
            self.host.barrier().wait()  # NCCL can't be interrupted while it waits for somebody who does not come
        for edge in ordered:
            if self.rank in edge:
                peer = edge[0] if edge[1] == self.rank else edge[1]
                try:
                    with self._on_device():
                        self._edge(*edge)
                except RuntimeError as error:
                    raise self.fault("connect", peer, first_line(error)) from error

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until every op so far is over, at most so many seconds; raises GroupError if one failed."""
        seconds = self.timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        for issued in self._watcher.pending():
            try:
                block_until_over(issued.transfer, end, seconds, self._demand_open)
            except (RuntimeError, TimeoutError) as error:
                raise self.fault(issued.op, issued.peer, first_line(error)) from error
        if self._closed:
            raise GroupError(self.name, "synchronize", None, self._reason)

    def abort(self) -> None:
        """End every op of the group, on the GPU too; takes as long as NCCL does."""
        self._closed = True
        self._watcher.stop()
        communicators, self._open_ones = self._open_ones, []
        if self.host is not self:
            self.host.abort()  # first: that is done at once
        for communicator in communicators:
            communicator.abort()
        self._watcher.forget()

    def fault(self, op: str, peer: int | None, reason: str) -> GroupError:
        """As every group's; ops that are waited for later give the first fault as their reason."""
        if not self._closed:
            whom = "" if peer is None else f" with rank {peer}"
            self._reason = f"an earlier op failed ({op}{whom}: {reason})"
        return super().fault(op, peer, reason)

    def _run(self, op: str, peer: int | None, sent: int, start: Callable[..., Finish], *args: object) -> Handle:
        demand_device(self.name, op, self.device, args)

        def begin(*args: object) -> Finish:
            with self._on_device():
                issued = start(*args)
            if isinstance(issued, Issued):
                issued.op, issued.peer = op, peer
                self._watcher.add(issued)
            return issued

        return super()._run(op, peer, sent, begin, *args)

    def _barrier(self) -> Finish:
        token = torch.zeros(1, device=self.device)
        issued = self._all_reduce(token, "sum")
        assert isinstance(issued, Issued)
        issued.blocks = True
        return issued

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        if not tensor.numel():
            return self._nothing()
        source = tensor.contiguous()
        return self._issued(self._put(self._edge(self.rank, dst), source), None, source)

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        if not tensor.numel():
            return self._nothing()
        flat, back = staged(tensor)
        return self._issued(self._take(self._edge(src, self.rank), flat), back, flat)

    # --- for backends ---

    @abstractmethod
    def _connect(self, name: str, rank: int, size: int, *, edge: bool) -> Any:
        """A Communicator with ``size`` members, who all call this with the same name, each with its rank among them.

        That of an ``edge`` may have to wait for long while the GPU computes: it should take little of it.
        """

    @abstractmethod
    def _put(self, edge: Any, flat: Tensor) -> Transfer:
        """Start sending a contiguous tensor over an edge, from its rank 0 to its rank 1."""

    @abstractmethod
    def _take(self, edge: Any, flat: Tensor) -> Transfer:
        """Start receiving a contiguous tensor over an edge."""

    def _issued(self, transfer: Transfer, then: Callable[[], object] | None, *keep: object) -> Issued:
        return Issued(transfer, then, list(keep), self._on_device, self._demand_open)

    def _nothing(self) -> Finish:
        """No element is to be moved, at any member."""
        return lambda timeout: self._demand_open()

    def _on_device(self) -> AbstractContextManager[object]:
        """Threads have a current device each; tests have none."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._reason)

    def _edge(self, source: int, destination: int) -> Any:
        """The communicator of an edge; an op over one that is not connected yet waits for its peer."""
        edge = self._edges.get((source, destination))
        if edge is not None:
            return edge
        sends = self.rank == source
        edge = self._opened(f"edge/{source}-{destination}", 0 if sends else 1, 2, edge=True)
        token = torch.zeros(1, device=self.device)  # NCCL connects for real with the first byte
        first = self._put(edge, token) if sends else self._take(edge, token)
        try:
            block_until_over(first, time.monotonic() + self._seconds, self._seconds, self._demand_open)
        except TimeoutError as error:
            raise RuntimeError(str(error)) from error
        self._edges[source, destination] = edge
        return edge

    def _opened(self, name: str, rank: int, size: int, *, edge: bool) -> Any:
        communicator: Communicator = self._connect(name, rank, size, edge=edge)
        self._open_ones.append(communicator)
        return communicator


def ring(size: int) -> set[Edge]:
    """The edges between neighbours, both ways, the last rank's to the first included: what a pipeline uses."""
    there = {(rank, (rank + 1) % size) for rank in range(size) if size > 1}
    return there | {(destination, source) for source, destination in there}


def demand_device(group: str, op: str, device: torch.device, args: tuple[object, ...]) -> None:
    """Raise ValueError for a tensor among the arguments of an op that is not on the group's device."""
    for tensor in args:
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(
                f"group {group}: {op}: a tensor is on {tensor.device}, this group moves tensors on {device}: "
                "move it there first"
            )
