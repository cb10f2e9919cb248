"""Connections between the members of a group that live on one node: local sockets that carry small messages and slabs.

A message stands in a channel; those of one sender in one channel arrive in the order in which they were sent. Its bytes
are in it if they are few, else in a slab. A member that dies closes its sockets, which its peers see at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from raypar.actors.collective.shm.slabs import Slab

INLINE = 1 << 13  # bytes that a message carries itself: below, two copies through the kernel are cheaper than a slab
NOTHING = torch.empty(0, dtype=torch.uint8)  # what a bell carries
_HEAD = struct.Struct("<qqiqqi")  # channel, total, slab (or _NO_SLAB), start in it, bytes, whether the lender waits
_NO_SLAB = -1
_HELLO = struct.Struct("<i")
_ROOM = INLINE + _HEAD.size
_FD_ROOM = socket.CMSG_SPACE(4)
_BUFFER = 1 << 22  # asked of the system for what is sent and not yet read; it may give less


class Message(NamedTuple):
    """A piece (uint8) of ``total`` bytes that a peer gives, perhaps in a slab of it that has to be given back.

    awaited  whether the peer has to be told when it was
    """

    data: Tensor
    total: int
    slab: Slab | None
    awaited: bool = False


def place() -> str:
    """Where this process can be reached by local sockets and descriptors; "" where it can't (not on Linux)."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"
    except OSError:
        return ""


def same_place(store: Store, rank: int, size: int) -> bool:
    """Whether all members can reach each other so; every member has to ask."""
    here = place()
    store.set(f"place/{rank}", here)
    return all(store.get(f"place/{peer}").decode() == here for peer in range(size)) and bool(here)


class Link:
    """The connection to one peer. ``lost``: the peer has closed it, or died."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.lost = False
        self._broken = False  # what the peer sent before can still be read
        self._socket = sock
        self._slabs: dict[int, Slab] = {}  # the peer's
        self._known: set[int] = set()  # own slabs that the peer has
        self._queue: deque[tuple[bytes, int | None]] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def idle(self) -> bool:
        """Whether everything sent is on its way."""
        return not self._queue

    def send(self, channel: int, total: int, data: Tensor) -> None:
        """Send at most INLINE bytes (uint8); the tensor may change as soon as this returns."""
        self._put(_HEAD.pack(channel, total, _NO_SLAB, 0, data.numel(), 0) + data.numpy().tobytes(), None)

    def lend(self, channel: int, total: int, slab: Slab, start: int, count: int, fd: int, awaited: bool) -> None:
        """Let the peer read ``count`` bytes of a slab, whose descriptor it gets if it does not know it yet."""
        new = slab.number not in self._known
        self._known.add(slab.number)
        self._put(_HEAD.pack(channel, total, slab.number, start, count, awaited), fd if new else None)

    def flush(self) -> None:
        """Go on with what could not be sent because the peer did not read."""
        while self._queue and not self._broken and self._try(*self._queue[0]):
            self._queue.popleft()

    def receive(self) -> tuple[int, Message] | None:
        """The next message that has arrived, with its channel; None if there is none, or none any more."""
        try:
            raw, control, _, _ = self._socket.recvmsg(_ROOM, _FD_ROOM)
        except (BlockingIOError, ConnectionResetError):
            return None  # a reset is said once, ahead of what the peer had sent before it closed
        except OSError:
            raw, control = b"", []
        if not raw:
            self.lost = True
            return None
        channel, total, number, start, count, awaited = _HEAD.unpack_from(raw)
        for _, _, packed in control:
            (fd,) = struct.unpack("i", packed[:4])
            self._slabs[number] = Slab(fd, number)
            os.close(fd)
        if number == _NO_SLAB:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=_HEAD.size) if count else NOTHING
            return channel, Message(data, total, None)
        if number not in self._slabs:
            raise RuntimeError("this process has no descriptor left for shared memory: raise ulimit -n")
        slab = self._slabs[number]
        return channel, Message(slab.data[start : start + count], total, slab, bool(awaited))

    def shut(self) -> None:
        """Close the connection for both ends; what waits for it wakes up. Safe from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def _put(self, raw: bytes, fd: int | None) -> None:
        if self._queue or not self._try(raw, fd):
            self._queue.append((raw, fd))
        if self._broken:
            raise RuntimeError("the connection was closed")

    def _try(self, raw: bytes, fd: int | None) -> bool:
        """Send one message, unless there is no room, or nobody who would read it."""
        try:
            if fd is None:
                self._socket.send(raw)
            else:
                socket.send_fds(self._socket, [raw], [fd])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._broken = True
            return False
        return True


def connect(store: Store, rank: int, size: int, seconds: float) -> dict[int, Link]:
    """A link to every other member, by rank; they meet in the store, whose keys must be new.

    A listener's name is random and known through the store alone. Raises TimeoutError or OSError.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"raypar-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")  # no file: the name goes with the socket
        listener.listen(size)
        store.set(f"local/{rank}", name)
        earlier = [f"local/{peer}" for peer in range(rank)]
        store.wait(earlier, timedelta(seconds=max(0.001, deadline - time.monotonic())))
        links = {peer: _dial(store.get(key).decode(), rank) for peer, key in enumerate(earlier)}
        while len(links) < size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, link = _accept(listener)
            links[peer] = link
    return dict(sorted(links.items()))


def _dial(name: str, rank: int) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"\0{name}")
    sock.send(_HELLO.pack(rank))
    return Link(sock)


def _accept(listener: socket.socket) -> tuple[int, Link]:
    sock, _ = listener.accept()
    sock.settimeout(listener.gettimeout())
    hello = sock.recv(_HELLO.size)
    if not hello:
        raise ConnectionError("a member closed the connection while it was made")
    return int(_HELLO.unpack(hello)[0]), Link(sock)
