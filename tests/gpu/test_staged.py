"""Several members on one GPU: their tensors go through the host."""

from __future__ import annotations

import logging

import pytest
import torch

from raypar.actors.collective.gpu import staged
from tests.gpu.ops import check_every_op, check_nothing, strided, together
from tests.support.local_groups import local_groups


def staged_groups(size):
    return [staged.StagedGroup(group, torch.device("cuda:0")) for group in local_groups("x", size)]


@pytest.mark.parametrize("layout", [lambda tensor: tensor, strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_op(dtype, layout):
    groups = staged_groups(3)
    together(3, lambda rank: check_every_op(groups[rank], dtype, groups[rank].device, layout))
    together(3, lambda rank: check_nothing(groups[rank], groups[rank].device))


def test_what_the_gpu_has_still_to_compute_is_what_arrives():
    groups = staged_groups(2)
    source, target = torch.zeros(1000, device="cuda:0"), torch.zeros(1000, device="cuda:0")
    receive = groups[1].recv(target, 0)
    torch.cuda._sleep(200_000_000)
    source += 1
    groups[0].send(source, 1)
    source += 1
    receive.wait()
    assert target.eq(1).all()


def test_the_host_copy_lives_until_the_gpu_has_read_it():
    groups, targets = staged_groups(2), []
    for turn in range(50):
        groups[0].send(torch.full((1 << 18,), float(turn), device="cuda:0"), 1)
        target = torch.empty(1 << 18, device="cuda:0")
        groups[1].recv(target, 0).wait()
        targets.append(target)
    assert all(target.eq(turn).all() for turn, target in enumerate(targets))


def test_it_is_said_aloud_once(caplog):
    staged._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        staged_groups(3)
    assert [record.name for record in caplog.records] == ["raypar.actors.collective.gpu.staged"]
