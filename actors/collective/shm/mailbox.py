"""The mailbox of one member: posts segments to peers, stores what they posted, and advances the ops in progress."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set

import torch
from torch import Tensor

from raypar.actors.collective.shm.flow import AHEAD, OpInProgress
from raypar.actors.collective.shm.links import INLINE, NOTHING, Message, PeerConnection
from raypar.actors.collective.shm.slabs import SLAB, Pool

_MOST = 16  # unfinished segments that all flows together may have posted: beyond that, newer flows wait
_LOOKS = 200  # polls before sleeping, about 150 us: a wake-up takes 30 us or more
SHARED = 1 << 17  # bytes from which peers read a segment in its window: below, a copy is cheaper than the notice
_WINDOW_BLOCK = 4 * SLAB  # bytes; nothing is copied, so only the number of messages matters
_BELL = -1 << 62  # channel of the empty message that reports that a shared segment was read

_DAY = 86_400.0  # seconds; poll() accepts no timeout beyond some weeks
_NOBODY: Mapping[int, object] = {}

Parts = dict[int, Tensor]  # by peer
Use = Callable[[Parts], object]


class Mailbox:
    """Exchanges segments of tensors with peers.

    A segment is contiguous and 1-d and belongs to a channel, which has one dtype.

    No thread works in the background: flows advance whenever one is started or waited for. A waiting thread sleeps in
    the kernel, which leaves its core to the process that it waits for. Thread-safe.

    Args:
        rank: Rank of this member.
        links: Links to the other members, by rank.
    """

    def __init__(self, rank: int, links: Mapping[int, PeerConnection]) -> None:
        self._rank, self._links = rank, links
        self._pool = Pool(len(links) + 1)
        self._arrived: dict[int, dict[int, deque[Message]]] = {}  # by channel and sender; no entry is empty
        self._unsent = set[int]()  # peers whose link has queued messages
        self._flows: list[OpInProgress] = []  # those in progress, oldest first
        self.lock = threading.RLock()  # callers also take it to post several segments in a row
        self._changed = threading.Condition(self.lock)
        self._aborted = False
        self._watched = False  # whether a thread sleeps on the links and must be woken after changes
        self._full: Set[int] = frozenset()  # peers whose links it also watches for space to send
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrivals, self._poller = select.poll(), select.poll()  # the second is for the sleeping thread
        self._poller.register(self._bell, select.POLLIN)
        self._peers = {link.fileno(): peer for peer, link in links.items()}
        for link in links.values():
            self._arrivals.register(link, select.POLLIN)
            self._poller.register(link, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._bell)

    def abort(self) -> None:
        """Close every link at both ends and wake all waiting threads. Thread-safe."""
        self._aborted = True
        for link in self._links.values():
            link.shut()

    def start(self, flow: OpInProgress) -> None:
        """Start a flow and advance it as far as possible now. Later starts and waits advance it further."""
        with self.lock:
            self._flows.append(flow)
            self._advance()

    def await_segments(self, flow: OpInProgress) -> None:
        """Start a flow that only takes segments, without advancing it: it advances when it is waited for."""
        with self.lock:
            self._flows.append(flow)

    def wait(self, flow: OpInProgress, seconds: float) -> None:
        """Block until a flow is over.

        Args:
            flow: The flow, which must have been started.
            seconds: Timeout.

        Raises:
            TimeoutError: The flow missed the deadline.
            RuntimeError: The group was aborted or a needed peer is lost. Other errors of the flow are raised as they
                are.
        """
        if flow.over and flow.error is None:
            return
        deadline = time.monotonic() + seconds
        with self.lock:
            self._advance(flow)
            while not self._over(flow):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if self._watched:
                    self._changed.wait(left)
                else:
                    self._watch(left)
                self._advance(flow)

    def window(self, count: int) -> Tensor:
        """Allocate a tensor (count,) of uint8 that peers can read in place."""
        with self.lock:
            return self._pool.window(count)

    def is_window(self, tensor: Tensor) -> bool:
        return self._pool.window_of(tensor) is not None

    def block(self, tensor: Tensor) -> int:
        """Return the size in bytes of a tensor's segments. Either all members have the tensor in a window, or none."""
        return _WINDOW_BLOCK if self.is_window(tensor) else SLAB

    # --- called by the steps of flows ---

    def post(
        self, channel: int, total: int, part: Tensor, peers: Iterable[int], *, shares: bool = True, ring: bool = True
    ) -> None:
        """Post a segment of a tensor to peers.

        The segment may change once ``given`` returns true for it. That is at once, unless the segment is shared:
        then peers read it in place, in its window.

        Args:
            channel: Channel of the segment.
            total: Bytes of the whole tensor.
            part: The segment.
            peers: Ranks of the receivers.
            shares: Whether peers may read a segment of at least SHARED bytes in its window.
            ring: Whether peers send a notice when they have read a shared segment. Not needed if their next post
                implies it.
        """
        if part.stride(0) != 1:  # a single element, which counts as contiguous with any stride
            part = part.as_strided(part.shape, (1,))
        data = part.view(torch.uint8)
        count = data.numel()
        with self.lock:
            if count <= INLINE:
                for peer in peers:
                    self._send(peer, channel, total, data)
                return
            window = self._pool.window_of(data) if shares and count >= SHARED else None
            slab, start = (window, data.data_ptr() - window.data.data_ptr()) if window else self._pool.put(data)
            awaited = ring and window is not None
            for peer in peers:
                slab.share(peer)
                self._links[peer].share(channel, total, slab, start, count, self._pool.fd(slab), awaited)
                self._note(peer)

    def have(self, channel: int, peers: Iterable[int]) -> bool:
        """Return whether every peer has a segment in the channel that has not been taken."""
        return all(map(self._arrived.get(channel, _NOBODY).__contains__, peers))

    def take(self, channel: int, totals: Mapping[int, int], dtype: torch.dtype, use: Use) -> None:
        """Take the next segment of each peer in ``totals`` and pass them to ``use``.

        Args:
            channel: Channel of the segments.
            totals: Expected bytes of each peer's whole tensor.
            dtype: dtype of the segments.
            use: Called with the segments by rank; it must not keep them.

        Raises:
            RuntimeError: A peer's tensor has another size.
        """
        segments = {peer: self._next(peer, channel) for peer in totals}
        for peer, segment in segments.items():
            if segment.total != totals[peer]:
                raise RuntimeError(f"rank {peer} gives {segment.total} bytes, rank {self._rank} takes {totals[peer]}")
        use({peer: segment.data.view(dtype) for peer, segment in segments.items()})
        for peer, segment in segments.items():
            if segment.slab is not None:
                segment.slab.give_back(self._rank)
                if segment.awaited:
                    self._send(peer, _BELL, 0, NOTHING)

    def sent(self, peers: Iterable[int]) -> bool:
        """Return whether everything posted to the peers has been handed to the kernel."""
        return self._unsent.isdisjoint(peers)

    def given(self, tensor: Tensor) -> bool:
        """Return whether all peers have read the tensor."""
        window = self._pool.window_of(tensor)
        return window is None or window.free

    # --- internal; the caller holds the lock ---

    def _send(self, peer: int, channel: int, total: int, data: Tensor) -> None:
        self._links[peer].send(channel, total, data)
        self._note(peer)

    def _note(self, peer: int) -> None:
        if not self._links[peer].idle:
            self._unsent.add(peer)

    def _over(self, flow: OpInProgress) -> bool:
        """Return whether a flow completed; raise its error, or one if it cannot complete any more."""
        if flow.error is not None:
            raise flow.error
        if flow.over:
            return True
        if self._aborted:
            raise RuntimeError("the group was aborted")
        for peer in flow.peers:
            if self._links[peer].lost and flow.needs(peer):
                raise RuntimeError(f"rank {peer} closed the connection")
        return False

    def _advance(self, awaited: OpInProgress | None = None) -> None:
        """Read messages and advance flows until nothing is left to do, or until the ``awaited`` flow is over.

        Nothing is read within a round: of two flows in one channel, the first must not miss a segment that the second
        one sees.
        """
        moved, some = True, False
        while moved and self._flows and not (awaited and awaited.over):
            for peer in tuple(self._unsent):
                self._links[peer].flush()
                if self._links[peer].idle:
                    self._unsent.remove(peer)
            while ready := self._arrivals.poll(0):
                for fd, _ in ready:
                    self._read(self._peers[fd])
            moved = self._round()
            self._flows = [flow for flow in self._flows if not flow.over]
            some = some or moved
        if self._watched and (some or not self._unsent <= self._full):
            # The sleeping thread's flow may have advanced, and only that thread can watch for space to send.
            os.eventfd_write(self._bell, 1)

    def _round(self) -> bool:
        """Advance every flow once, and return whether any did.

        The oldest flow may always take memory, so none waits forever.
        """
        moved, held, waiting = False, 0, set[tuple[int, int]]()
        for flow in self._flows:
            if flow.queue in waiting:
                continue
            moved = flow.advance(AHEAD if held < _MOST else 0) or moved
            held += flow.ahead
            if flow.queue is not None and not flow.over:
                waiting.add(flow.queue)
        return moved

    def _watch(self, seconds: float) -> None:
        """Sleep until a message arrives or a full link has space."""
        self._full = {peer for peer in self._unsent if not self._links[peer].lost}
        for peer in self._full:
            self._poller.modify(self._links[peer], select.POLLIN | select.POLLOUT)
        self._watched = True
        self.lock.release()
        try:
            ready = self._look() or self._poller.poll(math.ceil(min(seconds, _DAY) * 1000))
        finally:
            self.lock.acquire()
            self._watched = False
            self._changed.notify_all()
        for peer in self._full:
            if not self._links[peer].lost:  # another thread may have noticed its loss
                self._poller.modify(self._links[peer], select.POLLIN)
        for fd, _ in ready:
            if fd in self._peers:
                self._read(self._peers[fd])
            else:
                os.eventfd_read(fd)

    def _look(self) -> list[tuple[int, int]]:
        """Poll for a short while, and yield the core to any other process that wants it in between."""
        for _ in range(_LOOKS):
            if ready := self._poller.poll(0):
                return ready
            os.sched_yield()
        return []

    def _read(self, peer: int) -> None:
        """Read one message from a peer, or notice that it is lost."""
        link = self._links[peer]
        if link.lost:
            return
        if (arrived := link.receive()) is not None and arrived[0] != _BELL:
            self._arrived.setdefault(arrived[0], {}).setdefault(peer, deque()).append(arrived[1])
        if link.lost:
            self._arrivals.unregister(link)
            self._poller.unregister(link)

    def _next(self, peer: int, channel: int) -> Message:
        by_peer = self._arrived[channel]
        queue = by_peer[peer]
        message = queue.popleft()
        if not queue:
            del by_peer[peer]
            if not by_peer:
                del self._arrived[channel]
        return message
