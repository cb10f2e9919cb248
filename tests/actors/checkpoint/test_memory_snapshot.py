"""Snapshots in memory files: whole or not there, kept by others, read in any layout."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from raypar.actors.checkpoint.assembler import Assembler
from raypar.actors.checkpoint.memory_snapshot import HeldMemoryFiles, Slots, SnapshotFiles
from raypar.actors.checkpoint.snapshot_address import Address, SnapshotOwner
from raypar.actors.machine.process_identity import own_identity, process_began
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.worker.snapshot_keeper import SnapshotKeeper
from tests.actors.data_parallel.test_even_parts import wide
from tests.support.descriptors import descriptors
from tests.support.team import Team, linears

SHARE = SnapshotOwner(0, 0)


def take(slots, step, tensors, shards=None, copied=lambda: None):
    slots.take(step, tensors.items(), shards or {}, lambda tensors: nullcontext(), copied)


def numbers(step):
    return {
        "w": torch.arange(6.0).view(2, 3) + step,
        "half": torch.full((3,), step, dtype=torch.bfloat16),
        "step": torch.tensor(float(step)),
        "none": torch.empty(0, 4),
    }


def read(slots, step, rank=0):
    files = SnapshotFiles({SnapshotOwner(0, rank): slots.files})
    return {name: Assembler(files).read(logical) for name, logical in files.at(step, [SnapshotOwner(0, rank)]).items()}


def test_the_last_two_snapshots_are_there_with_all_bits():
    slots = Slots(0)
    for step in (1, 2, 3):
        take(slots, step, numbers(step))
    assert SnapshotFiles({SHARE: slots.files}).steps() == {SHARE: (2, 3)}
    for step in (2, 3):
        found = read(slots, step)
        assert found.keys() == numbers(step).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in numbers(step).items())


def test_a_snapshot_that_is_not_marked_is_none_and_the_one_before_is_whole():
    slots, seen = Slots(0), []
    take(slots, 1, numbers(1))
    take(slots, 2, numbers(2))
    take(slots, 3, numbers(3), copied=lambda: seen.append(SnapshotFiles({SHARE: slots.files}).steps()))
    assert seen == [{SHARE: (2,)}]
    slots.forget_after(2)
    assert SnapshotFiles({SHARE: slots.files}).steps() == {SHARE: (2,)}
    take(slots, 3, numbers(3))
    assert SnapshotFiles({SHARE: slots.files}).steps() == {SHARE: (2, 3)}, "the forgotten one was written over"


def test_other_tensors_get_other_room():
    slots = Slots(0)
    for step, name in enumerate("abc", 1):
        take(slots, step, {name: torch.ones(10 * step)})
    assert read(slots, 2).keys() == {"b"}
    assert read(slots, 3)["c"].shape == (30,)


def test_slices_of_several_ranks_are_one_tensor():
    whole = torch.arange(12.0).view(4, 3)
    halves = [Slots(rank) for rank in (0, 1)]
    for rank, slots in enumerate(halves):
        shard = Shard((4, 3), Sharding({0: Pieces.at(rank, 2)}))
        take(slots, 7, {"w": whole[2 * rank : 2 * rank + 2]}, {"w": shard})
    files = SnapshotFiles({SnapshotOwner(0, rank): slots.files for rank, slots in enumerate(halves)})
    tensors = files.at(7, [SnapshotOwner(0, 0), SnapshotOwner(0, 1)])
    assert torch.equal(Assembler(files).read(tensors["w"]), whole)
    assert torch.equal(Assembler(files).read(tensors["w"], Sharding({1: Pieces.at(2, 3)})), whole[:, 2:])
    with pytest.raises(KeyError):
        files.at(8, [SnapshotOwner(0, 0), SnapshotOwner(0, 1)])


WRITER = """
import sys, time, torch
from contextlib import nullcontext
from raypar.actors.checkpoint.memory_snapshot import Slots
slots = Slots(0)
for step in (4, 5):
    slots.take(step, [("w", torch.full((1000,), float(step)))], {}, lambda tensors: nullcontext())
