"""The Group noun: collectives and point-to-point among the actors of one mesh axis slice.

Every op returns a ``Handle`` at once and is over when ``handle.wait()`` returns: no op blocks the caller, no wait is
without a deadline, and every op is counted in the ledger. Backends fill in the underscored methods.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.reductions import REDUCTIONS, ReduceOp
from raypar.actors.errors import first_line
from raypar.actors.tensors import nbytes, row_size


def plain_reason(error: Exception, seconds: float) -> str:
    """Why a communication failed, in a line; the backends' texts carry file names and stack frames.

    seconds  of its deadline
    """
    text = first_line(error)
    text = text.rsplit("] ", 1)[-1] if text.startswith("[") else text
    lowered = text.lower()
    if "caused pair closure" in lowered:  # Gloo's word for other waits of a group of which one expired
        return "the group was aborted"
    if "timed out" in lowered or "timeout" in lowered or isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s"
    if any(word in lowered for word in ("closed", "reset by peer", "broken pipe", "read error", "write error")):
        return "the connection was closed at the other end (the peer died or gave up)"
    return text


Edge = tuple[int, int]  # ranks: source and destination
Finish = Callable[[float], None]  # blocks until an op is over, at most so many seconds


class GroupError(RuntimeError):
    """A communication that failed: which group and op, with which peer (None: all of them), and why.

    After one the group is closed: its members join a new generation or give up.
    """

    def __init__(self, group: str, op: str, peer: int | None, reason: str) -> None:
        super().__init__(group, op, peer, reason)
        self.group, self.op, self.peer, self.reason = group, op, peer, reason

    def __str__(self) -> str:
        whom = "" if self.peer is None else f" with rank {self.peer}"
        return f"group {self.group}: {self.op}{whom} failed: {self.reason}"


class Handle:
    """An op under way. It holds the op's tensors; ``wait`` finishes it, once, and raises GroupError if it failed.

    ``finish(timeout)`` blocks until the op is over and raises RuntimeError or TimeoutError if it can't be.
    """

    def __init__(self, group: Group, op: str, peer: int | None, finish: Finish) -> None:
        self._group, self._op, self._peer = group, op, peer
        self._finish: Finish | None = finish
        self._error: GroupError | None = None
        self._waiting = threading.Lock()  # the first who waits finishes it; whoever comes meanwhile waits for that

    def wait(self, timeout: float | None = None) -> None:
        """Block until the op is over, at most ``timeout`` seconds (None: the group's own)."""
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
        begin = time.perf_counter()
        try:
            finish(seconds)
        except Exception as error:
            self._finish, self._error = None, self._group.fault(self._op, self._peer, plain_reason(error, seconds))
            raise self._error from error
        self._finish = None  # not before: an interrupted wait can be taken up again
        self._group.ledger.spent(self._group.axis, self._op, time.perf_counter() - begin)


class Group(ABC):
    """One axis slice of the mesh: ``size`` members, of which this one is ``rank``.

    name     run, axis, index and generation, for messages
    axis     the mesh axis, under which the ledger counts
    timeout  seconds that a wait may take unless it says otherwise
    device   where the tensors of its ops are
    host     the group of the same members for tensors on the host: small ones that the host needs at once
    on_fault called once when an op fails, so that the owner can close its other groups too: ring neighbours of a dead
             member see the death at once, everyone else only by this
    """

    def __init__(
        self, name: str, axis: str, rank: int, size: int, timeout: float, ledger: Ledger | None = None
    ) -> None:
        self.name, self.axis, self.rank, self.size, self.timeout = name, axis, rank, size, timeout
        self.ledger = ledger if ledger is not None else Ledger()
        self.device = torch.device("cpu")
        self.host: Group = self
        self.on_fault: Callable[[], None] = self.abort
        self._closed = False

    # --- collectives: called by every member in the same order ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Handle:
        """``tensor`` becomes the reduction over all members, in place. A ring sends 2(N-1)/N of its bytes a member."""
        self._known(op, "all_reduce")
        return self._run("all_reduce", None, self._all_reduce_bytes(tensor), self._all_reduce, tensor, op)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Handle:
        """``out`` (size * n, ...) becomes the members' tensors (n, ...) one after the other by rank."""
        self._fit(out, tensor, "all_gather: out must hold size x tensor elements")
        return self._run("all_gather", None, (self.size - 1) * nbytes(tensor), self._all_gather, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Handle:
        """``out`` (n, ...) becomes this rank's part of the reduction of the members' tensors (size * n, ...).

        The additions happen in rank order, half-precision tensors are added in fp32.
        """
        self._fit(tensor, out, "reduce_scatter: tensor must hold size x out elements")
        self._known(op, "reduce_scatter")
        sent = (self.size - 1) * nbytes(out)
        return self._run("reduce_scatter", None, sent, self._reduce_scatter, out, tensor, op)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int] = (), in_splits: Sequence[int] = ()
    ) -> Handle:
        """Part j of ``tensor`` goes to rank j; ``out`` is what the ranks sent here. Splits count rows of dim 0."""
        self._alike(out, tensor, "all_to_all")
        self._same(out.shape[1:], tensor.shape[1:], "all_to_all: a row of out must be like a row of tensor")
        ins, outs = self._splits(tensor, in_splits, "in_splits"), self._splits(out, out_splits, "out_splits")
        sent = row_size(tensor) * tensor.element_size() * (sum(ins) - ins[self.rank])
        return self._run("all_to_all", None, sent, self._all_to_all, out, tensor, outs, ins)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """``tensor`` of ``root`` arrives in everybody's ``tensor``."""
        sent = (self.size - 1) * nbytes(tensor) if self.rank == root else 0
        return self._run("broadcast", root, sent, self._broadcast, tensor, root)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp = "sum") -> Handle:
        """``tensor`` of ``root`` becomes the reduction; the other members' tensors stay as they are."""
        self._known(op, "reduce")
        return self._run("reduce", root, nbytes(tensor) * (self.rank != root), self._reduce, tensor, root, op)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Handle:
        """``out`` (size * n, ...) of ``root`` becomes all members' tensors by rank; the others pass None."""
        if self.rank == root:
            self._fit(out, tensor, "gather: the root's out must hold size x tensor elements")
        return self._run("gather", root, nbytes(tensor) * (self.rank != root), self._gather, out, tensor, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Handle:
        """``out`` becomes this rank's part of the ``tensor`` (size * n, ...) of ``root``; the others pass None."""
        if self.rank == root:
            self._fit(tensor, out, "scatter: the root's tensor must hold size x out elements")
        sent = (self.size - 1) * nbytes(out) if self.rank == root else 0
        return self._run("scatter", root, sent, self._scatter, out, tensor, root)

    def barrier(self) -> Handle:
        """Over once every member has called it."""
        return self._run("barrier", None, 0, self._barrier)

    # --- point to point ---

    def send(self, tensor: Tensor, dst: int, tag: int = 0, count_as: str = "send") -> Handle:
        """Start sending to rank ``dst``; the tensor must not change until the handle was waited for.

        ``count_as`` is the op that the ledger counts it under.
        """
        self._other(dst, tag, "send")
        return self._run(count_as, dst, nbytes(tensor), self._send, tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, count_as: str = "recv") -> Handle:
        """Start receiving from rank ``src`` into ``tensor``, which has the shape and dtype of what was sent."""
        self._other(src, tag, "recv")
        return self._run(count_as, src, nbytes(tensor), self._recv, tensor, src, tag)

    # --- memory, and what takes its time on GPUs ---

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A new tensor (count,) for collectives, without a copy where possible; all members use one, or none.

        Ops on different parts of it may be over only together: what is awaited one by one has a tensor of its own.
        """
        return torch.empty(count, dtype=dtype, device=self.device)

    def connect(self, edges: Iterable[Edge]) -> None:  # noqa: B027  (only GPUs need it, and the next one)
        """Connect over these edges now, where the first op over one would have to; every member names the same.

        Raises GroupError.
        """

    def synchronize(self, timeout: float | None = None) -> None:  # noqa: B027
        """Block until every op that was waited for is over: on GPUs it may not be. Raises GroupError if one failed."""

    # --- faults ---

    @abstractmethod
    def abort(self) -> None:
        """Close the group now: blocked waits raise here, and at the peers those for this member.

        Safe from any thread, and more than once.
        """

    def fault(self, op: str, peer: int | None, reason: str) -> GroupError:
        """The error for a failed op, after the group and its owner's other groups have been closed."""
        first, self._closed = not self._closed, True
        if first:
            self.on_fault()
        return GroupError(self.name, op, peer, reason)

    # --- for backends: start the op and return what finishes it ---

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        """What an all_reduce sends from here: a ring's bytes, unless a backend does otherwise."""
        return 2 * (self.size - 1) * nbytes(tensor) // self.size

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish: ...
    @abstractmethod
    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish: ...
    @abstractmethod
    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish: ...
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

    def _run(self, op: str, peer: int | None, sent: int, start: Callable[..., Finish], *args: object) -> Handle:
        if peer is not None and not 0 <= peer < self.size:
            raise ValueError(f"group {self.name}: {op}: rank {peer} is not one of its {self.size} members")
        if self._closed:
            raise GroupError(self.name, op, peer, "the group was closed after an earlier fault")
        begin = time.perf_counter()
        try:
            finish = start(*args)
        except (RuntimeError, OSError) as error:
            raise self.fault(op, peer, plain_reason(error, self.timeout)) from error
        self.ledger.record(self.axis, op, sent)
        self.ledger.spent(self.axis, op, time.perf_counter() - begin)
        return Handle(self, op, None if peer == self.rank else peer, finish)  # who is the root waits for everybody

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


Groups = tuple[Group, ...]
