"""Copies of snapshots in the memory of another node: an actor sends its own to a buddy over TCP, during its steps.

A copy arrives in a memory file like that of the snapshot itself. The first bytes of the file, the length of its header,
come last: they are sent once the receiver has confirmed the rest. So an incomplete copy, or one whose source was
overwritten while it was sent, is never taken for a snapshot.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import cycle

from raypar.actors.checkpoint.snapshot_address import Recipient, SnapshotOwner
from raypar.actors.machine.memory_files import reserve

SILENCE = 10.0  # seconds without progress after which a copy's connection is given up
_LENGTH = struct.Struct("<Q")
_TOKEN = 32  # bytes
_ACK = b"!"
_NOT_WHOLE = bytes(_LENGTH.size)
_PIECE = 1 << 22  # bytes that are sent at a time
_HELLO = 2.0  # seconds in which a sender must send its token
_ENDING = 2.5  # seconds in which a thread ends after its connection is closed


class BuddyCopyReceiver:
    """Receives copies of other actors' snapshots, in threads.

    Args:
        host: The address of this node that others reach.
        expected: The owners of the copies, by their tokens.
        files: Number of memory files of each owner; copies are written into them in turn.

    Attributes:
        port: The port on which it listens.

    Raises:
        OSError: It can't listen there.
    """

    def __init__(self, host: str, expected: Mapping[str, SnapshotOwner], files: int) -> None:
        self._files = {token: tuple(os.memfd_create("raypar-snapshot") for _ in range(files)) for token in expected}
        self._expected = dict(expected)
        self._listener = socket.create_server((host, 0), backlog=len(expected) + 1)
        self.port = int(self._listener.getsockname()[1])
        self._connections, self._threads = list[socket.socket](), list[threading.Thread]()
        self._lock, self._is_closed = threading.Lock(), False
        self._start(self._accept)

    def files(self) -> dict[SnapshotOwner, tuple[int, ...]]:
        """Return the descriptors of the files, by owner of the copies. They end with the receiver."""
        return {share: self._files[token] for token, share in self._expected.items()}

    def close(self) -> None:
        """Stop receiving. A copy under way is lost."""
        with self._lock:
            self._is_closed = True
            for one in (self._listener, *self._connections):
                _shut(one)
        for thread in self._threads:
            thread.join(_ENDING)
        # A living thread might write to the next file that gets one of these descriptors.
        if not any(thread.is_alive() for thread in self._threads):
            for files in self._files.values():
                for file in files:
                    os.close(file)
        self._files = {}

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="raypar-copies", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        """Start a thread for each expected connection, until all are there or the receiver is closed."""
        waiting = dict(self._files)
        with self._listener, suppress(OSError):
            while waiting:
                connection, _ = self._listener.accept()
                token = _token_of(connection)
                with self._lock:
                    files = None if self._is_closed else waiting.pop(token, None)
                    if files is None:
                        connection.close()
                    else:
                        self._connections.append(connection)
                        self._start(_receive, connection, files)


class BuddyCopySender:
    """Sends copies of an actor's snapshots to its buddy, one at a time, in a thread.

    Args:
        to: The buddy.

    Attributes:
        lost: Why it stopped sending; "" if it has not.
    """

    def __init__(self, to: Recipient) -> None:
        self._to, self.lost = to, ""
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_stale = False

    @property
    def is_sending(self) -> bool:
        """Whether a copy is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, file: int) -> bool:
        """Begin to send the snapshot in a memory file, which must not change until it is sent or ``give_up`` is called.

        Returns:
            Whether it begins; False if the previous copy is under way, or it has stopped sending.
        """
        if self.lost or self.is_sending:
            return False
        self._is_stale = False
        self._thread = threading.Thread(target=self._run, args=(file,), name="raypar-copy", daemon=True)
        self._thread.start()
        return True

    def wait(self, seconds: float) -> float:
        """Wait at most so many seconds until the copy under way has arrived; return the seconds waited."""
        start = time.perf_counter()
        if self._thread is None or not self.is_sending:
            return 0.0
        self._thread.join(seconds)
        return time.perf_counter() - start

    def give_up(self) -> None:
        """Let the copy under way stay incomplete: its snapshot is about to be overwritten."""
        self._is_stale = True

    def close(self) -> None:
        """Stop sending. A copy under way is lost."""
        self._is_stale, self.lost = True, self.lost or "it was ended"
        if self._socket is not None:
            _shut(self._socket)
        if self._thread is not None:
            self._thread.join(_ENDING)
        if self._socket is not None and not self.is_sending:
            self._socket.close()

    def _run(self, file: int) -> None:
        try:
            self._send(file)
        except OSError as error:
            why = "it makes no progress" if isinstance(error, TimeoutError) else error.strerror or str(error)
            self.lost = self.lost or why
            if self._socket is not None:
                self._socket.close()

    def _send(self, file: int) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._to[:2], timeout=SILENCE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(self._to.token.encode())
        connection, size = self._socket, os.fstat(file).st_size
        if self.lost:
            raise ConnectionAbortedError(self.lost)
        connection.sendall(_LENGTH.pack(size))
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as content, memoryview(content) as view:
            for start in range(_LENGTH.size, size, _PIECE):
                with view[start : min(start + _PIECE, size)] as piece:
                    connection.sendall(piece)
        _exactly(connection, len(_ACK))
        connection.sendall(_NOT_WHOLE if self._is_stale else os.pread(file, _LENGTH.size, 0))
        _exactly(connection, len(_ACK))


