"""Code shared by the GPU backends: point-to-point edges, waits that do not block the host, and fault detection.

An op is issued to a stream of its group, which first waits for torch's current stream. ``handle.wait()`` makes the
current stream wait for the op and returns at once: later work on that stream sees the result, and the host does not
block. A fault may therefore come after the wait. The watcher detects it and closes the group. Kernels that waited for
the failed op then run on whatever its tensor holds, so keep no result of a step before ``synchronize`` has confirmed
that all its ops succeeded. ``barrier().wait()`` does block the host.

Each pair (source, destination) of ranks has a communicator and a stream of its own, called an edge. NCCL has no tags:
over an edge, tensors are received in the order in which they were sent. A single communicator would serialise all ops
of a group, and a receive posted early would block the send that its answer depends on. A posted receive occupies some
multiprocessors until it is complete, and whatever waits for the whole GPU (``torch.cuda.synchronize``, freeing cached
memory) waits for it too.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.exchange import gather_objects
from raypar.actors.collective.gpu.watcher import Issued, IssuedOp, Watcher, block_until_over
from raypar.actors.collective.group import Edge, Finish, Group, GroupMember, Start
from raypar.actors.errors import first_line
from raypar.actors.tensors import row_size

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class Communicator(Protocol):
    """An NCCL communicator, which runs the ops issued to it one after the other."""

    def abort(self) -> None:
        """End all its ops now, including those that the GPU has begun. Thread-safe."""


class GpuGroup(Group):
    """A group whose tensors are on one GPU of this process. See ``Group`` for the other arguments.

    Sums are computed in NCCL's order and in the tensors' own precision, unlike those of CPU groups. The tensors of an
    op must come from the current stream; they are kept alive until that stream waits for the op or the watcher sees it
    end.

    Args:
        store: Where the members exchange addresses.
        device: A GPU with its index. Members may share one as ``allow_shared_gpu`` says.
        host: Group of the same members for tensors on the host, which is aborted with this one; None for no such group.
    """

    def __init__(self, member: GroupMember, store: Store, device: torch.device, host: Group | None = None) -> None:
        super().__init__(member)
        self.device = device
        self.host = self if host is None else host
        self._reason = "the group was aborted"
        self._all: Any = None  # the communicator of the collectives
        self._edges: dict[Edge, Any] = {}
        self._open_ones: list[Communicator] = []  # those of the collectives and of the edges
        self._watcher = Watcher(self.fault)
        self._prepare()
        self._open(store, member.connect_timeout)

    def _prepare(self) -> None:
        """Set up what a backend needs before it connects."""

    def _open(self, store: Store, seconds: float) -> None:
        """Connect to all members within ``seconds``. Raises GroupError.

        NCCL cannot be interrupted while it connects, so all members first announce themselves in the store.
        """
        self._store, self._seconds = store, seconds
        try:
            gather_objects(PrefixStore("here", store), self.rank, self.size, b"", seconds)
            with self._on_device():
                self._all = self._opened("all", self.rank, self.size, edge=False)
                self._barrier()(seconds)
        except (RuntimeError, TimeoutError) as error:
            raise self.fault("connect", None, first_line(error)) from error

    def connect(self, edges: Iterable[Edge]) -> None:
        """Connect edges now, as ``Group.connect`` says. The first op over an unconnected edge waits for its peer."""
        ordered = sorted(edges)  # the same order on every member prevents deadlock
        if ordered and self.host is not self:
            self.host.barrier().wait()  # NCCL can't be interrupted while it waits for an absent member
        for edge in ordered:
            if self.rank in edge:
                peer = edge[0] if edge[1] == self.rank else edge[1]
                try:
                    with self._on_device():
                        self._edge(*edge)
                except RuntimeError as error:
                    raise self.fault("connect", peer, first_line(error)) from error

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until every op so far is complete, as ``Group.synchronize`` says."""
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
        """End every op of the group, also on the GPU. Takes as long as NCCL does."""
        self._closed = True
        self._watcher.stop()
        communicators, self._open_ones = self._open_ones, []
        if self.host is not self:
            self.host.abort()  # first, because it takes no time
        for communicator in communicators:
            communicator.abort()
        self._watcher.forget()

    def fault(self, op: str, peer: int | None, reason: str) -> GroupError:
        """Close the group as ``Group.fault`` does.

        Ops that are waited for later report this first fault as their reason.
        """
        if not self._closed:
            whom = "" if peer is None else f" with rank {peer}"
            self._reason = f"an earlier op failed ({op}{whom}: {reason})"
        return super().fault(op, peer, reason)

    def _starter(self, op: str, peer: int | None, start: Start, args: tuple[object, ...]) -> Start:
        demand_device(self.name, op, self.device, args)

        def begin(*args: object) -> Finish:
            tensors = [one for one in args if isinstance(one, Tensor)]
            sizes = [row_size(one) if op == "all_to_all" else one.numel() for one in tensors]
            if op in _REDUCING:
                self._demand_reducible(tensors[0], op)
            with self._on_device():
                issued = start(*args) if any(sizes) or not tensors else self._nothing()
            if isinstance(issued, Issued):
                issued.op, issued.peer = op, peer
                issued.keep += tensors
                self._watcher.add(issued)
            return issued

        return begin

    def _barrier(self) -> Finish:
        token = torch.zeros(1, device=self.device)
        issued = self._all_reduce(token, "sum")
        assert isinstance(issued, Issued)
        issued.blocks = True
        issued.keep.append(token)
        return issued

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        return self._issued(self._put(self._edge(self.rank, dst), tensor))

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        return self._issued(self._take(self._edge(src, self.rank), tensor))

    # --- for backends ---

    @abstractmethod
    def _connect(self, name: str, rank: int, size: int, *, edge: bool) -> Any:
        """Create a communicator. All its members call this.

        Args:
            name: Name of the communicator, the same on all members.
            rank: Rank of this member in the communicator.
            size: Number of members.
            edge: Whether it is for an edge. Ops over an edge may wait for long while the GPU computes, so they should
                occupy little of the GPU.
        """

    @abstractmethod
    def _put(self, edge: Any, tensor: Tensor) -> IssuedOp:
        """Start to send a contiguous tensor over an edge, from the communicator's rank 0 to its rank 1."""

    @abstractmethod
    def _take(self, edge: Any, tensor: Tensor) -> IssuedOp:
        """Start to receive a contiguous tensor over an edge."""

    # The collectives get tensors that have elements, and return what ``_issued`` does.

    def _demand_reducible(self, tensor: Tensor, name: str) -> None:
        """Raise ValueError if the backend can't reduce tensors of this dtype, in the op of this name."""

    def _issued(self, transfer: IssuedOp) -> Issued:
        return Issued(transfer, self._on_device, self._demand_open)

    def _nothing(self) -> Finish:
        """Return the Finish of an op that has no elements to move on any member."""
        return lambda timeout: self._demand_open()

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context in which the group's GPU is current.

        Each thread has its own current device. CPU tests need none.
        """
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._reason)

    def _edge(self, source: int, destination: int) -> Any:
        """Return the communicator of an edge. If it is not connected yet, connect it, which waits for the peer."""
        edge = self._edges.get((source, destination))
        if edge is not None:
            return edge
        sends = self.rank == source
        edge = self._opened(f"edge/{source}-{destination}", 0 if sends else 1, 2, edge=True)
        token = torch.zeros(1, device=self.device)  # NCCL makes the actual connection with the first transfer
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
    """Return the edges that a pipeline of ``size`` ranks uses: between neighbours, and between the last and first rank.

    Every edge is in the result in both directions.
    """
    there = {(rank, (rank + 1) % size) for rank in range(size) if size > 1}
    return there | {(destination, source) for source, destination in there}


def demand_device(group: str, op: str, device: torch.device, args: tuple[object, ...]) -> None:
    """Raise ValueError if a tensor among the arguments of an op is not on the group's device.

    Args:
        group: Name of the group, for the message.
        op: Name of the op, for the message.
        device: The group's device.
        args: The arguments of the op.
    """
    for tensor in args:
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(
                f"group {group}: {op}: a tensor is on {tensor.device}, this group moves tensors on {device}: "
                "move it there first"
            )
