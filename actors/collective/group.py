"""The abstract ``Group``: collectives and point-to-point ops between the ranks of one mesh axis slice.

Every op is asynchronous: it returns a ``Handle`` at once and is complete when ``handle.wait()`` returns. Every wait has
a deadline, and the ledger counts every op. Backends implement the underscored methods; their tensors are contiguous.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raypar.actors.collective.errors import GroupError, plain_reason
from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.reductions import REDUCTIONS, ReduceOp, reduce_in_order
from raypar.actors.tensors import nbytes, row_size

TIMEOUT = 60.0  # seconds: of a wait and of connecting, until the owner sets another
Edge = tuple[int, int]  # ranks: source and destination
Finish = Callable[[float], None]  # blocks until an op is complete, for at most the given seconds
Start = Callable[..., Finish]  # starts an op, and returns the function that completes it


class Waitable(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until it is complete."""


class Handle:
    """An asynchronous op in progress, which keeps the op's tensors alive.

    Args:
        group: The group that the op belongs to.
        op: Name of the op, for messages and the ledger.
        peer: Rank of the other side; None for all members.
        finish: Blocks until the op is complete, for at most the given seconds, and raises RuntimeError or TimeoutError
            if it fails. It is called until it succeeds or fails once.
    """

    def __init__(self, group: Group, op: str, peer: int | None, finish: Finish) -> None:
        self._group, self._op, self._peer = group, op, peer
        self._finish: Finish | None = finish
        self._error: GroupError | None = None
        self._waiting = threading.Lock()  # the first waiter completes the op; concurrent waiters wait for the first

    def wait(self, timeout: float | None = None) -> None:
        """Block until the op is complete. Waiting again returns at once, or raises the same error.

        Args:
            timeout: Deadline in seconds; None for the group's own.

        Raises:
            GroupError: The op failed or missed its deadline.
        """
        seconds = self._group.timeout if timeout is None else timeout
        if not self._waiting.acquire(timeout=seconds):
            raise self._group.fault(self._op, self._peer, plain_reason(TimeoutError(), seconds))
        try:
            if self._error is not None:
                raise self._error
            if self._finish is not None:
                self._wait(self._finish, seconds)
        finally:
            self._waiting.release()

    def _wait(self, finish: Finish, seconds: float) -> None:
        ledger, begin = self._group.ledger, time.perf_counter()
        try:
            finish(seconds)
        except Exception as error:
            self._finish, self._error = None, self._group.fault(self._op, self._peer, plain_reason(error, seconds))
            raise self._error from error
        self._finish = None  # only now, so that an interrupted wait can be repeated
        ledger.spent(self._group.axis, self._op, begin, time.perf_counter())


@dataclass(frozen=True)
class GroupMember:
    """This process as a member of a group.

    Attributes:
        name: Run, axis, index and generation of the group, for messages.
        axis: Mesh axis under which the ledger counts the ops.
        rank: Rank of this member in the group.
        size: Number of members.
        timeout: Default deadline of a wait, in seconds.
        connect_timeout: Seconds in which all members must connect.
        ledger: Where ops are counted; None for a new one.
    """

    name: str
    axis: str
    rank: int
    size: int
    timeout: float = TIMEOUT
    connect_timeout: float = TIMEOUT
    ledger: Ledger | None = None


