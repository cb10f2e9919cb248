"""The GPU groups on machines without a GPU: NCCL is played by threads (tests/gpu/fakes.py), all else is real."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gpu import nccl
from raypar.actors.collective.gpu.cupy_nccl import CupyGroup
from raypar.actors.collective.gpu.cupy_nccl import has_cupy_nccl as has_cupy
from raypar.actors.collective.gpu.group import ring
from raypar.actors.collective.gpu.nccl import NcclGroup
from raypar.actors.collective.group import GroupMember
from tests.gpu import fakes
from tests.gpu.ops import check_every_op, check_nothing, strided, together

CPU = torch.device("cpu")
CLASSES = {"nccl": NcclGroup, "cupy": CupyGroup}


@pytest.fixture(params=CLASSES)
def make(request, monkeypatch):
    """``make(size, timeout)`` gives the members of a group by rank."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fakes.FakeProcessGroup, raising=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fakes.fake_cupy())
    monkeypatch.setattr(torch.cuda, "Stream", fakes.FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fakes.FakeCurrent())
    for name in nccl._ENVIRONMENT:
        monkeypatch.setenv(name, "as it was")
    made = []

    def groups(size, timeout=30.0, edges=None):
        store = dist.HashStore()
        cls = CLASSES[request.param]

        def member(rank):
            group = cls(GroupMember("g", "x", rank, size, timeout, 10.0), store, CPU)
            group.connect(ring(size) if edges is None else edges)
            return group

        members = together(size, member)
        made.extend(members)
        return members

    yield groups
    for group in made:
        group.abort()


# --- the ops ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [lambda tensor: tensor, strided], ids=["plain", "strided"])
def test_every_op(make, layout):
    groups = make(3)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        together(3, lambda rank, dtype=dtype: check_every_op(groups[rank], dtype, CPU, layout))


def test_every_op_without_elements(make):
    groups = make(2)
    together(2, lambda rank: check_nothing(groups[rank], CPU))


def test_a_group_of_one(make):
    check_every_op(make(1)[0], torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int16, torch.complex64])