def send_copy_once(file: int, to: Recipient) -> None:
    """Send one snapshot, and wait until it has arrived.

    Args:
        file: The memory file with the snapshot, which must not change meanwhile.
        to: The receiver, which expects it.

    Raises:
        OSError: It did not arrive.
    """
    sender = BuddyCopySender(to)
    sender.begin(file)
    while sender.is_sending:
        sender.wait(SILENCE)
    lost = sender.lost
    sender.close()
    if lost:
        raise ConnectionError(f"a snapshot did not arrive at {to.host}: {lost}")


def _receive_copy(file: int, connection: socket.socket, size: int) -> None:
    """Receive a copy of so many bytes into a memory file. Raises OSError if the connection is lost."""
    if os.fstat(file).st_size == size:
        os.pwrite(file, _NOT_WHOLE, 0)
    else:
        os.ftruncate(file, 0)
        reserve(file, 0, size)
    with mmap.mmap(file, size) as content, memoryview(content) as view, view[_LENGTH.size :] as rest:
        _fill(rest, connection)
    connection.sendall(_ACK)
    os.pwrite(file, _exactly(connection, _LENGTH.size), 0)
    connection.sendall(_ACK)


def _token_of(connection: socket.socket) -> str:
    """Receive the token of a sender; "" if it sends none."""
    connection.settimeout(_HELLO)
    try:
        return _exactly(connection, _TOKEN).decode(errors="replace")
    except OSError:
        return ""


def _receive(connection: socket.socket, files: tuple[int, ...]) -> None:
    """Receive copies into files in turn, until the connection is closed."""
    with suppress(OSError), connection:
        for file in cycle(files):
            connection.settimeout(None)
            (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
            connection.settimeout(SILENCE)
            _receive_copy(file, connection, size)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """Receive so many bytes. Raises OSError if the connection ends before."""
    found = bytearray(count)
    with memoryview(found) as view:
        _fill(view, connection)
    return found


def _fill(buffer: memoryview, connection: socket.socket) -> None:
    done = 0
    while done < len(buffer):
        with buffer[done:] as rest:
            count = connection.recv_into(rest)
        if not count:
            raise ConnectionResetError("the connection was closed")
        done += count


def _shut(one: socket.socket) -> None:
    """Wake the thread that waits for a socket."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