print(*slots.files, flush=True)
time.sleep(60)
"""


def test_a_snapshot_outlives_the_process_that_took_it():
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    try:
        files = tuple(map(int, writer.stdout.readline().split()))
        own = own_identity()
        process, held = own._replace(pid=writer.pid, began=process_began(writer.pid)), HeldMemoryFiles(own)
        foreign = process._replace(pid_namespace=1), process._replace(began=1), process._replace(boot="another")
        far = [Address(SnapshotOwner(0, 1), other, files) for other in foreign]
        held.hold([Address(SHARE, process, files, is_written=True), *far])
        held.hold([Address(SHARE, process, files)])
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert {share: len(fds) for share, fds in held.files().items()} == {SHARE: 2}, "nothing twice, nothing of elsewhere"
    found = SnapshotFiles(held.files())
    assert torch.equal(Assembler(found).read(found.at(5, [SHARE])["w"]), torch.full((1000,), 5.0))
    held.hold([Address(SHARE, process, files)])  # of a process that is no more
    held.drop_old()
    assert len(held.files()[SHARE]) == 2, "they are those of an actor that was alive"
    held.expect_new()
    held.drop_old()
    assert held.files() == {}


AWAY = {"offload": "parameters"}


@pytest.mark.sampled
@pytest.mark.parametrize("here", [{}, AWAY, {"offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 3}, {"dp": 1}, {"dp": 2} | AWAY], ids=str)
def test_a_team_goes_back_to_a_snapshot_with_all_bits(layout, here):
    """Whatever the mesh of those that took it, and wherever they store their parts."""
    team = Team(wide(4), pp=2, dp=2, zero=1, max_failures=1, **here)
    plans = [actor.member.context.plan for actor in team.all]
    keepers = [SnapshotKeeper(plan, lambda step: None) for plan in plans]
    for step in range(3):
        team.step(step)
        for actor, keeper in zip(team.all, keepers, strict=True):
            keeper.after(step + 1, actor.member.state)
    weights = team.weights()
    losses = [result.losses for result in team.step(3)]
    other = Team(wide(4), pp=2, m=8 // (2 * layout["dp"]) * 2, max_failures=1, **layout)
    files = SnapshotFiles({SnapshotOwner(0, rank): keeper._slots.files for rank, keeper in enumerate(keepers)})
    tensors = files.at(3, [SnapshotOwner(0, rank) for rank in range(len(keepers))])
    assert other.each(lambda actor: actor.member.state.load(files, tensors)) == [None] * len(other.all)
    assert all(torch.equal(other.weights()[name], weight) for name, weight in weights.items())
    if layout == {"dp": 2} or "offload" in layout:
        assert [result.losses for result in other.step(3)] == losses


def test_in_another_layout_snapshots_begin_anew_and_the_old_ones_are_there_until_all_have_begun():
    """Actor 1 of the first layout is actor 0 of the second one."""
    team = Team(linears(), pp=2, max_failures=1)
    keepers, before = [], descriptors()
    for actor in team.all:
        keepers.append(SnapshotKeeper(actor.member.context.plan, lambda step: None))
        keepers[-1].after(1, actor.member.state)
    plan = replace(team.all[0].member.context.plan, layout=1)
    keeper = keepers[1]
    for _ in range(2):  # the second time nothing changes
        keeper.join(plan, lambda step: None)
        assert keeper.steps() == {SnapshotOwner(0, 1): (1,)}
    assert [one.share for one in keeper.addresses() if one.is_written] == [SnapshotOwner(1, 0)]
    keeper.begin(1, team.all[0].member.state)
    keeper.hold([])
    assert keeper.steps() == {SnapshotOwner(0, 1): (1,), SnapshotOwner(1, 0): (1,)}
    keeper.drop_old()
    assert keeper.steps() == {SnapshotOwner(1, 0): (1,)}
    for one in keepers:
        one.leave(comes_back=False)
    del keepers, keeper, one  # what is mapped is open too
    assert not descriptors() - before


def test_taking_a_snapshot_is_fast():
    """16 MiB in less than 0.2 s, even on a busy machine; the figures are in docs/recovery.md."""
    slots, state = Slots(0), {"w": torch.zeros(4 << 20)}
    take(slots, 1, state)
    take(slots, 2, state)
    start = time.perf_counter()
    take(slots, 3, state)
    assert time.perf_counter() - start < 0.2
