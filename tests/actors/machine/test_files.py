"""Work for cores that nobody else wants is all done, in order and in time; a file is there whole or not at all."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from raypar.actors.machine.files import WholeFile, exhaust, whole_folder

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads give way on Linux only")


def pieces(count, done, seconds=0.0):
    for number in range(count):
        time.sleep(seconds)
        done.append((number, threading.current_thread().name, os.sched_getscheduler(0)))
        yield


@LINUX
def test_a_thread_that_gives_way_does_it(request):
    done = []
    exhaust(pieces(3, done), 60.0)
    assert done == [(number, "raypar-spare", os.SCHED_IDLE) for number in range(3)]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert "raypar-spare" not in [thread.name for thread in threading.enumerate()]


@LINUX
def test_what_is_late_is_done_like_any_other_work():
    done, here = [], threading.current_thread().name
    exhaust(pieces(5, done, 0.05), 0.12)
    assert [number for number, _, _ in done] == list(range(5))
    names = [name for _, name, _ in done]
    assert names == sorted(names, key=lambda name: name == here)
    assert {"raypar-spare", here} == set(names)
    assert done[-1][2] == os.SCHED_OTHER


@pytest.mark.parametrize("spare", [0.0, 60.0])
def test_without_time_or_leave_it_is_done_at_once(spare, monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    done = []
    exhaust(pieces(2, done), spare)
    assert [(number, name) for number, name, _ in done] == [(n, threading.current_thread().name) for n in range(2)]


@pytest.mark.parametrize("spare", [0.0, 0.02, 60.0])
def test_what_goes_wrong_is_raised_here_and_nothing_more_is_done(spare):
    def work():
        done.append("one")
        time.sleep(0.05)
        yield
        raise OSError("full")

    done = []
    with pytest.raises(OSError, match="full"):
        exhaust(work(), spare)
    assert done == ["one"]


def test_a_file_is_there_when_it_is_committed_and_else_nothing_is(tmp_path):
    path = tmp_path / "a"
    with WholeFile(path) as out:
        out.write(b"one, ")
        out.write(memoryview(b"two"))
        assert not path.exists()
        out.commit()
        assert path.read_bytes() == b"one, two"
    assert out.size == 8
    with pytest.raises(OSError, match="full"), WholeFile(path) as out:
        out.write(b"half")
        raise OSError("full")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"), WholeFile(tmp_path / "folder") as out:
        out.commit()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "folder"]
    assert path.read_bytes() == b"one, two", "the one that was there stays"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model"
    with whole_folder(path) as aside:
        (aside / "weights").write_text("all")
        assert not path.exists() and aside.parent == tmp_path
    assert [one.name for one in tmp_path.iterdir()] == ["model"] and (path / "weights").read_text() == "all"
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "other") as aside:
        (aside / "weights").write_text("a part")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="not empty"), whole_folder(path) as aside:
        (aside / "weights").write_text("others")
    assert [one.name for one in tmp_path.iterdir()] == ["model"] and (path / "weights").read_text() == "all"
