"""Rendezvous: the members of a group find those of their node, and connect to them by local sockets.

The name of a listening socket is abstract: it vanishes with the socket, but any user of the machine can read it in
/proc/net/unix and connect. So both sides ask the kernel for the other's user (SO_PEERCRED), and a member that connects
must send the listener's token, which only the store has. Other connections are closed, and silent ones delay nobody.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from torch.distributed import Store

from raypar.actors.collective.exchange import gather_objects, left, ranks
from raypar.actors.collective.shm.links import PeerConnection
from raypar.actors.machine.process_identity import own_identity

log = logging.getLogger(__name__)

_TOKEN = 32  # bytes
_HELLO = struct.Struct(f"<i{_TOKEN}s")  # the rank of the member that connects, and the token of the listener
_PEER = struct.Struct("iII")  # pid, uid and gid of a peer
_TIMEVAL = struct.Struct("ll")  # seconds and microseconds
_NAME = "raypar"  # how names of listeners begin
_WAITING = 128  # connections of others that may be pending, besides those of all members


class Registration(NamedTuple):
    """The data that a member gives to the others of its group before they connect.

    Attributes:
        memory_domain: Equal for members that can exchange memory; "" if it can't.
        name: The name of its listening socket; "" for none.
        token: The token that a member that connects must send, in hexadecimal digits.
        extra: Further data for the group.
    """

    memory_domain: str
    name: str = ""
    token: str = ""
    extra: str = ""


class Introduction:
    """The members of a group, as a member knows them before it connects. Close it when this member has connected.

    Args:
        rank: Rank of this member.
        members: The registrations of all members, in rank order.
        listener: This member's listening socket; None where it can exchange memory with no other.

    Attributes:
        nodes: The ranks that can exchange memory with one another, node by node, ordered by the first of each.
        extras: The further data of each member.
    """

    def __init__(self, rank: int, members: Sequence[Registration], listener: socket.socket | None) -> None:
        self._rank, self._members, self._listener = rank, members, listener
        found: dict[str, list[int]] = {}
        for peer, member in enumerate(members):
            found.setdefault(member.memory_domain or f"alone {peer}", []).append(peer)
        self.nodes = list(found.values())
        self.extras = [member.extra for member in members]

    def close(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            self._listener.close()

    def connect(self, among: Sequence[int], seconds: float) -> dict[int, PeerConnection]:
        """Connect to other members: this member dials those of lower rank, and accepts those of higher rank.

        Args:
            among: The ranks of the members to connect with one another, including this one.
            seconds: Timeout.

        Returns:
            A link per other member, by its index in ``among``.

        Raises:
            TimeoutError: A member did not connect in time.
            OSError: A connection failed.
        """
        deadline, own = time.monotonic() + seconds, among.index(self._rank)
        if len(among) == 1:
            return {}
        assert self._listener is not None
        connected = dict[int, socket.socket]()
        with ExitStack() as made:
            for index, peer in enumerate(among[:own]):
                connected[index] = made.enter_context(_dial(peer, self._members[peer], own, deadline))
            token = bytes.fromhex(self._members[self._rank].token)
            acceptor = _Acceptor(self._listener, token, range(own + 1, len(among)))
            for index, sock in acceptor.accept(deadline).items():
                connected[index] = made.enter_context(sock)
            made.pop_all()
        return {index: PeerConnection(sock, len(among)) for index, sock in connected.items()}


def introduce(store: Store, rank: int, size: int, seconds: float, extra: str = "") -> Introduction:
    """Exchange the registrations of the members of a group. Every member must call it.

    Args:
        store: Store for the exchange; its keys must be new.
        rank: Rank of this member.
        size: Number of members.
        seconds: Timeout.
        extra: Further data of this member.

    Raises:
        TimeoutError: A member did not come in time.
        RuntimeError: Another process has the same rank.
        OSError: This member cannot listen.
    """
    own, listener = Registration(own_identity().memory_domain, extra=extra), None
    with ExitStack() as made:
        if own.memory_domain and size > 1:
            own = own._replace(name=f"{_NAME}-{secrets.token_hex(16)}", token=secrets.token_hex(_TOKEN))
            listener = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0{own.name}")
            listener.listen(size + _WAITING)
        members = gather_objects(store, rank, size, json.dumps(own).encode(), seconds)
        made.pop_all()
    return Introduction(rank, [Registration(*json.loads(member)) for member in members], listener)


# --- connections ---


def _dial(peer: int, contact: Registration, rank: int, deadline: float) -> socket.socket:
    """Connect to a member of lower rank, and send this member's rank and the token. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # connect() waits while the queue is full, and AF_UNIX knows no other timeout than this.
        seconds = left(deadline)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
        sock.connect(f"\0{contact.name}")
        if (user := _user_of(sock)) != os.geteuid():
            raise ConnectionError(f"the socket of rank {peer} is one of user {user}")
        sock.send(_HELLO.pack(rank, bytes.fromhex(contact.token)))
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(f"rank {peer} did not accept the connection in time") from error
    except OSError:
        sock.close()
        raise
    return sock


