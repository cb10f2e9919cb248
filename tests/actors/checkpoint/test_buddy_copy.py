"""Copies of snapshots: they arrive with all bits or count for nothing, and nobody waits for them without a bound."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, nullcontext

import pytest
import torch

from raypar.actors.checkpoint.assembler import Assembler
from raypar.actors.checkpoint.buddy_copy import BuddyCopyReceiver, BuddyCopySender
from raypar.actors.checkpoint.memory_snapshot import Slots, SnapshotFiles
from raypar.actors.checkpoint.snapshot_address import Recipient, SnapshotOwner
from raypar.actors.worker.snapshot_keeper import OutgoingCopies, SnapshotKeeper
from tests.support.descriptors import descriptors
from tests.support.team import Team, linears

SHARE, TOKEN, HERE = SnapshotOwner(0, 1), "1" * 32, "127.0.0.1"
LENGTH = 8  # bytes of the length of a snapshot's header


def take(slots, step, size=300):
    slots.take(step, [("w", torch.arange(float(size)) + step)], {}, lambda tensors: nullcontext())
    return slots.file(step)


def steps_of(receiver):
    return SnapshotFiles(receiver.files()).steps().get(SHARE, ())


def content(file):
    return os.pread(file, os.fstat(file).st_size, 0)


@pytest.fixture
def receiver():
    with closing(BuddyCopyReceiver(HERE, {TOKEN: SHARE}, 2)) as receiver:
        yield receiver


def test_copies_arrive_with_all_bits_in_two_files_in_turn(receiver):
    slots, sender = Slots(1), BuddyCopySender(Recipient(HERE, receiver.port, TOKEN))
    for step in (1, 2, 3):
        assert sender.begin(take(slots, step, 1 << 10 << step))  # a snapshot may grow
        sender.wait(5.0)
        assert (sender.lost, sender.is_sending) == ("", False)
    files = SnapshotFiles(receiver.files())
    assert files.steps() == {SHARE: (2, 3)}
    assert torch.equal(Assembler(files).read(files.at(3, [SHARE])["w"]), torch.arange(float(8 << 10)) + 3)
    sender.close()
    assert steps_of(receiver) == (2, 3), "what is whole stays"
    assert not sender.begin(slots.file(3))


@pytest.mark.parametrize("missing", [LENGTH, LENGTH + 1, 400], ids=["only the commit", "one byte", "a third"])
def test_a_copy_that_is_not_whole_counts_for_nothing(receiver, missing):
    slots = Slots(1)
    first, second = (content(take(slots, step)) for step in (1, 2))
    with socket.create_connection((HERE, receiver.port), timeout=5.0) as buddy:
        buddy.sendall(TOKEN.encode() + len(first).to_bytes(8, "little") + first[LENGTH:])
        assert buddy.recv(1)
        assert steps_of(receiver) == ()
        buddy.sendall(first[:LENGTH])
        assert buddy.recv(1)
        buddy.sendall(len(second).to_bytes(8, "little") + second[LENGTH : len(second) - missing + LENGTH])
        assert steps_of(receiver) == (1,)
    receiver._threads[-1].join(5.0)
    assert steps_of(receiver) == (1,)


def test_a_copy_of_what_is_written_over_never_becomes_whole():
    slots = Slots(1)
    with socket.create_server((HERE, 0)) as buddy:
        sender = BuddyCopySender(Recipient(HERE, buddy.getsockname()[1], TOKEN))
        size = len(content(take(slots, 1)))
        assert sender.begin(slots.file(1))
        connection, _ = buddy.accept()
        sender.give_up()
        got = b""
        while len(got) < 32 + size:  # the token, the size, and all but the length of the header
            got += connection.recv(1 << 16)
        connection.sendall(b"!")
        assert connection.recv(LENGTH) == bytes(LENGTH)
        sender.close()


def test_a_stranger_sends_nothing(receiver):
    with socket.create_connection((HERE, receiver.port), timeout=5.0) as stranger:
        stranger.sendall(b"2" * 32)
        assert stranger.recv(1) == b""
    slots, sender = Slots(1), BuddyCopySender(Recipient(HERE, receiver.port, TOKEN))
    sender.begin(take(slots, 1))
    sender.wait(5.0)
    assert steps_of(receiver) == (1,)


def test_a_buddy_that_is_not_there_is_told_and_one_that_is_slow_is_not_waited_for_long():
    slots = Slots(1)
    file = take(slots, 1, 4 << 20)
    with socket.create_server((HERE, 0)) as slow:
        sender = BuddyCopySender(Recipient(HERE, slow.getsockname()[1], TOKEN))
        start = time.perf_counter()
        assert sender.begin(file)
        assert 0.1 <= sender.wait(0.1) <= time.perf_counter() - start < 2.0
        assert (sender.is_sending, sender.lost, sender.begin(file)) == (True, "", False)
        sender.close()  # wakes it, as the abort of a step does
        assert not sender.is_sending
        nobody = slow.getsockname()[1]
    sender = BuddyCopySender(Recipient(HERE, nobody, TOKEN))
    sender.begin(file)
    sender.wait(5.0)
    assert (sender.lost, sender.begin(file)) == ("Connection refused", False)


def test_a_buddy_that_reads_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("raypar.actors.checkpoint.buddy_copy.SILENCE", 0.2)
    with socket.create_server((HERE, 0)) as stuck:
        sender, slots = BuddyCopySender(Recipient(HERE, stuck.getsockname()[1], TOKEN)), Slots(1)
        sender.begin(take(slots, 1, 4 << 20))
        sender.wait(5.0)
        assert sender.lost == "it makes no progress"


@pytest.mark.parametrize(("every", "files"), [(1, 3), (2, 2), (4, 2)])
def test_an_actor_has_what_belongs_to_the_last_whole_copy_and_two_snapshots_more_or_less(every, files):
    """Whatever is lost then, a step is left of which all is there: the one before the copy that is under way."""
    slots, within = Slots(1, 3), max(1, every - 1)
    with closing(BuddyCopyReceiver(HERE, {TOKEN: SHARE}, files)) as receiver:
        outgoing = OutgoingCopies(Recipient(HERE, receiver.port, TOKEN), slots, 5.0)
        copied = []
        for step in range(1, 14):
            outgoing.after_step()
            take(slots, step)
            if step % every == 0:
                outgoing.begin(step, within)
                copied.append(step)
            whole = [one for one in copied if one + within < step]  # of which every actor knows that all have it
            assert step in slots.steps
            assert not whole or whole[-1] in slots.steps & {*steps_of(receiver)}
            assert step - 1 in slots.steps or step == 1 or len(slots.pinned) == 2, "two pinned ones, and the last"
        outgoing.sender.close()


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1}], ids=str)
def test_a_node_that_is_lost_costs_at_most_the_steps_between_two_copies(layout):
    """Each half of the actors is a node, and every actor's buddy is on the other one; the second node is lost."""
    team = Team(linears(), **{"pp": 1, **layout}, max_failures=1, buddy_every=2)
    other = Team(linears(), **{"pp": 1, **layout}, max_failures=1)
    plans, before = [actor.member.context.plan for actor in team.all], descriptors()
    keepers, size, weights = [SnapshotKeeper(plan, lambda step: None) for plan in plans], len(plans), []
    shares, half = [SnapshotOwner(0, rank) for rank in range(size)], size // 2
    ports = [keeper.expect_copies(HERE, {TOKEN: shares[rank - half]}, 2)[1] for rank, keeper in enumerate(keepers)]
    for rank, keeper in enumerate(keepers):
        keeper.begin_copies(Recipient(HERE, ports[rank - half], TOKEN), 0, [], 5.0)
    for step in range(5):
        team.step(step)
        weights.append(team.weights())
        for actor, keeper in zip(team.all, keepers, strict=True):
            assert keeper.after(step + 1, actor.member.state, (step + 1) % 2).lost == ""
    held = [keeper.steps() for keeper in keepers[:half]]
    common = max(set.intersection(*({step for of_one in held for step in of_one.get(one, ())} for one in shares)))
    assert common in (3, 4, 5), "copies were begun of 1, 3 and 5"
    there = [address for keeper in keepers[:half] for address in keeper.addresses()]
    files = SnapshotFiles({share: [fd for one in there if one.share == share for fd in one.files] for share in shares})
    assert other.each(lambda actor: actor.member.state.load(files, files.at(common, shares))) == [None] * size
    assert all(torch.equal(other.weights()[name], weight) for name, weight in weights[common - 1].items())
    for keeper in keepers:
        keeper.leave(comes_back=False)
    del keepers, keeper  # what is mapped is open too
    assert not descriptors() - before


