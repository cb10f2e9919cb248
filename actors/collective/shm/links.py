"""Connections between the members of a group on one node: local sockets that carry small messages and slabs.

A message belongs to a channel. The messages of one sender in one channel arrive in the order in which they were sent.
A message carries a few bytes itself; more bytes are in a slab. A member that dies closes its sockets, which its peers
notice at once.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.shm.slabs import Slab

INLINE = 1 << 13  # bytes up to which a message carries its data: two kernel copies are then cheaper than a slab
NOTHING = torch.empty(0, dtype=torch.uint8)  # the data of a message without contents
_HEAD = struct.Struct("<qqiqqi")  # channel, total, slab (or _NO_SLAB), start in it, bytes, awaited
_NO_SLAB = -1
_MESSAGE_SIZE = INLINE + _HEAD.size
_FD_SIZE = socket.CMSG_SPACE(4)
_BUFFER = 1 << 22  # bytes of send buffer to request; the system may grant less


class Message(NamedTuple):
    """A segment of a tensor from a peer.

    Attributes:
        data: The segment (uint8).
        total: Bytes of the whole tensor.
        slab: The peer's slab that holds ``data`` and has to be given back; None if the message carried the data itself.
        awaited: Whether to notify the peer when the slab is given back.
    """

    data: Tensor
    total: int
    slab: Slab | None
    awaited: bool = False


class PeerConnection:
    """The connection to one peer.

    Args:
        sock: The connected socket (SOCK_SEQPACKET).
        members: Number of members of the group.

    Attributes:
        lost: Whether the peer has closed the connection or died.
    """

    def __init__(self, sock: socket.socket, members: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.lost = False
        self._broken = False  # sending fails, but what the peer sent earlier can still be read
        self._socket, self._members = sock, members
        self._slabs: dict[int, Slab] = {}  # the peer's slabs, by number
        self._known: set[int] = set()  # numbers of own slabs that the peer has mapped
        self._queue: deque[tuple[bytes, int | None]] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def idle(self) -> bool:
        """Whether everything sent has been handed to the kernel."""
        return not self._queue

    def send(self, channel: int, total: int, data: Tensor) -> None:
        """Send a message that carries its data. The tensor may change as soon as this returns.

        Args:
            channel: Channel of the message.
            total: Bytes of the whole tensor.
            data: The segment (uint8), at most INLINE bytes.
        """
        self._put(_HEAD.pack(channel, total, _NO_SLAB, 0, data.numel(), 0) + data.numpy().tobytes(), None)

    def share(self, channel: int, total: int, slab: Slab, start: int, count: int, fd: int, awaited: bool) -> None:
        """Let the peer read part of a slab.

        Args:
            channel: Channel of the message.
            total: Bytes of the whole tensor.
            slab: The slab.
            start: Offset of the part in the slab, in bytes.
            count: Bytes of the part.
            fd: The slab's descriptor, passed on the first time.
            awaited: Whether the peer has to notify this member when it has read the part.
        """
        new = slab.number not in self._known
        self._known.add(slab.number)
        self._put(_HEAD.pack(channel, total, slab.number, start, count, awaited), fd if new else None)

    def flush(self) -> None:
        """Send what was queued because the socket was full."""
        while self._queue and not self._broken and self._try(*self._queue[0]):
            self._queue.popleft()

    def receive(self) -> tuple[int, Message] | None:
        """Return the next message that has arrived, with its channel; None if there is none or the peer is lost."""
        try:
            raw, control, _, _ = self._socket.recvmsg(_MESSAGE_SIZE, _FD_SIZE)
        except (BlockingIOError, ConnectionResetError):
            return None  # a reset is reported once, before the data that the peer sent before it closed
        except OSError:
            raw, control = b"", []
        if not raw:
            self.lost = True
            return None
        channel, total, number, start, count, awaited = _HEAD.unpack_from(raw)
        for _, _, packed in control:
            (fd,) = struct.unpack("i", packed[:4])
            self._slabs[number] = Slab(fd, number, self._members)
            os.close(fd)
        if number == _NO_SLAB:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=_HEAD.size) if count else NOTHING
            return channel, Message(data, total, None)
        if number not in self._slabs:
            raise RuntimeError("this process has no descriptor left for shared memory: raise ulimit -n")
        slab = self._slabs[number]
        return channel, Message(slab.data[start : start + count], total, slab, bool(awaited))

    def shut(self) -> None:
        """Close the connection at both ends, which wakes threads that wait for it. Thread-safe."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed by the peer

    def _put(self, raw: bytes, fd: int | None) -> None:
        if self._queue or not self._try(raw, fd):
            self._queue.append((raw, fd))
        if self._broken:
            raise RuntimeError("the connection was closed")

    def _try(self, raw: bytes, fd: int | None) -> bool:
        """Send one message. Returns False if the socket is full or the peer has closed it."""
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
