"""What the members of a group tell one another over a store: who is missing is named, and few questions are asked."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest
import torch.distributed as dist

from raypar.actors.collective.exchange import FAN_IN, ExchangedStore, children, gather_objects
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import GroupMember
from raypar.actors.collective.ray import ray_groups, ray_private
from raypar.actors.collective.ray.ray_groups import KVStore

DEADLINE = 20.0
SOON = 5.0


def outcome(store, rank, size, seconds=DEADLINE):
    """What a member gets, or its error."""
    try:
        return gather_objects(store, rank, size, b"%d" % rank, seconds)
    except (OSError, RuntimeError) as error:
        return error


def together(ranks, work):
    """``work(rank)`` in a thread for each rank, all from one moment on; the results by rank."""
    ready = threading.Barrier(len(ranks))

    def member(rank):
        ready.wait()
        return work(rank)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(member, ranks), strict=True))


# --- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, FAN_IN, FAN_IN + 1, FAN_IN + 2, 64, 1057, 1058, 4096])
def test_each_member_but_the_first_has_one_parent_of_a_lower_rank(size):
    parents = [parent for parent in range(size) for _ in children(parent, size)]
    below = [child for parent in range(size) for child in children(parent, size)]
    assert below == list(range(1, size))
    assert all(parent < child for parent, child in zip(parents, below, strict=True))
    assert max(len(children(parent, size)) for parent in range(size)) == min(FAN_IN, size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, FAN_IN + 1, FAN_IN + 2, 80])
def test_everybody_gets_what_each_gave(size):
    store = dist.HashStore()
    everyone = [b"%d" % rank for rank in range(size)]
    assert together(range(size), lambda rank: outcome(store, rank, size)) == dict.fromkeys(range(size), everyone)


def test_any_bytes_arrive():
    store, given = dist.HashStore(), [b"", bytes(range(256)) * 300]
    assert together(range(2), lambda rank: gather_objects(store, rank, 2, given[rank], DEADLINE)) == {
        0: given,
        1: given,
    }


# --- questions -------------------------------------------------------------------------------------------------------


class FakeClient:
    """Ray's key-value store in this process, which counts the questions of each thread.

    Where keys are not there yet it answers once they are, so that no question is asked again.
    """

    def __init__(self, monkeypatch):
        self._data, self._there, self._own, self._lock = {}, {}, threading.local(), threading.Lock()
        self.questions, self.most_keys = {}, 0
        monkeypatch.setattr(ray_private, "put", self.put)
        monkeypatch.setattr(ray_private, "get_all", self.get_all)

    def begin(self, rank):
        self._own.rank, self.questions[rank] = rank, 0

    def put(self, key, data, *, overwrite=True):
        self.questions[self._own.rank] += 1
        with self._lock:
            new = key not in self._data
            if new or overwrite:
                self._data[key] = data
        self._there.setdefault(key, threading.Event()).set()
        return new

    def get_all(self, keys):
        self.questions[self._own.rank] += 1
        self.most_keys = max(self.most_keys, len(keys))
        for key in keys:
            assert self._there.setdefault(key, threading.Event()).wait(DEADLINE)
        return {key: self._data[key] for key in keys}


def asked(monkeypatch, size):
    """How many questions each member of a group asks, by rank, and of how many keys at most."""
    client = FakeClient(monkeypatch)

    def member(rank):
        client.begin(rank)
        return len(gather_objects(KVStore("run/dp/0", size), rank, size, b"x" * 180, DEADLINE))

    assert set(together(range(size), member).values()) == {size}
    return client.questions, client.most_keys


def test_a_member_asks_as_much_in_groups_of_all_sizes(monkeypatch):
    by_size = {size: asked(monkeypatch, size) for size in (64, 256, 1024)}
    for rank in range(1024):
        counts = [questions[rank] for questions, _ in by_size.values() if rank in questions]
        assert min(counts) >= 2 and max(counts) <= 4, rank
    assert {most for _, most in by_size.values()} == {FAN_IN}


def test_a_question_is_repeated_ever_less_often(monkeypatch):
    """In a minute some 200 times, for one key or for many; less often where more members wait; and never too late."""
    now, polls = [0.0], []
    monkeypatch.setattr(ray_private, "get_all", lambda keys: polls.append(now[0]) or {})
    monkeypatch.setattr(ray_groups.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_groups.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    for members, keys, most in ((2, ["a"], 200), (2, list(map(str, range(32))), 200), (1024, ["a"], 150)):
        now[0], polls[:] = 0.0, []
        with pytest.raises(TimeoutError, match="did not come within 60 s"):
            KVStore("x", members).wait(keys, timedelta(seconds=60))
        gaps = [later - one for one, later in pairwise(polls)]
        assert len(polls) <= most and max(gaps) <= 60 / 32 and 60 <= now[0] <= 60.1, (members, len(polls))
        assert polls[1] >= 0.0005 * members / 20


def test_a_store_finds_what_came_before_and_asks_once(monkeypatch):
    client = FakeClient(monkeypatch)
    client.begin(0)
    store = KVStore("x")
    for key in "abc":
        store.set(key, key * 2)
    store.wait(["a", "b", "c"])
    assert [store.get(key) for key in "abc"] == [b"aa", b"bb", b"cc"]
    assert client.questions[0] == 4


# --- those who do not come -------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "absent", "named"),
    [
        (2, [1], "rank 1 of 2"),
        (3, [0], "rank 0 of 3"),
        (40, [0], "rank 0 of 40"),
        (40, [1], "rank 1 of 40"),
        (40, [7, 35], "ranks 7, 35 of 40"),
        (40, [*range(20, 40)], "ranks 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, ... of 40"),
    ],
    ids=str,
)
def test_all_others_name_who_is_missing_within_the_deadline(size, absent, named):
    store, begin = dist.HashStore(), time.monotonic()
    came = [rank for rank in range(size) if rank not in absent]
    errors = together(came, lambda rank: outcome(store, rank, size, 0.6))
    assert {str(error) for error in errors.values()} == {f"{named} did not come within 0.6 s"}
    assert {type(error) for error in errors.values()} == {TimeoutError}
    assert 0.6 <= time.monotonic() - begin < SOON


@pytest.mark.parametrize("silent", [0, 1])
def test_a_member_that_registers_and_dies_is_named(silent):
    store, size = dist.HashStore(), 40
    store.set(f"member/{silent}", b"12345678")
    came = [rank for rank in range(size) if rank != silent]
    errors = together(came, lambda rank: outcome(store, rank, size, 0.6))
    assert {str(error) for error in errors.values()} == {
        f"all {size} members came, but rank {silent} did not go on within 0.6 s"
    }


def test_who_comes_too_late_for_a_large_group_is_told_so_at_once():
    store, size = dist.HashStore(), FAN_IN + 2
    together([rank for rank in range(size) if rank != 1], lambda rank: outcome(store, rank, size, 0.3))
    begin = time.monotonic()
    late = outcome(store, 1, size)
    assert isinstance(late, TimeoutError) and f"rank 1 of {size} did not come within 0.3 s" in str(late)
    assert time.monotonic() - begin < SOON


def test_a_member_may_come_late():
    store = dist.HashStore()

    def member(rank):
        time.sleep(0.3 if rank in (1, 33) else 0.0)
        return outcome(store, rank, 35)

    assert all(isinstance(got, list) for got in together(range(35), member).values())


@pytest.mark.parametrize("size", [2, FAN_IN + 2])
def test_a_rank_is_registered_once(size):
    """The second process is told so at once, whenever it comes, and the group forms without it."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(outcome, store, 1, size)
        store.wait(["member/1"])
        for _ in range(2):
            second = outcome(store, 1, size)
            assert isinstance(second, RuntimeError) and str(second) == "another process has joined as rank 1"
        others = [pool.submit(outcome, store, rank, size) for rank in range(size) if rank != 1]
        assert all(other.result() == first.result() == [b"%d" % rank for rank in range(size)] for other in others)
        assert isinstance(outcome(store, 1, size), RuntimeError)