class _Acceptor:
    """Accepts the connections of members and closes all others, however many are pending at a time.

    Args:
        listener: The listening socket.
        token: The token that a member must send.
        expected: The ranks that connect, each once.
    """

    def __init__(self, listener: socket.socket, token: bytes, expected: Iterable[int]) -> None:
        listener.setblocking(False)
        self._listener, self._token, self._missing = listener, token, set(expected)
        self._silent = dict[int, socket.socket]()  # those that have not sent rank and token, by descriptor
        self._accepted = dict[int, socket.socket]()
        self._refused = list[str]()  # why, of each connection that was closed
        self._poll = select.poll()

    def accept(self, deadline: float) -> dict[int, socket.socket]:
        """Return the sockets of the members, by rank. Raises TimeoutError if some have not come by the deadline."""
        self._poll.register(self._listener, select.POLLIN)
        try:
            while self._missing:
                for fd, _ in self._poll.poll(math.ceil(1e3 * left(deadline))):
                    if fd in self._silent:
                        self._hear(self._silent[fd])
                    else:
                        self._take()
                if self._missing and time.monotonic() >= deadline:
                    raise TimeoutError(self._late())
            return self._accepted
        except BaseException:
            for sock in self._accepted.values():
                sock.close()
            raise
        finally:
            for sock in self._silent.values():
                sock.close()
            if self._refused:
                log.warning("%d connections to a group were no member's and were closed: %s", *self._refusals())

    def _take(self) -> None:
        """Accept a pending connection, and close it if it is another user's."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # it was closed meanwhile
        if (user := _user_of(sock)) != os.geteuid():
            self._refuse(sock, f"user {user}")
            return
        sock.setblocking(False)
        self._hear(sock)

    def _hear(self, sock: socket.socket) -> None:
        """Read the first message of a connection, and close it if that is not an expected member's."""
        try:
            said = sock.recv(_HELLO.size + 1)
        except BlockingIOError:
            self._silent[sock.fileno()] = sock
            self._poll.register(sock, select.POLLIN)
            return
        except OSError:
            said = b""  # it has closed the connection
        if self._silent.pop(sock.fileno(), None) is not None:
            self._poll.unregister(sock)
        if len(said) != _HELLO.size:
            self._refuse(sock, f"{len(said)} bytes")
            return
        rank, token = _HELLO.unpack(said)
        if not hmac.compare_digest(token, self._token):
            self._refuse(sock, "a wrong token")
        elif rank not in self._missing:
            self._refuse(sock, f"rank {rank}, which is not expected")
        else:
            self._missing.remove(rank)
            self._accepted[rank] = sock

    def _refuse(self, sock: socket.socket, why: str) -> None:
        sock.close()
        self._refused.append(why)

    def _late(self) -> str:
        """Say which members have not connected."""
        return f"{ranks(sorted(self._missing))} did not connect in time"

    def _refusals(self) -> tuple[int, str]:
        """Return how many connections were refused, and why."""
        return len(self._refused), ", ".join(f"{why} ({count})" for why, count in Counter(self._refused).most_common(5))


def _user_of(sock: socket.socket) -> int:
    """Return the uid of the process at the other end of a connection."""
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)