@pytest.mark.parametrize("make", ["cupy"], indirect=True)  # the other fake is Gloo, which can't
def test_any_dtype_can_be_sent(make, dtype):
    groups, got = make(2), torch.zeros(3, dtype=dtype)
    source = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    groups[0].send(source, 1)
    groups[1].recv(got, 0).wait()
    assert torch.equal(got.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("make", ["cupy"], indirect=True)
def test_cupy_says_which_dtypes_can_be_reduced(make):
    with pytest.raises(ValueError, match=r"group g: all_reduce: NCCL can't reduce torch.int16: use torch.float64"):
        make(1)[0].all_reduce(torch.zeros(2, dtype=torch.int16))


# --- edges ------------------------------------------------------------------------------------------------------------


def test_receives_posted_ahead_hold_up_no_send(make):
    """Both ranks post every receive before their first send."""
    groups, got = make(2), [[torch.zeros(2) for _ in range(4)] for _ in range(2)]

    def work(rank):
        receives = [groups[rank].recv(tensor, 1 - rank) for tensor in got[rank]]
        sends = [groups[rank].send(torch.full((2,), 10.0 * rank + i), 1 - rank) for i in range(4)]
        for handle in (*receives, *sends):
            handle.wait(5)
        groups[rank].synchronize(5)

    together(2, work)
    assert [[t[0].item() for t in mine] for mine in got] == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_posted_receive_holds_up_no_collective(make):
    groups, got, sums = make(2), torch.zeros(1), [torch.ones(1), torch.ones(1)]
    receive = groups[0].recv(got, 1)
    together(2, lambda rank: groups[rank].all_reduce(sums[rank]).wait(5))
    groups[1].send(torch.ones(1), 0)
    receive.wait(5)
    assert [t.item() for t in (*sums, got)] == [2.0, 2.0, 1.0]


def test_an_edge_nobody_named_is_connected_when_it_is_used(make):
    groups, got = make(3, edges=()), torch.zeros(1)

    def work(rank):
        if rank == 2:
            groups[2].send(torch.ones(1), 0).wait()
        elif rank == 0:
            groups[0].recv(got, 2).wait()

    together(3, work)
    assert got.item() == 1.0


def test_a_ring():
    assert ring(1) == set()
    assert ring(2) == {(0, 1), (1, 0)}
    assert ring(4) == {(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)}


@pytest.mark.parametrize("make", ["nccl"], indirect=True)
def test_edges_take_little_of_the_gpu_and_torch_leaves_faults_to_us(make):
    group = make(2)[0]
    limits = [pg.options.config.max_ctas for pg in (group._all, group._edges[0, 1], group._edges[1, 0])]
    assert limits == [None, 4, 4]
    assert all(pg.device == CPU for pg in (group._all, *group._edges.values()))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_deadline_is_noticed_by_the_watcher_and_told_by_synchronize(make):
    """A wait on a GPU does not block: it is over, and the host goes on, before anybody can know."""
    group, faults, calls = make(2)[0], [], threading.Event()

    def close():
        group.abort()
        faults.append(1)
        calls.set()

    group.on_fault = close
    start = time.monotonic()
    group.recv(torch.zeros(1), 1).wait(0.2)  # the fake's wait returns when the abort has ended the op
    assert calls.wait(5)
    assert 0.2 <= time.monotonic() - start < 2
    with pytest.raises(GroupError, match=r"recv with rank 1( failed)?: nothing came within 0.2 s"):
        group.synchronize()
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        group.all_reduce(torch.zeros(1))
    assert faults == [1]


def test_synchronize_has_a_deadline_of_its_own(make):
    group = make(2)[0]
    group.recv(torch.zeros(1), 1)
    with pytest.raises(GroupError, match=r"recv with rank 1 failed: nothing came within 0.1 s"):
        group.synchronize(0.1)


def test_a_barrier_blocks_the_host_until_its_deadline(make):
    group = make(2)[0]
    start = time.monotonic()
    with pytest.raises(GroupError, match=r"barrier failed: nothing came within 0.2 s"):
        group.barrier().wait(0.2)
    assert time.monotonic() - start < 2


def test_an_abort_ends_what_is_under_way_and_names_itself(make):
    group = make(2)[0]
    first, second = group.recv(torch.zeros(1), 1), group.all_reduce(torch.zeros(1))
    group.abort()
    group.abort()
    for handle in (first, second):
        with pytest.raises(GroupError, match="the group was aborted"):
            handle.wait()
    with pytest.raises(GroupError, match="the group was aborted"):
        group.synchronize()


@pytest.mark.parametrize("make", ["cupy"], indirect=True)  # it is given addresses, not tensors
def test_an_abort_ends_what_waits_behind_an_op_without_touching_memory(make):
    fake = sys.modules["cupy.cuda.nccl"]
    uid, stream, (first, second) = fake.get_unique_id(), fakes.FakeStream(CPU), torch.zeros(2, 1)
    ours, theirs = (fake.NcclCommunicator(2, uid, rank) for rank in range(2))
    float32, count = fake.NCCL_FLOAT32, 1

    def issue(call, on):
        fake.groupStart()
        call(on)
        fake.groupEnd()

    given, on_time, pointer = torch.ones(1), fakes.FakeStream(CPU), first.data_ptr()
    issue(lambda on: theirs.send(given.data_ptr(), count, float32, 0, on), on_time)
    on_time.record_event()._future.result(5)
    issue(lambda on: ours.allReduce(pointer, pointer, count, float32, fake.NCCL_SUM, on), stream)  # theirs never comes
    issue(lambda on: ours.recv(second.data_ptr(), count, float32, 1, on), stream)
    ours.abort()
    stream.record_event()._future.result(5)
    assert (first, second) == (torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("make", ["cupy"], indirect=True)
def test_what_nccl_finds_wrong_closes_the_group(make):
    group = make(2)[0]
    handle = group.recv(torch.zeros(1), 1)
    group._edges[1, 0]._comm.error = "NCCL_ERROR_REMOTE"
    with pytest.raises(GroupError, match=r"recv with rank 1( failed)?: NCCL_ERROR_REMOTE"):
        group.synchronize()
    with pytest.raises(GroupError, match="NCCL_ERROR_REMOTE"):
        handle.wait()


@pytest.mark.parametrize("make", ["nccl"], indirect=True)  # its ops carry their errors themselves
def test_a_peer_that_gives_up_closes_the_group(make):
    groups = make(2)
    handle = groups[0].recv(torch.zeros(1), 1)
    groups[1].abort()
    with pytest.raises(GroupError, match="recv with rank 1"):
        groups[0].synchronize(10)
    with pytest.raises(GroupError, match="recv with rank 1 failed"):
        handle.wait()


def test_a_tensor_on_another_device_is_refused_before_anything_is_sent(make):
    group = make(2)[0]
    before = group.ledger.entries()
    with pytest.raises(ValueError, match="group g: all_reduce: a tensor is on meta, this group moves tensors on cpu"):
        group.all_reduce(torch.zeros(1, device="meta"))
    assert group.ledger.entries() == before


def test_a_member_that_does_not_come_is_an_error_within_the_connect_timeout(make):
    with pytest.raises(GroupError, match="group alone: connect failed"):
        CupyGroup(GroupMember("alone", "x", 0, 2, 9.0, 0.3), dist.HashStore(), CPU)


# --- without NCCL -----------------------------------------------------------------------------------------------------


def test_what_is_not_installed_is_not_available(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    assert not has_cupy()
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    assert not nccl.has_torch_nccl()


def test_what_is_kept_for_an_op_is_let_go_once_it_is_over(make):
    groups = make(2)
    groups[1].recv(torch.zeros(4), 0)
    groups[0].send(torch.ones(4), 1)
    deadline = time.monotonic() + 5
    while groups[0]._watcher.pending() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not groups[0]._watcher.pending()
