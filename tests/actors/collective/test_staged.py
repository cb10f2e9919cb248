"""Tensors that go through the host: the same results, tags, faults and ledger as the CPU group's own."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gpu.staged import StagedGroup
from tests.gpu.ops import check_every_op, check_nothing, strided, together
from tests.support.local_groups import FailingGroup, LocalHub, local_groups

CPU = torch.device("cpu")


def staged_groups(size, timeout=30.0):
    return [StagedGroup(group, CPU) for group in local_groups("x", size, timeout)]


@pytest.mark.parametrize("layout", [lambda tensor: tensor, strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_op(dtype, layout):
    groups = staged_groups(3)
    together(3, lambda rank: check_every_op(groups[rank], dtype, CPU, layout))


def test_every_op_without_elements():
    groups = staged_groups(2)
    together(2, lambda rank: check_nothing(groups[rank], CPU))


def test_what_was_read_may_change_at_once_and_what_is_written_comes_with_the_wait():
    groups, source, target = staged_groups(2), torch.ones(3), torch.zeros(3)
    receive = groups[1].recv(target, 0, tag=7)
    groups[0].send(source, 1, tag=7)
    source.fill_(5)
    assert target.tolist() == [0.0] * 3
    receive.wait()
    assert target.tolist() == [1.0] * 3


def test_messages_are_found_by_their_tags():
    groups, got = staged_groups(2), [torch.zeros(1), torch.zeros(1)]
    for tag in (0, 1):
        groups[0].send(torch.tensor([float(tag)]), 1, tag)
    for tag in (1, 0):
        groups[1].recv(got[tag], 0, tag).wait()
    assert [t.item() for t in got] == [0.0, 1.0]


def test_an_op_is_counted_once():
    plain, groups = local_groups("x", 2), staged_groups(2)
    for members in (plain, groups):
        together(2, lambda rank, members=members: check_every_op(members[rank], torch.float32, CPU))
    assert [g.ledger.entries() for g in groups] == [g.ledger.entries() for g in plain]


def test_a_deadline_names_the_peer_and_closes_both_groups():
    group = staged_groups(2)[0]
    with pytest.raises(GroupError, match=r"group local/x: recv with rank 1 failed: nothing came within 0.1 s"):
        group.recv(torch.zeros(1), 1).wait(0.1)
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        group.barrier()


def test_a_fault_of_the_inner_group_closes_the_owners_others():
    inner = FailingGroup(LocalHub(), "x", 0, 2, op="all_reduce", nth=1)
    inner._all_reduce = lambda *args: (_ for _ in ()).throw(RuntimeError("lost"))
    group, faults = StagedGroup(inner, CPU), []
    group.on_fault = lambda: faults.append(1)
    with pytest.raises(GroupError, match="all_reduce failed: lost"):
        group.all_reduce(torch.zeros(1))
    assert faults == [1]


def test_a_tensor_on_another_device_is_refused_before_anything_is_sent():
    group = StagedGroup(local_groups("x", 2)[0], torch.device("cuda:0"))
    with pytest.raises(ValueError, match="group local/x: send: a tensor is on cpu, this group moves tensors on cuda:0"):
        group.send(torch.zeros(1), 1)
    assert not group.ledger.entries()
