"""How members of a node find each other: strangers, silent clients and late ones get nothing and delay nobody."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective import rendezvous
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import GroupMember
from raypar.actors.collective.rendezvous import Introduction, Registration, introduce
from raypar.actors.collective.shm.group import ShmGroup
from raypar.actors.machine.process_identity import own_identity
from tests.support.introduced import shm_group
from tests.support.namespaces import OTHER_USER

IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
SOON = 5.0  # seconds, far below the deadline of a join, on a busy machine
DEADLINE = 30.0


def together(size, work):
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, rank) for rank in range(size)]]


class Watched:
    """A store that calls a function when a member has published how to reach it, before the member goes on.

    Args:
        published: Called with the member's rank, name and token.
    """

    def __init__(self, published):
        self._store, self._published = dist.HashStore(), published
        self.set, self.get = self._store.set, self._store.get
        self.wait, self.check = self._store.wait, self._store.check

    def compare_set(self, key, expected, value):
        own = Registration(*json.loads(value[8:]))
        self._published(int(key.removeprefix("member/")), own.name, own.token)
        return self._store.compare_set(key, expected, value)


def client(name, said=b""):
    """Connect to a listener and say something."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10.0)
    sock.connect(f"\0{name}")
    if said:
        sock.send(said)
    return sock


def hello(rank, token):
    return struct.pack("<i32s", rank, bytes.fromhex(token))


def beside(name):
    """What rank 1 of 2 knows where rank 0 listens at a name."""
    return Introduction(1, [Registration("here", name, "00" * 32), Registration("here")], socket.socket())


def is_closed(sock):
    """Whether the other end has closed a connection without a word."""
    try:
        return sock.recv(99) == b""
    except ConnectionResetError:
        return True


def joined(store, size=3):
    """Let members join, and exchange a message each, in far less than the deadline."""
    begin = time.monotonic()
    groups = together(size, lambda rank: shm_group("g", "x", rank, size, 10.0, store=store, connect_timeout=DEADLINE))
    assert time.monotonic() - begin < SOON
    got = [torch.full((5,), float(rank)) for rank in range(size)]
    together(size, lambda rank: groups[rank].all_reduce(got[rank]).wait())
    assert all(torch.equal(one, torch.full((5,), sum(range(size)) + 0.0)) for one in got)
    for group in groups:
        group.abort()


SAID = {
    "silent": lambda rank, token: b"",
    "short": lambda rank, token: b"\1\0\0\0",
    "long": lambda rank, token: hello(rank + 1, token) + b"!",
    "wrong token": lambda rank, token: hello(rank + 1, "00" * 32),
    "own rank": hello,
    "lower rank": lambda rank, token: hello(-1, token),
    "rank beyond": lambda rank, token: hello(3, token),
}


@pytest.mark.parametrize("what", SAID)
def test_a_client_that_is_no_member_gets_nothing_and_delays_nobody(what, caplog):
    """It connects to every member before any other one does, and stays."""
    clients, others, lock = [], [], threading.Lock()

    def published(rank, name, token):
        with lock:
            clients.append(client(name, SAID[what](rank, token)))
            others.append(rank)

    with caplog.at_level(logging.WARNING, "raypar"):
        joined(Watched(published))
    assert sorted(others) == [0, 1, 2] and all(map(is_closed, clients))
    reasons = {"silent": None, "short": "4 bytes", "long": "37 bytes", "wrong token": "a wrong token"}
    told = reasons.get(what, "which is not expected")
    assert ("were no member's" in caplog.text) is (told is not None) and (told or "") in caplog.text
    for one in clients:
        one.close()


def test_a_rank_is_given_once():
    """Who comes later with everything right gets nothing: the rank is taken, or the group is whole."""
    token_of = {}

    def published(rank, name, token):
        token_of[rank] = name, token

    store = Watched(published)
    peers = together(3, lambda rank: introduce(store, rank, 3, DEADLINE))
    name, token = token_of[0]
    with ThreadPoolExecutor(1) as pool, ExitStack() as listening:
        for one in peers:
            listening.callback(one.close)
        root = pool.submit(peers[0].connect, range(3), DEADLINE)
        both = [client(name, hello(2, token)) for _ in range(2)]
        ((late,), _, _) = select.select(both, [], [], 10)
        (taken,) = (one for one in both if one is not late)
        assert is_closed(late)
        connect_as_one = client(name, hello(1, token))
        links = root.result(10)
    assert sorted(links) == [1, 2]
    for sock in (taken, connect_as_one):
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    with pytest.raises(OSError):
        client(name)
    for one in (taken, late, connect_as_one):
        one.close()


