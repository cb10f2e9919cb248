"""Where actors keep what they need only at times, and disks that have no room, or fail."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raypar.actors.errors import CheckpointError, OffloadError
from raypar.actors.machine.offload_storage import MappedStorage
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.precision import Precision
from tests.actors.data_parallel.test_even_parts import wide
from tests.support.snapshots import saved
from tests.support.team import Team

ROOT = Path(__file__).parents[3]
ADAM = {"optim": AdamW(lr=0.01), "clip": 0.5}


def team_in(folder, **changes):
    fields = {"pp": 1, "dp": 2, "m": 2, "zero": 1, "offload": "optimizer", "offload_folder": str(folder), **ADAM}
    return Team(wide(), **fields | changes)


def test_memory_that_was_given_back_is_used_again(tmp_path):
    storage = MappedStorage(str(tmp_path), "me")
    one, other = storage.empty(3000, torch.float32), storage.empty(10, torch.float32)
    one.fill_(1)
    other.fill_(2)
    used = storage._used
    del one
    again = storage.empty(2999, torch.float32)
    assert storage._used == used
    assert storage.holds(again)
    assert storage.holds(again[5:])
    again.fill_(3)
    assert other.tolist() == [2] * 10
    assert not list(tmp_path.iterdir())


def num_open(folder):
    """The number of descriptors of files in a folder, also of files without a name."""
    return sum(os.path.realpath(link).startswith(str(folder)) for link in Path("/proc/self/fd").iterdir())


def test_a_file_is_open_once_however_many_tensors_are_in_it(tmp_path):
    storage = MappedStorage(str(tmp_path), "me")
    before = num_open(tmp_path)
    assert before == 1
    kept = [storage.empty(10, torch.float32).fill_(number) for number in range(50)]
    assert num_open(tmp_path) == before
    assert [int(one[9]) for one in kept] == list(range(50))


@pytest.mark.parametrize("folder", [None, True])
def test_what_is_not_at_hand_keeps_its_values(folder, tmp_path):
    storage = MappedStorage(str(tmp_path) if folder else None, "me")
    tensor = storage.empty(5000, torch.float32)
    with storage.accessible([tensor], writes=True):
        tensor.copy_(torch.arange(5000.0))
    storage.prefetch(tensor)
    storage.check()
    with storage.accessible([tensor[2000:]]):
        assert tensor[2000:].sum() == torch.arange(2000.0, 5000.0).sum()
    copy = storage.copied(tensor.view(50, 100).T)
    assert storage.holds(copy)
    assert copy.stride() == (1, 100)
    assert copy.equal(tensor.view(50, 100).T)


def test_a_folder_that_is_gone_is_told(tmp_path):
    with pytest.raises(
        OffloadError, match=r"offload file of pp=0 in '.*gone' can't be made \(No such file or directory"
    ):
        MappedStorage(str(tmp_path / "gone"), "pp=0")


def test_a_file_that_may_not_grow_is_told_at_the_launch(tmp_path):
    """The states' room is taken then, although the first step creates them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    team_in(tmp_path).step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 4096, before[1]))
    try:
        with pytest.raises(
            OffloadError, match=r"file of pp=0 dp=\d in '.*' can't be made 0\.\d MiB large \(File too large"
        ):
            team_in(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_at_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OffloadError, match=r"No space left on device\): free some space, or give another offload_folder"
    ):
        team_in(tmp_path)


@pytest.mark.parametrize("optim", [AdamW(), SGD(momentum=0.9), Muon(adamw=("*.bias",))], ids=lambda one: one.kind)
@pytest.mark.parametrize(("offload", "zero"), [("optimizer", 1), ("parameters", 2), ("parameters", 3)])
def test_a_launch_takes_all_space_of_steps(offload, zero, optim, tmp_path, monkeypatch):
    """Also that of states and averages, which the first step creates, besides the sums of gradients."""
    fields = {"offload": offload, "zero": zero, "optim": optim, "ema": 0.9, "precision": Precision("bf16")}
    team, other = team_in(tmp_path, **fields), team_in(tmp_path, **fields)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        found = [[one.losses for one in team.step(number)] for number in range(2)]
    assert found == [[one.losses for one in other.step(number)] for number in range(2)]


def test_a_disk_that_is_full_since_the_launch_ends_no_training(tmp_path, monkeypatch):
    """All room that steps need is taken before. A checkpoint is not saved, but told of; the next one can be."""
    team, other = team_in(tmp_path), team_in(tmp_path)
    team.step(0)
    other.step(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        team.each(lambda actor: actor.stage())
        for rank, error in enumerate(team.each(lambda actor: actor.write(str(tmp_path)))):
            assert isinstance(error, CheckpointError)
            assert f"OffloadError: the offload file of pp=0 dp={rank} in {str(tmp_path)!r} can't be made" in str(error)
        assert [one.losses for one in team.step(1)] == [one.losses for one in other.step(1)]
    assert saved(team, tmp_path)
    assert [one.losses for one in team.step(2)] == [one.losses for one in other.step(2)]


CUT = """
import os, sys
from tests.actors.machine.test_offload_storage import team_in
for changes in ({"offload": "optimizer"}, {"offload": "parameters", "zero": 3}, {"offload": "parameters"}):
    team = team_in(sys.argv[1], **changes)
    team.step(0)
    os.ftruncate(team.workers[1].member.parts.part.storage._file.fileno(), 0)  # as if the disk had lost it
    for error in team.each(lambda actor: actor.train(1)):
        print(error)
"""


@pytest.mark.long
def test_a_disk_that_fails_in_training_is_told_with_the_file_and_the_action(tmp_path):
    """In a process of its own: memory that a disk can't bring would end the process if it were used unprepared."""
    command = [sys.executable, "-c", CUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, second, third, fourth, fifth, sixth = done.stdout.splitlines()
    file, fix = (
        f"the offload file of pp=0 dp=1 in {str(tmp_path)!r}",
        "look at the disk, or give another offload_folder",
    )
    message = "actor pp=0 dp=1: action {} failed: OffloadError: {} can't be {} (Input/output error): {}"
    assert second == message.format("STEP", file, "written", fix)
    assert fourth == sixth == message.format("0UNSHARD", file, "read", fix)
    assert all("the group was aborted" in line for line in (first, third, fifth))