def test_a_node_gets_the_snapshots_of_another_once_and_all_its_actors_read_them():
    """Of four actors two are on a node that has lost all: one of them receives each share, the other opens its file."""
    team, other = (Team(linears(), pp=2, dp=2, zero=1, max_failures=1) for _ in range(2))
    shares, before = [SnapshotOwner(0, rank) for rank in range(4)], descriptors()
    keepers = [SnapshotKeeper(actor.member.context.plan, lambda step: None) for actor in team.all]
    for step in range(2):
        team.step(step)
        for actor, keeper in zip(team.all, keepers, strict=True):
            keeper.after(step + 1, actor.member.state)
    late = [SnapshotKeeper(actor.member.context.plan, lambda step: None) for actor in other.all[:2]]
    receiver, reader = late
    tokens = {f"{share.rank}" * 32: share for share in shares}
    _, port, arrived = receiver.expect_copies(HERE, tokens, 1)
    for token, share in tokens.items():
        keepers[share.rank].send(2, [(share, Recipient(HERE, port, token))])
    with pytest.raises(KeyError):
        keepers[0].send(7, [(shares[0], Recipient(HERE, port, "0" * 32))])
    with pytest.raises(ConnectionError, match=f"a snapshot did not arrive at {HERE}: "):
        keepers[0].send(2, [(shares[0], Recipient(HERE, port, "0" * 32))])  # all that were expected have come
    # in one process there is no other to open files of, so the reader is given descriptors
    for address in arrived:
        reader._held.adopt(address.share, map(os.dup, address.files))
    for actor, keeper in zip(other.all, (receiver, reader, reader, reader), strict=True):
        keeper.restore(2, shares, arrived, actor.member.state)
    assert all(torch.equal(other.weights()[name], weight) for name, weight in team.weights().items())
    for keeper in late:
        keeper.drop_old()
        assert keeper.steps() == {}, "what has come is let go once all have begun with their own"
    for keeper in (*keepers, *late):
        keeper.leave(comes_back=False)
    del keepers, late, keeper, receiver, reader
    assert not descriptors() - before
