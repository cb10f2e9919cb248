"""Groups over several nodes: large sums go node by node, everything else as in a flat group, and a fault closes all."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective import connect, rendezvous
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.gloo import hierarchical
from raypar.actors.collective.gloo.group import _SMALL_TAG, GlooGroup, create_device
from raypar.actors.collective.gloo.hierarchical import LARGE, HierarchicalGroup
from raypar.actors.collective.group import GroupMember
from raypar.actors.collective.rendezvous import introduce
from raypar.actors.machine.process_identity import ProcessIdentity
from tests.actors.collective.test_group import REDUCED
from tests.gpu.ops import together

NODES = ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 3], [2]], [[0, 3], [1], [2]])


@functools.cache
def device():
    return create_device("127.0.0.1")


def groups_on(nodes, timeout=30.0, name="h"):
    store, size = dist.HashStore(), sum(map(len, nodes))

    def member(rank):
        with closing(introduce(dist.PrefixStore("introduced", store), rank, size, 20.0)) as peers:
            own = GroupMember(name, "dp", rank, size, timeout, 20.0)
            return HierarchicalGroup(own, store, device(), nodes=nodes, connect_node=peers.connect)

    return together(size, member)


@functools.cache
def two_by_two():
    return groups_on(NODES[0])


def drawn(rank, count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_sums_are_the_same_on_all_members_and_in_the_order_that_is_told(nodes, monkeypatch):
    monkeypatch.setattr(hierarchical, "_PIECE", LARGE // 4)
    groups, count = groups_on(nodes), LARGE // 4 + 7  # five pieces, of which the last is short
    tensors = [drawn(rank, count) for rank in range(4)]
    of_nodes = [functools.reduce(torch.add, [drawn(rank, count) for rank in members]) for members in nodes]
    together(4, lambda rank: groups[rank].all_reduce(tensors[rank]).wait())
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    torch.testing.assert_close(tensors[0], sum(drawn(rank, count) for rank in range(4)))
    if len(nodes) == 2:  # of two summands no ring has an order
        assert torch.equal(tensors[0], of_nodes[0] + of_nodes[1])


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_every_reduction_of_every_dtype(op, dtype):
    groups, count = two_by_two(), LARGE // 2
    values = [torch.randint(1, 4, (count,), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
    wanted = REDUCED[op](torch.stack(values)).to(dtype)
    together(4, lambda rank: groups[rank].all_reduce(values[rank], op).wait())
    assert all(torch.equal(value, wanted) for value in values)


def test_sums_go_on_while_the_member_computes_and_may_be_waited_for_in_reverse():
    groups = two_by_two()

    def member(rank):
        tensors = [drawn(rank + 4 * i, LARGE // 4 + i).view(1, -1).t() for i in range(4)]
        handles = [groups[rank].all_reduce(tensor) for tensor in tensors]
        small = torch.tensor([float(rank)])
        groups[rank].all_reduce(small).wait()
        for handle in reversed(handles):
            handle.wait()
        return small.item(), [tensor.sum().item() for tensor in tensors]

    told = together(4, member)
    assert told[0][0] == 6.0
    assert all(one == told[0] for one in told)


def test_the_other_ops_are_those_of_the_flat_group():
    groups = two_by_two()

    def member(rank):
        group, own = groups[rank], torch.arange(2.0) + 10 * rank
        rows, part, sent = torch.zeros(8), torch.zeros(2), torch.zeros(8)
        group.all_gather(rows, own).wait()
        group.reduce_scatter(part, rows.clone()).wait()
        group.all_to_all(sent, rows.clone()).wait()
        from_first = own.clone()
        group.broadcast(from_first, 0).wait()
        parts = torch.zeros(10)
        group.all_gather_parts(parts, torch.ones(rank + 1) * rank, [1, 2, 3, 4]).wait()
        whole = torch.zeros(8) if rank == 3 else None
        group.gather(whole, own, 3).wait()
        got = torch.zeros(2)
        group.scatter(got, rows if rank == 1 else None, 1).wait()
        to_second = own.clone()
        group.reduce(to_second, 1).wait()
        passed, neighbour = torch.zeros(2), (rank - 1) % 4
        handles = [group.send(own, (rank + 1) % 4, tag=5), group.recv(passed, neighbour, tag=5)]
        for handle in handles:
            handle.wait()
        group.barrier().wait()
        return rows.tolist(), part.tolist(), from_first.tolist(), parts.sum().item(), got.tolist(), passed.tolist()

    for rank, (rows, part, first, parts, got, passed) in enumerate(together(4, member)):
        own = [10.0 * rank, 10.0 * rank + 1]
        assert rows == [0, 1, 10, 11, 20, 21, 30, 31]
        assert part == [4 * value for value in own]
        assert first == [0, 1]
        assert parts == 0 + 2 + 6 + 12
        assert got == own
        assert passed == [10.0 * ((rank - 1) % 4), 10.0 * ((rank - 1) % 4) + 1]


CUT = FlatCut((((5, 50_000), (90_000, 90_004)), ((50_000, 90_000),), (), ((100_000, 100_001), (100_002, 140_000))))


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("slice_bytes", [1 << 16, 8 << 20])
def test_parts_of_a_cut_cross_the_network_once_a_node(nodes, slice_bytes, monkeypatch):
    groups, sent, real = groups_on(nodes), Counter(), GlooGroup._swap
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    monkeypatch.setattr("raypar.actors.collective.gloo.group._SLICE", slice_bytes)

    def counted(group, give, take, tag):
        if tag != _SMALL_TAG:
            sent.update({(group.rank, node_of[peer]): part.numel() for peer, part in give.items()})
        return real(group, give, take, tag)

    monkeypatch.setattr(GlooGroup, "_swap", counted)
    flats = [torch.full((140_001,), -1.0) for _ in range(4)]
    parts = [drawn(rank, count) for rank, count in enumerate(CUT.counts)]
    for rank in (0, 2):
        CUT.put(flats[rank], rank, parts[rank])
    wanted = torch.full((140_001,), -1.0)
    CUT.unpack(torch.cat(parts), wanted)

    def member(rank):
        total, later = torch.ones(LARGE // 4), drawn(rank, 8)
        gathered = groups[rank].all_gather_cut(flats[rank], None if rank in (0, 2) else parts[rank], CUT)
        summed = groups[rank].all_reduce(total)
        groups[rank].all_reduce(later).wait()
        summed.wait()
        gathered.wait()
        return total.unique().tolist()

    assert together(4, member) == [[4.0]] * 4
    assert all(torch.equal(flat, wanted) for flat in flats)
    assert sent == {
        (rank, node): CUT.counts[rank] for rank in (0, 1, 3) for node in range(len(nodes)) if node != node_of[rank]
    }


def test_the_ledger_counts_what_each_member_sends():
    groups, count = two_by_two(), LARGE // 4
    before = [sum(entry.bytes for entry in group.ledger.entries().values()) for group in groups]
    together(4, lambda rank: groups[rank].all_reduce(torch.ones(count)).wait())
    sent = [sum(entry.bytes for entry in group.ledger.entries().values()) for group in groups]
    assert [now - then for now, then in zip(sent, before, strict=True)] == [2 * LARGE, LARGE, 2 * LARGE, LARGE]


@pytest.mark.parametrize("lost", [0, 3])
def test_a_member_that_gives_up_fails_the_sum_of_all_and_no_thread_stays(lost):
    groups = groups_on(NODES[0], timeout=5.0, name=f"lost{lost}")
    handles = [group.all_reduce(torch.ones(LARGE)) for rank, group in enumerate(groups) if rank != lost]
    begin = time.monotonic()
    groups[lost].abort()

    def fails(index):
        with pytest.raises(GroupError):
            handles[index].wait()

    together(3, fails)
    assert time.monotonic() - begin < 3.0, "before the deadline"
    end = time.monotonic() + 5
    while any(thread.name == f"group lost{lost}" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_sum_that_a_member_never_joins_misses_its_deadline():
    groups = groups_on(NODES[0], timeout=0.3)
    handle = groups[2].all_reduce(torch.ones(LARGE))
    with pytest.raises(GroupError, match=r"all_reduce failed: nothing came within 0.3 s"):
        handle.wait()
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        groups[2].all_reduce(torch.ones(LARGE))


@pytest.mark.parametrize(
    ("of", "kind"), [("aabb", HierarchicalGroup), ("abab", HierarchicalGroup), ("abcd", GlooGroup)]
)
def test_the_nodes_of_the_members_choose_the_kind_of_group(of, kind, monkeypatch):
    """Threads are on one node: each says another one."""
    node = threading.local()
    monkeypatch.setattr(rendezvous, "own_identity", lambda: ProcessIdentity(node.its))
    store = dist.HashStore()

    def member(rank):
        node.its = of[rank]
        return connect.cpu_group("g", rank, 4, store, "127.0.0.1")

    groups = together(4, member)
    assert {type(group) for group in groups} == {kind}
    for group in groups:
        group.abort()