def test_a_full_queue_of_strangers_is_worked_off():
    clients, lock = [], threading.Lock()

    def published(rank, name, token):
        with lock:
            while rank == 0:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.setblocking(False)
                clients.append(sock)
                try:
                    sock.connect(f"\0{name}")
                except BlockingIOError:
                    return

    joined(Watched(published))
    assert len(clients) > 100
    for one in clients:
        one.close()


def test_a_member_whose_place_only_others_want_is_named_in_time(caplog):
    clients = []

    def published(rank, name, token):
        clients.extend(client(name, hello(1, "11" * 32)) for _ in range(3 if rank == 0 else 0))

    store = Watched(published)
    peers = together(3, lambda rank: introduce(store, rank, 3, DEADLINE))
    connect = partial(peers[0].connect, range(3))
    begin = time.monotonic()
    with pytest.raises(GroupError, match=r"connect failed: ranks 1, 2 did not connect in time"):
        ShmGroup(GroupMember("g", "x", 0, 3, 5.0, 0.3), connect)
    assert 0.3 <= time.monotonic() - begin < SOON
    for one in peers:
        one.close()
    assert all(map(is_closed, clients))
    assert "3 connections to a group were no member's and were closed: a wrong token (3)" in caplog.text
    for one in clients:
        one.close()


def test_a_member_that_does_not_accept_is_named_in_time():
    """Its queue is full: it is stopped, or others fill it."""
    clients = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"raypar-full-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen(1)
        clients += [client(name), client(name)]
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="rank 0 did not accept the connection in time"):
            beside(name).connect(range(2), 0.3)
    assert 0.3 <= time.monotonic() - begin < SOON
    for one in clients:
        one.close()


def test_members_elsewhere_are_told_apart():
    def nodes(rank, *domains):
        return Introduction(rank, [Registration(domain) for domain in domains], None).nodes

    store = dist.HashStore()
    with_others = together(2, lambda rank: introduce(store, rank, 2, DEADLINE))
    for one in with_others:
        one.close()
        assert one.nodes == [[0, 1]]
    own = own_identity()
    for other in (own._replace(user_namespace=1), own._replace(network_namespace=1)):
        assert nodes(0, own.memory_domain, other.memory_domain) == [[0], [1]]
    assert nodes(0, own.memory_domain, "") == nodes(0, "", "") == [[0], [1]]
    assert nodes(1, "a", "b", "a", "b") == [[0, 2], [1, 3]]


# --- another user ----------------------------------------------------------------------------------------------------

# Takes every listener whose name it finds, again and again, and says that it is a member; ends with its input.
STRANGER = """
import os, select, socket, struct, sys
os.setuid(int(sys.argv[2]))
prefix, made, closed, got = sys.argv[1], [], 0, 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    for line in open("/proc/net/unix"):
        name = line.split()[-1]
        if name.startswith("@" + prefix):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(chr(0) + name[1:])
            except OSError:
                continue
            made.append(sock)
            try:
                sock.send(struct.pack("<i32s", 1 + len(made) % 2, b"?" * 32)) if len(made) % 3 else None
            except OSError:
                pass
for sock in made:
    sock.settimeout(5)
    try:
        raw = sock.recv(99)
        closed, got = closed + (not raw), got + len(raw)
    except ConnectionResetError:
        closed += 1
print(len(made), closed, got)
"""


@IS_ROOT
def test_another_user_of_the_machine_gets_no_rank_and_delays_nobody(monkeypatch):
    """It tries at all times while groups are made: before the members come, between two of them, and after."""
    prefix = f"raypar-strange-{os.getpid()}"
    monkeypatch.setattr(rendezvous, "_NAME", prefix)
    seen = threading.Event()

    def published(rank, name, token):
        if rank == 2:  # the others wait for this one
            seen.wait(0.05)

    kept = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", STRANGER, prefix, str(OTHER_USER)], **kept) as stranger:
        assert stranger.stdout.readline() == "ready\n"
        for _ in range(5):
            joined(Watched(published))
        made, closed, got = map(int, stranger.communicate("over\n", timeout=20)[0].split())
    assert made >= 5 and (closed, got) == (made, 0)


LISTENER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(chr(0) + sys.argv[1])
    listener.listen(1)
    print("ready", flush=True)
    sock, _ = listener.accept()
    print(len(sock.recv(99)))
"""


@IS_ROOT
def test_a_listener_of_another_user_is_told_nothing():
    name = f"raypar-listener-{os.getpid()}"
    kept = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", LISTENER, name, str(OTHER_USER)], **kept) as listener:
        assert listener.stdout.readline() == "ready\n"
        with pytest.raises(ConnectionError, match=f"the socket of rank 0 is one of user {OTHER_USER}"):
            beside(name).connect(range(2), DEADLINE)
        assert listener.communicate(timeout=10)[0] == "0\n"
