"""What one member of a group on one node posts to the others, what has arrived from them, and waiting for it."""

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

from raypar.actors.collective.shm.flow import AHEAD, Flow
from raypar.actors.collective.shm.links import INLINE, NOTHING, Link, Message
from raypar.actors.collective.shm.slabs import SLAB, Pool

_MOST = 16  # pieces that all flows together may have posted and not finished: beyond, newer ones wait
_LOOKS = 200  # before going to sleep, about 150 us: to be woken takes 30 us or more
LENT = 1 << 17  # bytes of a window's piece: below, to copy it is cheaper than to be told that it was read
_WINDOW_BLOCK = 4 * SLAB  # bytes; nothing is copied to be given, so what counts is that each block costs messages
_BELL = -1 << 62  # the channel of a message without contents: something that was lent is given back

_DAY = 86_400.0  # seconds; a poll takes no more than some weeks
_NOBODY: Mapping[int, object] = {}

Parts = dict[int, Tensor]  # by peer
Use = Callable[[Parts], object]


class Mailbox:
    """Pieces of tensors, each in a channel: contiguous, of one dim, and of one dtype in a channel.

    links  to the other members, by rank

    No thread works behind the caller's back: flows move on whenever one is started or waited for. Who waits sleeps in
    the kernel, so that its core is free for the one it waits for. Safe to use from several threads.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank, self._links = rank, links
        self._pool = Pool(len(links) + 1)
        self._arrived: dict[int, dict[int, deque[Message]]] = {}  # by channel and sender; none is empty
        self._unsent = set[int]()  # peers to whom something posted is not on its way
        self._flows: list[Flow] = []  # those that are not over, in the order of their start
        self.lock = threading.RLock()  # taken by who posts several pieces in one go, too
        self._changed = threading.Condition(self.lock)
        self._aborted = False
        self._watched = False  # whether a thread sleeps on the links, and has to be told of what others did
        self._full: Set[int] = frozenset()  # peers whose links it watches for room to send, too
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrivals, self._poller = select.poll(), select.poll()  # the second one for who sleeps
        self._poller.register(self._bell, select.POLLIN)
        self._peers = {link.fileno(): peer for peer, link in links.items()}
        for link in links.values():
            self._arrivals.register(link, select.POLLIN)
            self._poller.register(link, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._bell)

    def abort(self) -> None:
        """Close every link, for both ends; who waits is woken. Safe from any thread."""
        self._aborted = True
        for link in self._links.values():
            link.shut()

    def start(self, flow: Flow) -> None:
        """Do what can be done of it at once; it moves on with every other start or wait."""
        with self.lock:
            self._flows.append(flow)
            self._advance()

    def await_pieces(self, flow: Flow) -> None:
        """Start a flow that only takes: there is nothing to do until somebody waits."""
        with self.lock:
            self._flows.append(flow)

    def wait(self, flow: Flow, seconds: float) -> None:
        """Return when the flow is over; raise what went wrong in it: TimeoutError, RuntimeError if a peer is lost."""
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
        """A new tensor (uint8) of ``count`` bytes that peers can read where it stands."""
        with self.lock:
            return self._pool.window(count)

    def is_window(self, tensor: Tensor) -> bool:
        return self._pool.window_of(tensor) is not None

    def block(self, tensor: Tensor) -> int:
        """Bytes of a piece of a tensor that all members have in a window, or none of them."""
        return _WINDOW_BLOCK if self.is_window(tensor) else SLAB

    # --- for the steps of a flow ---

    def post(
        self, channel: int, total: int, part: Tensor, peers: Iterable[int], *, lend: bool = True, ring: bool = True
    ) -> None:
        """Give the peers a piece of what is ``total`` bytes in all.

        It may change as soon as it is ``given``: at once, unless it is of a window, so large that it is read there, and
        may be lent. Then who has read it rings; not needed (``ring``) if what he posts next says so too.
        """
        if part.stride(0) != 1:  # of a single element, which is contiguous with any stride
            part = part.as_strided(part.shape, (1,))
        data = part.view(torch.uint8)
        count = data.numel()
        with self.lock:
            if count <= INLINE:
                for peer in peers:
                    self._say(peer, channel, total, data)
                return
            window = self._pool.window_of(data) if lend and count >= LENT else None
            slab, start = (window, data.data_ptr() - window.data.data_ptr()) if window else self._pool.put(data)
            awaited = ring and window is not None
            for peer in peers:
                slab.lend(peer)
                self._links[peer].lend(channel, total, slab, start, count, self._pool.fd(slab), awaited)
                self._note(peer)

    def have(self, channel: int, peers: Iterable[int]) -> bool:
        """Whether each of the peers has posted a piece that was not taken yet."""
        return all(map(self._arrived.get(channel, _NOBODY).__contains__, peers))

    def take(self, channel: int, totals: Mapping[int, int], dtype: torch.dtype, use: Use) -> None:
        """Let ``use`` have the next piece of each peer, whose pieces have ``totals[peer]`` bytes in all.

        Raises RuntimeError if a peer gives more or less.
        """
        pieces = {peer: self._next(peer, channel) for peer in totals}
        for peer, piece in pieces.items():
            if piece.total != totals[peer]:
                raise RuntimeError(f"rank {peer} gives {piece.total} bytes, rank {self._rank} takes {totals[peer]}")
        use({peer: piece.data.view(dtype) for peer, piece in pieces.items()})
        for peer, piece in pieces.items():
            if piece.slab is not None:
                piece.slab.give_back(self._rank)
                if piece.awaited:
                    self._say(peer, _BELL, 0, NOTHING)

    def sent(self, peers: Iterable[int]) -> bool:
        """Whether everything posted to the peers is on its way."""
        return self._unsent.isdisjoint(peers)

    def given(self, tensor: Tensor) -> bool:
        """Whether nobody will read the tensor any more."""
        window = self._pool.window_of(tensor)
        return window is None or window.free

    # --- inside; under the lock ---

    def _say(self, peer: int, channel: int, total: int, data: Tensor) -> None:
        self._links[peer].send(channel, total, data)
        self._note(peer)

    def _note(self, peer: int) -> None:
        if not self._links[peer].idle:
            self._unsent.add(peer)

    def _over(self, flow: Flow) -> bool:
        """Whether it came to a good end; raise if it can't any more."""
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

    def _advance(self, awaited: Flow | None = None) -> None:
        """Read and move on until nothing is left to do, or until the flow that is waited for is over.

        Within a round nothing is read: of two flows in one channel the first must not miss what the second one sees.
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
            os.eventfd_write(self._bell, 1)  # what moved may be what the sleeper waits for; and only it sees new room

    def _round(self) -> bool:
        """Let every flow move on; whether one did. The oldest always may, so that none waits for room forever."""
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
        """Sleep until something arrives, or there is room for something to be sent."""
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
            if not self._links[peer].lost:  # another thread may have read its end
                self._poller.modify(self._links[peer], select.POLLIN)
        for fd, _ in ready:
            if fd in self._peers:
                self._read(self._peers[fd])
            else:
                os.eventfd_read(fd)

    def _look(self) -> list[tuple[int, int]]:
        """What has arrived, or arrives in a moment; any other process that wants this core gets it in between."""
        for _ in range(_LOOKS):
            if ready := self._poller.poll(0):
                return ready
            os.sched_yield()
        return []

    def _read(self, peer: int) -> None:
        """One message that has arrived, or that the peer is lost."""
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
