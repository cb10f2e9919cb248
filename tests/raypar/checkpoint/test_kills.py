"""A save that is killed, or that the disk refuses, at any of its calls: the newest sound checkpoint can be loaded."""

from __future__ import annotations

import errno
import os
import shutil
from itertools import cycle

import pytest

from raypar.checkpoint import CheckpointError, newest, verify
from raypar.paths import checkpoints
from tests.support.checkpoints import KilledError, holds, save_at, visible, watched_disk

CASES = {"a new step": 2, "the same step again": 1}


@pytest.fixture
def begun(tmp_path):
    """A function that makes a folder of two checkpoints, of which the next save may remove the first, and of what a
    killed save has left."""
    first = tmp_path / "first"
    for step in (0, 1):
        save_at(first, step)
    left = first / f".step-00000001.{'0' * 32}"
    left.mkdir()
    (left / "pp0.safetensors").write_bytes(b"half")
    return lambda name: shutil.copytree(first, tmp_path / name)


def count_of_calls(folder, step, monkeypatch):
    with watched_disk(monkeypatch) as calls:
        save_at(folder, step, keep_last=1)
    assert {name for name, _ in calls} >= {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"}
    assert ("exchange" in {name for name, _ in calls}) == (step == 1)
    return len(calls)


@pytest.mark.sampled
@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_a_kill_at_any_call_leaves_the_newest_sound_one(step, begun, monkeypatch):
    found = []
    for at in range(count_of_calls(begun("whole"), step, monkeypatch)):
        folder = begun(str(at))
        with watched_disk(monkeypatch, at) as calls, pytest.raises(KilledError):
            save_at(folder, step, keep_last=1)
        path = newest(folder).path
        found.append(int(path.name[5:]))
        assert found[-1] in (1, step), f"killed at {calls[at]}"
        assert holds(path, found[-1])
        assert not any(verify(path) for _, path in checkpoints(folder)), f"killed at {calls[at]}: half of one is seen"
        save_at(folder, 3, keep_last=1)
        assert visible(folder) == ["step-00000003"], f"killed at {calls[at]}: left behind"
    assert found == sorted(found)
    assert {1, step} == set(found)


@pytest.mark.sampled
@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_a_disk_that_refuses_any_one_call_raises_only_checkpoint_errors(step, begun, monkeypatch):
    refused, codes = 0, (errno.ENOSPC, errno.EROFS, errno.EACCES)
    for at, code in zip(range(count_of_calls(begun("whole"), step, monkeypatch)), cycle(codes), strict=False):
        folder = begun(str(at))
        with watched_disk(monkeypatch, at, code) as calls:
            try:
                save_at(folder, step, keep_last=1)
            except CheckpointError as error:
                refused += 1
                assert os.strerror(code) in str(error), f"refused at {calls[at]}"
        path = newest(folder).path
        assert path.name in ("step-00000001", f"step-0000000{step}")
        assert holds(path, int(path.name[5:]))
        save_at(folder, 3, keep_last=1)
        assert visible(folder) == ["step-00000003"], f"refused at {calls[at]}: left behind"
    assert refused > 20


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut keeps what is synced: files before they are renamed, then the folder, and the parent at the end."""
    with watched_disk(monkeypatch) as calls:
        save_at(tmp_path, 1)
    written = {path for name, path in calls if name == "write"}
    assert len(written) == 3
    for path in written:
        first, last = calls.index(("write", path)), len(calls) - 1 - calls[::-1].index(("write", path))
        assert calls[last + 1 : last + 3] == [("fsync", path), ("rename", path)], "the last write is not synced"
        assert {call for call in calls[first:last] if call[1] != path} == set()
    final = max(index for index, (name, _) in enumerate(calls) if name == "rename")
    hidden = calls[final][1]
    assert {path.parent for path in written} == {hidden}
    assert calls[final - 1] == ("fsync", hidden)
    assert calls[final + 1 :][:2] == [("open", tmp_path), ("fsync", tmp_path)]