def test_members_of_an_earlier_generation_are_not_met():
    store = dist.HashStore()
    outcome(dist.PrefixStore("run/dp/0@1", store), 1, 2, 0.1)
    now = dist.PrefixStore("run/dp/0@2", store)
    with ThreadPoolExecutor(1) as pool:
        root = pool.submit(outcome, now, 0, 2)
        time.sleep(0.1)
        assert not root.done()
        assert outcome(now, 1, 2) == root.result() == [b"0", b"1"]


# --- a store for who asks for each key -------------------------------------------------------------------------------


def test_an_exchanged_store_has_what_all_members_set_in_as_many_rounds_as_are_needed():
    shared = dist.HashStore()

    def member(rank):
        store = ExchangedStore(shared, rank, 3, DEADLINE)
        store.set(f"host/{rank}", f"h{rank}")
        hosts = [store.get(f"host/{peer}") for peer in range(3)]
        store.set(f"address/{rank}", bytes([0, 255, rank]))
        store.wait([f"address/{peer}" for peer in range(3)])
        return hosts, [store.get(f"address/{peer}") for peer in range(3)]

    wanted = [b"h0", b"h1", b"h2"], [bytes([0, 255, peer]) for peer in range(3)]
    assert together(range(3), member) == dict.fromkeys(range(3), wanted)
    assert shared.check(["round1/member/0"]) and not shared.check(["round2/member/0"])


def test_a_gloo_group_asks_the_shared_store_twice(monkeypatch):
    """Torch asks for the key of each member, in its own process."""
    client, device = FakeClient(monkeypatch), create_device("127.0.0.1")

    def member(rank):
        client.begin(rank)
        return GlooGroup(GroupMember("g", "x", rank, 3, 10.0, DEADLINE), KVStore("g", 3), device)

    for group in together(range(3), member).values():
        group.abort()
    assert client.questions == dict.fromkeys(range(3), 2)
