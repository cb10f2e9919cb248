"""What is particular to groups in shared memory: segments, memory that is used again, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.reductions import reduce_in_order
from raypar.actors.collective.shm.links import INLINE
from raypar.actors.collective.shm.mailbox import SHARED
from raypar.actors.collective.shm.slabs import SLAB, Pool, Slab
from raypar.actors.tensors import nbytes
from tests.support.introduced import shm_group

EDGES = [0, 1, INLINE // 4, INLINE // 4 + 1, 30_001, SHARED // 4 - 1, SHARED // 4, SLAB // 4, SLAB // 4 + 1, 700_001]
KILLS = Path(__file__).parents[2] / "long" / "group_kills.py"


def shm_groups(size, timeout=20.0):
    store = dist.HashStore()
    return together(size, lambda rank: shm_group("shm", "x", rank, size, timeout, store=store, connect_timeout=10.0))


def together(size, work):
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, rank) for rank in range(size)]]


def files():
    """Descriptors of shared memory that this process has."""
    links = Path("/proc/self/fd").iterdir()
    return sum(1 for link in links if link.is_symlink() and "memfd:raypar" in str(link.readlink()))


# --- in segments -----------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    size=st.integers(2, 4),
    count=st.sampled_from(EDGES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    op=st.sampled_from(["sum", "max"]),
)
def test_any_number_of_segments_is_reduced_in_rank_order(size, count, dtype, op):
    groups = shm_groups(size)
    ins = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(8).to(dtype) for rank in range(size)]
    wanted = torch.empty(count, dtype=dtype)
    reduce_in_order(ins, op, wanted)
    got = [tensor.clone() for tensor in ins]
    together(size, lambda rank: groups[rank].all_reduce(got[rank], op).wait())
    assert all(torch.equal(tensor, wanted) for tensor in got)
    out = [torch.empty(count, dtype=dtype) for _ in range(size)]
    rows = [tensor.repeat(size) for tensor in ins]
    together(size, lambda rank: groups[rank].reduce_scatter(out[rank], rows[rank], op).wait())
    assert all(torch.equal(tensor, wanted) for tensor in out)


@settings(max_examples=15)
@given(counts=st.lists(st.sampled_from(EDGES), min_size=9, max_size=9), tag=st.integers(0, 1 << 30))
def test_uneven_segments_reach_their_rank(counts, tag):
    groups = shm_groups(3)
    table = [counts[3 * rank : 3 * rank + 3] for rank in range(3)]  # what a rank gives to each
    ins = [torch.arange(sum(row), dtype=torch.float32) + 1e7 * rank for rank, row in enumerate(table)]

    def work(rank):
        out = torch.empty(sum(row[rank] for row in table))
        splits = [row[rank] for row in table]
        groups[rank].all_to_all(out, ins[rank], splits, table[rank]).wait()
        following, before = (rank + 1) % 3, (rank - 1) % 3
        passed = torch.empty(len(ins[before]))
        sent = groups[rank].send(ins[rank], following, tag)
        groups[rank].recv(passed, before, tag).wait()
        sent.wait()
        return out, passed

    for rank, (out, passed) in enumerate(together(3, work)):
        assert torch.equal(out, torch.cat([ins[peer].split(table[peer])[rank] for peer in range(3)]))
        assert torch.equal(passed, ins[(rank - 1) % 3])


@settings(max_examples=12)
@given(size=st.integers(2, 4), count=st.sampled_from([*EDGES, SLAB + 3]), turns=st.integers(1, 4))
def test_a_window_is_reduced_where_it_stands_and_free_to_change_after_that(size, count, turns):
    groups = shm_groups(size)
    ins = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(size)]
    wanted = torch.empty(count, dtype=torch.bfloat16)
    reduce_in_order(ins, "sum", wanted)

    def work(rank):
        window = groups[rank].empty(count, torch.bfloat16)
        for _ in range(turns):
            window.copy_(ins[rank])
            groups[rank].all_reduce(window).wait()
            assert torch.equal(window, wanted)

    together(size, work)


def _moved(group, op, window, held):
    """Move a window; returns what arrived."""
    if op == "all_reduce":
        group.all_reduce(window).wait()
        return window.clone()
    if op in ("broadcast", "reduce"):
        getattr(group, op)(window, 1).wait()
        return window.clone() if op == "broadcast" or group.rank == 1 else None
    if op == "all_gather":
        group.all_gather(held, window).wait()
        return held.clone()
    handle = group.send(window, (group.rank + 1) % group.size)
    group.recv(held, (group.rank - 1) % group.size).wait()
    handle.wait()
    return held.clone()


@settings(max_examples=20)
@given(
    size=st.integers(2, 3),
    op=st.sampled_from(["all_reduce", "broadcast", "reduce", "all_gather", "send"]),
    blocks=st.integers(0, 1),
    rest=st.sampled_from([-1, 0, INLINE // 4, SHARED // 4 - 1, SHARED // 4, SLAB // 4]),
    late=st.integers(0, 2),
)
def test_a_window_is_free_to_change_when_an_op_is_over_and_not_before(size, op, blocks, rest, late):
    """With a last segment that is not lent, and a member that comes late: who waits for it must be woken."""
    count = max(0, blocks * SLAB + rest)  # a block of a window is four slabs, an element four bytes
    groups = shm_groups(size, timeout=5.0)
    ins = [torch.arange(count, dtype=torch.float32).remainder_(97.0).add_(rank) for rank in range(size)]
    total = sum(ins)

    def work(rank):
        window, held = (
            groups[rank].empty(count, torch.float32),
            torch.empty(count * (size if op == "all_gather" else 1)),
        )
        if rank == late:
            time.sleep(0.002)
        for _ in range(2):
            window.copy_(ins[rank])
            got = _moved(groups[rank], op, window, held)
            window.fill_(-1.0)
            source = {"broadcast": ins[1], "all_gather": torch.cat(ins), "send": ins[rank - 1]}.get(op, total)
            assert got is None or torch.equal(got, source)

    together(size, work)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("rest", [0, 1, SHARED // 4 - 1, SHARED // 4])
def test_who_lends_is_woken_when_the_last_reader_is_done(op, rest):
    """The last segment may be so small that it is not lent: then the one before it has to ring."""
    groups = shm_groups(2, timeout=10.0)

    def work(rank):
        window = groups[rank].empty(SLAB + rest, torch.float32).fill_(1.0)
        if rank == 0:
            time.sleep(0.05)  # the reader: who lends is asleep by then
        start = time.monotonic()
        getattr(groups[rank], op)(window, 1 if op == "broadcast" else 0).wait()
        return time.monotonic() - start

    assert max(together(2, work)) < 5.0


def test_the_ledger_counts_what_crosses():
    for size, count in ((2, 100), (2, 1 << 20), (3, 100), (4, 1 << 20)):
        groups = shm_groups(size)
        together(size, lambda rank, groups=groups, count=count: groups[rank].all_reduce(torch.ones(count)).wait())
        each = (size - 1) * nbytes(torch.ones(count))
        wanted = each if size == 2 or nbytes(torch.ones(count)) <= INLINE else 2 * each // size
        assert [group.ledger.entries()["x", "all_reduce"].bytes for group in groups] == [wanted] * size


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_send_is_over_before_anybody_receives_it():
    groups, tensor = shm_groups(2, timeout=5.0), torch.arange(600_000.0)
    groups[0].send(tensor, 1).wait()
    tensor.zero_()
    groups[1].recv(tensor, 0).wait()
    assert torch.equal(tensor, torch.arange(600_000.0))


def test_two_receives_of_one_tag_do_not_share_their_segments():
    groups, count = shm_groups(2), 2 * SLAB // 4 + 5
    sent = [groups[0].send(torch.full((count,), value), 1) for value in (1.0, 2.0)]
    got = [torch.zeros(count) for _ in range(2)]
    for handle in (*sent, *[groups[1].recv(tensor, 0) for tensor in got]):
        handle.wait()
    assert [tensor.unique().tolist() for tensor in got] == [[1.0], [2.0]]


def test_what_a_member_sent_before_it_left_arrives():
    groups, got = shm_groups(2, timeout=2.0), torch.zeros(1000)
    groups[0].send(torch.full((1000,), 7.0), 1, tag=1).wait()
    groups[1].send(torch.ones(10), 0, tag=2).wait()  # which nobody reads
    for link in groups[0]._box._links.values():
        link._socket.close()
    groups[1].recv(got, 0, tag=1).wait()
    assert got.eq(7.0).all()
    later = groups[1].recv(got, 0, tag=1)
    for _ in range(2):
        with pytest.raises(GroupError, match="closed"):
            later.wait()


def test_thousands_of_messages_wait_until_somebody_reads():
    """More than the system keeps for a connection: the sender goes on, and its wait sees to the rest."""
    groups, got = shm_groups(2), torch.zeros(5000)

    def work(rank):
        if rank == 0:
            for handle in [groups[0].send(torch.tensor([float(i)]), 1) for i in range(5000)]:
                handle.wait()
        else:
            time.sleep(0.2)
            for i in range(5000):
                groups[1].recv(got[i : i + 1], 0).wait()

    together(2, work)
    assert torch.equal(got, torch.arange(5000.0))


def test_an_op_moves_on_when_another_one_starts():
    """No thread works in the background: gradients are added while the next bucket is started."""
    groups = shm_groups(2)
    first = [torch.full((200_000,), float(rank + 1)) for rank in range(2)]
    for group, tensor in zip(groups, first, strict=True):
        group.all_reduce(tensor)
    assert first[0].eq(1.0).all()  # nobody was there
    groups[0].all_reduce(torch.ones(1))
    assert first[0].eq(3.0).all()


def test_ops_that_nobody_waits_for_take_little_memory():
    gc.collect()
    before, tensors = files(), [[torch.ones(SLAB) for _ in range(20)] for _ in range(2)]  # 80 MiB a member
    groups = shm_groups(2)
    handles = [groups[0].all_reduce(tensor) for tensor in tensors[0]]
    assert files() - before <= 2 * 24 + 2
    got = torch.zeros(1000)
    receipt = groups[0].recv(got, 1)  # is not held up by what is in front of it
    groups[1].send(torch.ones(1000), 0).wait()
    receipt.wait()
    together(2, lambda rank: [h.wait() for h in (handles if rank == 0 else map(groups[1].all_reduce, tensors[1]))])
    assert all(tensor.eq(2).all() for mine in tensors for tensor in mine)
    groups.clear()


def test_two_threads_wait_in_one_group():
    groups = shm_groups(2)

    def echo(rank, tag, turns=200):
        tensor = torch.zeros(10)
        for turn in range(turns):
            if rank == 0:
                groups[0].send(torch.full((10,), float(turn)), 1, tag).wait()
                groups[0].recv(tensor, 1, tag).wait()
                assert tensor.eq(turn + tag).all()
            else:
                groups[1].recv(tensor, 0, tag).wait()
                groups[1].send(tensor + tag, 0, tag).wait()

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(echo, rank, tag) for rank in range(2) for tag in (1, 2, 3)]:
            future.result(30)


def test_who_has_no_room_to_send_is_served_by_a_sleeper_of_before():
    groups = shm_groups(2, timeout=8.0)
    answer, last, value = torch.zeros(1), torch.ones(1), torch.ones(2000)

    def waits():
        groups[0].recv(answer, 1, 7).wait()

    def fills():
        time.sleep(0.3)  # the other thread sleeps by now, and looks for no room
        sent = 0
        while groups[0]._box._links[1].idle:
            groups[0].send(value, 1, 1)
            sent += 1
        handle = groups[0].send(last, 1, 2)
        count.append(sent)
        handle.wait()

    def reads():
        while not count:
            time.sleep(0.05)
        for _ in range(count[0]):
            groups[1].recv(torch.empty(2000), 0, 1).wait()
        groups[1].recv(torch.empty(1), 0, 2).wait()
        groups[1].send(last, 0, 7).wait()

    count = []
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work) for work in (waits, fills, reads)]:
            future.result(20)
    assert answer.item() == 1.0
    assert time.monotonic() - start < 6.0, "nobody had to wait for a deadline"


def test_sends_of_one_tag_by_several_threads_are_not_mixed():
    groups, each, count = shm_groups(2), 3, 3 * SLAB // 4
    for _ in range(5):
        together(each, lambda number: groups[0].send(torch.full((count,), float(number)), 1, 1))
        came = [torch.empty(count) for _ in range(each)]
        for tensor in came:
            groups[1].recv(tensor, 0, 1).wait()
        assert sorted(tensor.unique().tolist() for tensor in came) == [[0.0], [1.0], [2.0]]


def test_who_waits_uses_no_core():
    groups = shm_groups(2, timeout=0.5)
    start = time.process_time()
    with pytest.raises(GroupError, match=r"nothing came within 0.5 s"):
        groups[0].recv(torch.zeros(1), 1).wait()
    assert time.process_time() - start < 0.1


def test_other_sizes_than_the_peers_are_an_error_not_a_crash():
    groups = shm_groups(2, timeout=2.0)
    groups[0].send(torch.ones(3), 1)
    with pytest.raises(GroupError, match="rank 0 gives 12 bytes, rank 1 takes 20"):
        groups[1].recv(torch.ones(5), 0).wait()


def test_another_size_is_told_where_a_share_of_it_is_as_long_as_the_whole():
    groups = shm_groups(3, timeout=2.0)

    def reduce(rank):
        with pytest.raises(GroupError) as caught:
            groups[rank].all_reduce(torch.arange(3 * INLINE if rank else INLINE)).wait()
        return str(caught.value)

    few, many = 8 * INLINE, 24 * INLINE
    either = f"gives {many} bytes, rank 0 takes {few}", f"rank 0 gives {few} bytes, rank"  # who comes first closes all
    assert any(words in error for error in together(3, reduce) for words in either)


def test_who_has_done_its_part_may_leave_before_the_others_have():
    groups, left = shm_groups(3, timeout=5.0), threading.Event()

    def gather(rank):
        if rank == 2:
            assert left.wait(5)
        out = torch.zeros(9) if rank == 0 else None
        groups[rank].gather(out, torch.full((3,), float(rank)), root=0).wait()
        if rank == 1:
            groups[1].abort()
            left.set()
        return out

    assert together(3, gather)[0].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


@pytest.mark.timeout(30)
def test_a_member_alone_gives_up_in_time():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 of 2 did not come within 0.3 s"):
        shm_group("shm", "x", 1, 2, 5.0, store=dist.HashStore(), connect_timeout=0.3)
    assert time.monotonic() - start < 3


# --- nothing is left -------------------------------------------------------------------------------------------------


def test_memory_is_used_again_and_given_back():
    gc.collect()
    before = files()
    groups = shm_groups(2)
    for _ in range(200):
        together(2, lambda rank: groups[rank].all_reduce(torch.ones(300_000)).wait())
    assert 0 < files() - before < 60
    groups.clear()
    gc.collect()
    assert files() == before


def test_memory_is_used_again_once_every_reader_has_returned_it_also_of_a_thousand_members():
    pool = Pool(1000)
    slab, start = pool.put(torch.arange(100, dtype=torch.uint8))
    theirs = Slab(pool.fd(slab), slab.number, 1000)  # a mapping of its own, as another process has
    for reader in (0, 999, 999):
        slab.share(reader)
    assert torch.equal(theirs.data[start : start + 100], torch.arange(100, dtype=torch.uint8))
    for reader in (999, 0):
        theirs.give_back(reader)
        assert not slab.free
    theirs.give_back(999)
    assert slab.free and slab.free
    assert (theirs.data[:SLAB] == 0).sum() == SLAB - 99, "its semaphores are before its data"


def test_a_slab_takes_memory_as_it_is_used_and_a_window_at_once():
    pool = Pool(2)
    slab, _ = pool.put(torch.ones(100, dtype=torch.uint8))
    window = pool.window_of(pool.window(3 << 20))
    taken = [os.fstat(pool.fd(one)).st_blocks * 512 for one in (slab, window)]
    assert taken[0] < SLAB // 2 and taken[1] >= 3 << 20


def test_no_memory_is_said_before_anything_is_written(monkeypatch):
    def full(fd, start, count):
        raise OSError(errno.ENOSPC, "No space left on device")

    groups, tensor = shm_groups(2, timeout=3.0), torch.ones(30_000)
    monkeypatch.setattr(os, "posix_fallocate", full)

    def fails(rank):
        with pytest.raises(GroupError, match=r"no memory for 4,096 more bytes .* vm.overcommit_memory"):
            groups[rank].all_reduce(tensor.clone()).wait()

    together(2, fails)
    with pytest.raises(OSError, match="no memory for 4,096 more bytes"):
        groups[0].empty(100, torch.float32)


@pytest.mark.long
def test_members_that_are_killed_or_stopped():
    done = subprocess.run(
        [sys.executable, str(KILLS), "--kills", "4", "--stops", "1"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_message_that_is_read_late_keeps_one_slab_from_use_and_not_those_behind_it():
    groups = shm_groups(3)
    late, data = torch.arange(25_000.0), torch.ones(SLAB // 4)
    sent = groups[0].send(late, 1, tag=9)
    for _ in range(20):
        got = torch.empty_like(data)
        handle = groups[0].send(data, 2, tag=1)
        groups[2].recv(got, 0, tag=1).wait()
        handle.wait()
    assert len(groups[0]._box._pool._slabs) <= 4
    got = torch.empty_like(late)
    groups[1].recv(got, 0, tag=9).wait()
    sent.wait()
    assert torch.equal(got, late)
