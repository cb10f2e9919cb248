"""What only some systems have: the table, what the code does without, and that the table has all that the code uses."""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from raypar.actors.machine import files, flat_memory, host_cores, last_action
from raypar.actors.machine.system_features import REQUIREMENTS, Requirement, has_feature
from raypar.config.conflicts.system import recovery_faults
from tests.support.linux_only import linux_only_names

ROOT = Path(__file__).parents[3]
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="this is another system")
# Files that use what only Linux has, behind a question of their own: whether members have a ``memory_domain``.
SHARED_MEMORY = ("actors/collective/shm/", "actors/collective/rendezvous.py")
PLATFORM = {
    "actors/machine/system_features.py",  # the table
    "actors/machine/device.py",  # the unit of getrusage
    "raypar/config/conflicts/system.py",  # these say which system it is
    "raypar/doctor/leftovers.py",
    "raypar/doctor/machines.py",
}


@ON_LINUX
def test_linux_has_everything():
    assert {feature for feature in REQUIREMENTS if not has_feature(feature)} == set()


def test_what_is_missing_is_told_as_users_know_it(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    absent = str(tmp_path / "absent")
    needs = Requirement(((os, "memfd_create"), (os, "open")), (absent, str(tmp_path)), only_on="beos")
    assert needs.missing() == ["os.memfd_create", "beos", absent]


def test_a_run_is_refused_where_it_could_not_recover(monkeypatch):
    assert not list(recovery_faults(0))
    assert not (list(recovery_faults(3)) and sys.platform == "linux")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    assert not list(recovery_faults(0))
    (fault,) = recovery_faults(3)
    assert fault.startswith("max_failures is 3, but recovery needs os.memfd_create, signal.pidfd_send_signal, which ")
    assert "set max_failures to 0 and give save_every" in fault


def test_without_its_features_everything_still_works(monkeypatch):
    for module in (files, flat_memory, host_cores, last_action):
        monkeypatch.setattr(module, "has_feature", lambda feature: False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert host_cores.num_cores() == 64
    assert last_action.LastAction().share() == -1
    done = []
    files.exhaust((done.append(piece) for piece in range(3)), spare=9.0)
    assert done == [0, 1, 2]
    assert flat_memory.flat_empty(5, torch.float32, torch.device("cpu")).shape == (5,)
    memory = flat_memory.FlatMemory(4, torch.float32, torch.device("cpu"))
    memory.release()
    memory.take()
    memory.tensor.fill_(2.0)
    assert memory.tensor.sum() == 8.0


@ON_LINUX
def test_kernels_without_huge_pages_give_memory_too(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, advice, *where):
            if advice == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            return super().madvise(advice, *where)

    monkeypatch.setattr(flat_memory.mmap, "mmap", Mapping)
    assert flat_memory.flat_empty(5, torch.float32, torch.device("cpu")).shape == (5,)
    memory = flat_memory.FlatMemory(4, torch.float32, torch.device("cpu"))
    memory.release()
    memory.take()
    assert torch.equal(memory.tensor, torch.zeros(4))


def uses(text, names):
    """Uses of names that only Linux has, and of sys.platform, in a source: (module, name)."""
    for module, name in re.findall(rf"\b({'|'.join(names)}|sys)\.(\w+)", text):
        if name in names.get(module, ()) or (module, name) == ("sys", "platform"):
            yield module, name


def test_all_that_only_linux_has_is_in_the_table():
    names = linux_only_names()
    assert {"memfd_create", "pidfd_open", "sched_setscheduler"} <= set(names["os"])  # typeshed is read
    assert "MADV_HUGEPAGE" in names["mmap"]
    assert not {"open", "pread", "sched_yield"} & set(names["os"])
    known = {(module.__name__, name) for one in REQUIREMENTS.values() for module, name in one.names}
    for room in ("actors", "raypar", "schedules"):
        for path in sorted((ROOT / room).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for module, name in uses(path.read_text(), names):
                if name == "platform":
                    assert file in PLATFORM, f"{file} asks sys.platform: ask has_feature"
                else:
                    assert file.startswith(SHARED_MEMORY) or (module, name) in known, f"{file} uses {module}.{name}"


def test_uses_are_seen():
    found = uses("os.eventfd(0)\nos.eventfds(0)\nos.open('x')\nif sys.platform: pass", {"os": ["eventfd"]})
    assert list(found) == [("os", "eventfd"), ("sys", "platform")]