class Group(ABC):
    """A collective group: one axis slice of the mesh with ``size`` members, of which this process is ``rank``.

    The constructors of backends that connect return once every member is connected, and raise GroupError if one is not
    in time. Those that connect over a ``store`` (Gloo, GPUs) exchange addresses in it, under keys that no earlier group
    may have used.

    Args:
        member: This process as a member of the group. The group has its name, axis, rank, size and timeout as
            attributes.

    Attributes:
        ledger: Where ops are counted.
        device: Device of the tensors that the ops take.
        host: Group of the same members for tensors on the host: small ones whose values the host needs at once.
        on_fault: Called once when an op fails, so that the owner can abort its other groups too. Only the ring
            neighbours of a dead member notice its death at once; all others learn of it through this call.
    """

    def __init__(self, member: GroupMember) -> None:
        self.name, self.axis = member.name, member.axis
        self.rank, self.size = member.rank, member.size
        self.timeout = member.timeout
        self.ledger = member.ledger if member.ledger is not None else Ledger()
        self.device = torch.device("cpu")
        self.host: Group = self
        self.on_fault: Callable[[], None] = self.abort
        self._closed = False

    # --- collectives: called by every member in the same order ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Handle:
        """Reduce a tensor over all members, in place. A ring sends 2(N-1)/N of its bytes per member.

        Args:
            tensor: This member's tensor, which becomes the result; of one shape and dtype on all members.
            op: The reduction.
        """
        self._known(op, "all_reduce")
        sent = self._all_reduce_bytes(tensor)
        return self._run("all_reduce", None, sent, tensor, self._all_reduce, tensor, op, reads_out=True)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Handle:
        """Concatenate the members' tensors in rank order.

        Args:
            out: Result (size * n, ...), with the dtype of ``tensor``.
            tensor: This member's part (n, ...).
        """
        self._fit(out, tensor, "all_gather: out must hold size x tensor elements")
        sent = (self.size - 1) * nbytes(tensor)
        return self._run("all_gather", None, sent, out, self._all_gather, out, tensor)

    def all_gather_parts(self, out: Tensor, tensor: Tensor, counts: Sequence[int]) -> Handle:
        """Concatenate the members' tensors of different lengths in rank order.

        Args:
            out: Result (sum of the counts,), with the dtype of ``tensor``.
            tensor: This member's part (counts[rank],).
            counts: Number of elements of each member's part.
        """
        self._alike(out, tensor, "all_gather_parts")
        rule = "all_gather_parts: there must be a count for each member, of its tensor's elements; out holds them all"
        self._same((len(counts), tensor.numel(), out.numel()), (self.size, counts[self.rank], sum(counts)), rule)
        sent = (self.size - 1) * nbytes(tensor)
        return self._run("all_gather", None, sent, out, self._all_gather_parts, out, tensor, counts)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Handle:
        """Reduce the members' tensors and keep this rank's part.

        CPU backends add in rank order and accumulate half-precision tensors in fp32.

        Args:
            out: Result (n, ...), with the dtype of ``tensor``.
            tensor: Input (size * n, ...).
            op: The reduction.
        """
        self._fit(tensor, out, "reduce_scatter: tensor must hold size x out elements")
        self._known(op, "reduce_scatter")
        sent = (self.size - 1) * nbytes(out)
        return self._run("reduce_scatter", None, sent, out, self._reduce_scatter, out, tensor, op)

    def reduce_scatter_cut(self, out: Tensor | None, flat: Tensor, cut: FlatCut) -> Handle:
        """Add the members' flat tensors and keep this rank's part of the sum.

        All backends add in rank order and accumulate half-precision tensors in fp32. Each member sends (N-1)/N of the
        parts' bytes if they are equal.

        Args:
            out: Memory for the packed part (cut.counts[rank],), with the dtype of ``flat``. None: the sum replaces this
                rank's spans of ``flat``; the others' do not change.
            flat: This member's flat tensor, 1-d; of one length and dtype on all members.
            cut: Whose spans are where.
        """
        counts = self._fit_cut("reduce_scatter_cut", flat, out, cut)
        sent = (sum(counts) - counts[self.rank]) * flat.element_size()
        result = flat if out is None else out
        start, reads_out = self._reduce_scatter_cut, out is None
        return self._run("reduce_scatter", None, sent, result, start, out, flat, cut, reads_out=reads_out)

    def all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Handle:
        """Fill a flat tensor with the parts of all members. Elements that belong to nobody do not change.

        Args:
            flat: The result, 1-d; of one length and dtype on all members.
            part: This member's packed part (cut.counts[rank],), with the dtype of ``flat``. None: this rank's spans of
                ``flat`` are its part.
            cut: Whose spans are where.
        """
        counts = self._fit_cut("all_gather_cut", flat, part, cut)
        sent = (self.size - 1) * counts[self.rank] * flat.element_size()
        return self._run("all_gather", None, sent, flat, self._all_gather_cut, flat, part, cut, reads_out=True)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int] = (), in_splits: Sequence[int] = ()
    ) -> Handle:
        """Send part j of ``tensor`` to rank j and store the parts that arrive in ``out``, in rank order.

        Args:
            out: Result; its rows have the shape and dtype of the rows of ``tensor``.
            tensor: Input, divided along dim 0.
            out_splits: Rows received from each rank; equal parts if empty.
            in_splits: Rows sent to each rank; equal parts if empty.
        """
        self._alike(out, tensor, "all_to_all")
        self._same(out.shape[1:], tensor.shape[1:], "all_to_all: a row of out must be like a row of tensor")
        ins, outs = self._splits(tensor, in_splits, "in_splits"), self._splits(out, out_splits, "out_splits")
        sent = row_size(tensor) * tensor.element_size() * (sum(ins) - ins[self.rank])
        return self._run("all_to_all", None, sent, out, self._all_to_all, out, tensor, outs, ins)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Copy the ``tensor`` of rank ``root`` into the ``tensor`` of every other member."""
        is_root = self.rank == root
        sent = (self.size - 1) * nbytes(tensor) if is_root else 0
        return self._run("broadcast", root, sent, None if is_root else tensor, self._broadcast, tensor, root)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp = "sum") -> Handle:
        """Reduce a tensor over all members into that of one rank. The other members' tensors do not change.

        Args:
            tensor: This member's tensor; of one shape and dtype on all members.
            root: Rank that gets the result.
            op: The reduction.
        """
        self._known(op, "reduce")
        out = tensor if self.rank == root else None
        sent = nbytes(tensor) * (out is None)
        return self._run("reduce", root, sent, out, self._reduce, tensor, root, op, reads_out=True)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Handle:
        """Concatenate the members' tensors in rank order on rank ``root``.

        Args:
            out: Result (size * n, ...) on the root; None on the others.
            tensor: This member's part (n, ...).
            root: Rank that gets the result.
        """
        if self.rank == root:
            self._fit(out, tensor, "gather: the root's out must hold size x tensor elements")
        else:
            out = None
        return self._run("gather", root, nbytes(tensor) * (out is None), out, self._gather, out, tensor, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Handle:
        """Divide a tensor of rank ``root`` over the members by rank.

        Args:
            out: This member's part (n, ...).
            tensor: Input (size * n, ...) on the root; None on the others.
            root: Rank that has the tensor.
        """
        if self.rank == root:
            self._fit(tensor, out, "scatter: the root's tensor must hold size x out elements")
        else:
            tensor = None
        sent = 0 if tensor is None else (self.size - 1) * nbytes(out)
        return self._run("scatter", root, sent, out, self._scatter, out, tensor, root)

    def barrier(self) -> Handle:
        """Wait for all members: the op is complete once every member has called it."""
        return self._run("barrier", None, 0, None, self._barrier)

    # --- point to point ---

    def send(self, tensor: Tensor, dst: int, tag: int = 0, count_as: str = "send") -> Handle:
        """Start to send a tensor to another rank. It must not change before the handle has been waited for.

        Args:
            tensor: The tensor to send, of any strides.
            dst: Rank of the receiver.
            tag: Number that matches the send to its receive, 0 or more; GPU groups ignore it and match by order.
            count_as: Op name for the ledger.
        """
        self._other(dst, tag, "send")
        return self._run(count_as, dst, nbytes(tensor), None, self._send, tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, count_as: str = "recv") -> Handle:
        """Start to receive a tensor from another rank.

        Args:
            tensor: Memory for it, with the shape and dtype of the sender's tensor.
            src: Rank of the sender.
            tag: Tag of the send.
            count_as: Op name for the ledger.
        """
        self._other(src, tag, "recv")
        return self._run(count_as, src, nbytes(tensor), tensor, self._recv, tensor, src, tag)

    # --- memory, and methods that only GPUs need ---

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor (count,) that collectives can use without a copy where the backend allows it.

        Either all members pass such a tensor to an op, or none does. Concurrent ops on different parts of one such
        tensor may complete only together: use one tensor for each op that is waited for separately.
        """
        return torch.empty(count, dtype=dtype, device=self.device)

    def connect(self, edges: Iterable[Edge]) -> None:  # noqa: B027  (only GPU groups override this and the next one)
        """Connect edges, the same on every member, now instead of in the first op over each. Only GPU groups need it.

        Raises GroupError if an edge can't be connected.
        """

    def synchronize(self, timeout: float | None = None) -> None:  # noqa: B027
        """Block until every op so far is complete, which on GPUs a wait does not guarantee.

        The timeout is in seconds; None is the group's own. Raises GroupError if an op failed or is late.
        """

    # --- faults ---

    @abstractmethod
    def abort(self) -> None:
        """Close the group now. Waits that block here raise, and so do the peers' waits for this member.

        It may be called from any thread and more than once.
        """

    def fault(self, op: str, peer: int | None, reason: str) -> GroupError:
        """Close the group and its owner's other groups.

        Args:
            op: Name of the failed op.
            peer: Rank of the other side; None for all members.
            reason: Why the op failed.

        Returns:
            The error to raise.
        """
        first, self._closed = not self._closed, True
        if first:
            self.on_fault()
        return GroupError(self.name, op, peer, reason)

    # --- for backends: each starts its op and returns the function that completes it ---

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that this member sends in an all_reduce: those of a ring, unless a backend overrides it."""
        return 2 * (self.size - 1) * nbytes(tensor) // self.size

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish: ...
    @abstractmethod
    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish: ...
    @abstractmethod
    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish: ...

    def _all_gather_parts(self, out: Tensor, tensor: Tensor, counts: Sequence[int]) -> Finish:
        """Broadcast every part into its part of ``out``."""
        parts = out.split(list(counts))
        parts[self.rank].copy_(tensor)
        coming = [(part, self._broadcast(part, root)) for root, part in enumerate(parts) if part.numel()]

        def finish(timeout: float) -> None:
            deadline = time.monotonic() + timeout
            for _, one in coming:  # the parts are kept alive until then
                one(max(0.001, deadline - time.monotonic()))

        return finish

    def _reduce_scatter_cut(self, out: Tensor | None, flat: Tensor, cut: FlatCut) -> Finish:
        """Send each member its part, packed, and add what comes."""
        packed, own = cut.packed(flat), cut.counts[self.rank]
        parts = packed.new_empty(self.size * own)
        arrived = self._all_to_all(parts, packed, [own] * self.size, list(cut.counts))

        def finish(timeout: float) -> None:
            arrived(timeout)
            if own:
                total = packed.new_empty(own) if out is None else out
                reduce_in_order(list(parts.view(self.size, own)), "sum", total)
                if out is None:
                    cut.put(flat, self.rank, total)

        return finish

    def _all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Finish:
        """Gather all parts, packed, and copy them to their spans."""
        packed = flat.new_empty(sum(cut.counts))
        own = cut.part(flat, self.rank) if part is None else part
        arrived = self._all_gather_parts(packed, own, cut.counts)

        def finish(timeout: float) -> None:
            arrived(timeout)
            cut.unpack(packed, flat)

        return finish

    @abstractmethod
    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> Finish: ...
    @abstractmethod
    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish: ...
    @abstractmethod
    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish: ...
    @abstractmethod
    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish: ...
    @abstractmethod
    def _barrier(self) -> Finish: ...
    @abstractmethod
    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish: ...
    @abstractmethod
    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish: ...

    def _run(
        self,
        op: str,
        peer: int | None,
        sent: int,
        out: Tensor | None,
        start: Start,
        *args: object,
        reads_out: bool = False,
    ) -> Handle:
        """Check, start and count an op.

        Args:
            op: Name of the op, for messages and the ledger.
            peer: Rank of the other side, or of the root; None for all members.
            sent: Payload bytes that this member sends.
            out: The tensor among the arguments that becomes the result; None if none does.
            start: The method of the backend that starts it.
            args: The arguments of that method, which gets contiguous tensors.
            reads_out: Whether the op also reads ``out``, or leaves some of it as it is.
        """
        start = self._starter(op, peer, start, args)
        if peer is not None and not 0 <= peer < self.size:
            raise ValueError(f"group {self.name}: {op}: rank {peer} is not one of its {self.size} members")
        if self._closed:
            raise GroupError(self.name, op, peer, "the group was closed after an earlier fault")
        begin = time.perf_counter()
        try:
            given: list[Any] = [
                self._staged(arg, is_read=arg is not out or reads_out) if isinstance(arg, Tensor) else arg
                for arg in args
            ]
            finish = start(*given)
        except (RuntimeError, OSError) as error:
            raise self.fault(op, peer, plain_reason(error, self.timeout)) from error
        self.ledger.record(self.axis, op, sent)
        self.ledger.spent(self.axis, op, begin, time.perf_counter())
        for arg, flat in zip(args, given, strict=True):
            if arg is out and flat is not out:
                finish = _then_copied(finish, flat, out)
        # The root of an op waits for all members, so its handle names no peer.
        return Handle(self, op, None if peer == self.rank else peer, finish)

    def _starter(self, op: str, peer: int | None, start: Start, args: tuple[object, ...]) -> Start:
        """Check an op's arguments, which are not staged yet, and return the method that starts it; see ``_run``."""
        return start

    def _staged(self, tensor: Tensor, *, is_read: bool) -> Tensor:
        """Return the contiguous tensor that an op uses for one of its tensors, and whose values it may read."""
        return tensor.contiguous()

    def _splits(self, tensor: Tensor, splits: Sequence[int], name: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else -1
        counts = list(splits) or [rows // self.size] * self.size
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != rows:
            raise ValueError(
                f"group {self.name}: all_to_all: {name} must be {self.size} counts that add up to the rows of a tensor "
                f"{list(tensor.shape)} (found {list(splits) or 'none, so the rows must be a multiple'})"
            )
        return counts

    def _fit(self, whole: Tensor | None, part: Tensor, rule: str) -> None:
        self._same(None if whole is None else whole.numel(), part.numel() * self.size, rule)
        assert whole is not None
        self._alike(whole, part, rule.partition(":")[0])

    def _fit_cut(self, op: str, flat: Tensor, part: Tensor | None, cut: FlatCut) -> tuple[int, ...]:
        """Return the elements of each member's part, once the tensors are known to fit the cut."""
        self._same(len(cut.spans), self.size, f"{op}: the cut must have the spans of each member")
        self._same(flat.dim(), 1, f"{op}: a flat tensor has one dim")
        self._same(flat.numel() >= cut.end, True, f"{op}: the flat tensor must have the {cut.end} elements of the cut")
        if part is not None:
            self._same(part.numel(), cut.counts[self.rank], f"{op}: the part must have the elements of its spans")
            self._alike(flat, part, op)
        return cut.counts

    def _alike(self, a: Tensor, b: Tensor, op: str) -> None:
        self._same(a.dtype, b.dtype, f"{op}: both tensors must have one dtype")

    def _known(self, reduction: str, op: str) -> None:
        if reduction not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            raise ValueError(f"group {self.name}: {op}: there is no reduction {reduction!r}: use one of {known}")

    def _other(self, peer: int, tag: int, op: str) -> None:
        if peer == self.rank:
            raise ValueError(f"group {self.name}: {op}: rank {peer} is this member itself: name another one")
        self._same(tag, abs(tag), f"{op}: a tag is 0 or more")

    def _same(self, found: object, wanted: object, rule: str) -> None:
        if found != wanted:
            raise ValueError(f"group {self.name}: {rule} (found {found}, wanted {wanted})")


def _then_copied(finish: Finish, flat: Tensor, out: Any) -> Finish:
    """Return a Finish that calls ``finish`` and then copies ``flat`` to ``out``. Torch keeps ``flat`` alive."""

    def copy(timeout: float) -> None:
        finish(timeout)
        out.copy_(flat, non_blocking=True)

    return copy


def wait_all(handles: Iterable[Waitable]) -> None:
    """Wait for several operations."""
    for handle in handles:
        handle.wait()


Groups = tuple[Group, ...]
