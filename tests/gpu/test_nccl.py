"""NCCL groups, over torch and over cupy: the ops, that the host goes on, and what happens when a peer is gone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from raypar.actors.collective.errors import GroupError
from tests.gpu.ops import check_every_op, check_nothing, strided, together

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
A_SECOND = 2_000_000_000  # cycles that a GPU spins, about


def busy(device, cycles=A_SECOND):
    """Give a GPU something to do."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)


# --- one GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op_of_a_group_of_one(make, dtype):
    group = make(1)[0]
    check_every_op(group, dtype, group.device)
    check_nothing(group, group.device)
    group.synchronize()


def test_a_wait_does_not_block_the_host_but_what_comes_after_it_sees_the_result(make):
    group = make(1)[0]
    tensor = torch.zeros(1000, device=group.device)

    def work():
        tensor.fill_(0)
        tensor.add_(1)
        group.all_reduce(tensor).wait()
        return tensor * 2

    work()  # to load a kernel at its first use, CUDA waits for what runs
    torch.cuda.synchronize()
    start = time.monotonic()
    busy(group.device)
    after = work()
    assert time.monotonic() - start < 0.2
    assert after.eq(2).all()


def test_a_barrier_blocks_the_host(make):
    group = make(1)[0]
    torch.cuda.synchronize()
    start = time.monotonic()
    busy(group.device)
    group.barrier().wait()
    assert time.monotonic() - start > 0.2


def test_what_is_dropped_while_it_is_under_way_is_not_written_over(make):
    group = make(1)[0]
    outs = []
    for turn in range(20):
        busy(group.device, 10_000_000)
        source, out = torch.full((1 << 18,), float(turn), device=group.device), torch.empty(1 << 18, device="cuda:0")
        outs.append((turn, out, group.all_gather(out, source)))
        del source
        torch.full((1 << 18,), -1.0, device=group.device)  # would be given the memory of the source
    for turn, out, handle in outs:
        handle.wait()
        assert out.eq(turn).all()


def test_a_tensor_on_the_host_is_refused(make):
    group = make(1)[0]
    with pytest.raises(ValueError, match="a tensor is on cpu, this group moves tensors on cuda:0"):
        group.all_reduce(torch.zeros(1))


# --- several GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", [lambda tensor: tensor, strided])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op(make, dtype, layout, size):
    groups = make(size)
    together(size, lambda rank: check_every_op(groups[rank], dtype, groups[rank].device, layout))
    together(size, lambda rank: check_every_op(groups[rank], dtype, groups[rank].device, layout, count=100_003))
    together(size, lambda rank: check_nothing(groups[rank], groups[rank].device))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int16])
def test_any_dtype_can_be_sent(make, dtype):
    groups = make(2)
    source = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    got = torch.zeros(3, dtype=dtype, device="cuda:1")
    groups[0].send(source.to("cuda:0"), 1)
    groups[1].recv(got, 0).wait()
    assert torch.equal(got.cpu().view(torch.uint8), source.view(torch.uint8))


def test_receives_posted_ahead_hold_up_no_send_and_no_compute(make):
    groups, size = make(2), 1 << 22
    got = [[torch.zeros(size, device=group.device) for _ in range(4)] for group in groups]

    def work(rank):
        group = groups[rank]
        with torch.cuda.device(group.device):
            receives = [group.recv(tensor, 1 - rank) for tensor in got[rank]]
            left = torch.ones(2048, 2048, device=group.device)
            sends = []
            for i in range(4):
                left = left @ left / 2048
                value = left.view(-1).repeat(1) * 0 + 10 * rank + i
                sends.append(group.send(value, 1 - rank))
            for handle in (*receives, *sends):
                handle.wait()
            group.synchronize(30)

    together(2, work)
    assert [[t[0].item() for t in mine] for mine in got] == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_receive_that_nobody_answers_ends_at_its_deadline_and_frees_the_gpu(make):
    groups, closed = make(2), threading.Event()

    def close():
        groups[0].abort()
        closed.set()

    groups[0].on_fault = close
    tensor = torch.zeros(4, device="cuda:0")
    groups[0].recv(tensor, 1).wait(0.5)
    tensor.sum().item()  # behind the receive: comes back because the watcher closes the group
    assert closed.wait(10)
    with pytest.raises(GroupError, match=r"nothing came within 0.5 s"):
        groups[0].synchronize()


def test_an_abort_from_another_thread_frees_a_blocked_host(make):
    groups = make(2)
    timer = threading.Timer(0.5, groups[0].abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises(GroupError, match="aborted"):
        groups[0].barrier().wait()
    assert time.monotonic() - start < 10
    timer.join()


def test_a_group_can_be_made_anew_after_a_fault(make):
    for group in make(2):
        group.abort()
    groups = make(2)
    together(2, lambda rank: check_every_op(groups[rank], torch.float32, groups[rank].device))
