"""Processes that are ended by their descriptors, and what is read of those that have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from raypar.actors.machine.last_action import LastAction, last_action_in
from raypar.actors.machine.process_identity import open_files, own_identity, process_began
from raypar.actors.specs.results import Located
from raypar.cluster.deaths.process_monitor import Exit, ProcessMonitor
from raypar.schedules.action import STEP, Action, Op
from tests.support.descriptors import descriptors
from tests.support.kernel import TELLS_EXITS

# The child ends when it reads a line; its parent waits for it, as Ray's raylet does for its workers, and then says so.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os; print(os.getpid(), flush=True); input(); {}"])
child.wait()
print("over", flush=True)
sys.stdin.read()
"""


def located(pid):
    return Located("here", own_identity()._replace(pid=pid, began=process_began(pid) or 1))


def test_a_stopped_process_is_ended_and_a_dead_one_harms_nobody():
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    before = descriptors()
    processes = ProcessMonitor()
    processes.know({0: located(stopped.pid), 1: located(dead.pid)})
    os.kill(stopped.pid, signal.SIGSTOP)
    for rank in (0, 1, 2, 0):
        processes.kill(rank)
    assert stopped.wait(10) == -signal.SIGKILL
    processes.know({0: located(os.getpid())})
    assert processes.number(0) == os.getpid()
    processes.close()
    processes.kill(0)
    assert not descriptors() - before
    assert (processes.number(0), processes.exit_of(0), processes.last_action(0)) == (None, None, "")


@pytest.mark.parametrize(
    ("end", "exit_"),
    [
        ("os._exit(3)", Exit(3, "")),
        ("os.kill(os.getpid(), 9)", Exit(None, "SIGKILL")),
        ("import ctypes; ctypes.string_at(0)", Exit(None, "SIGSEGV")),
    ],
)
def test_how_a_process_of_another_parent_has_ended(end, exit_):
    text = PARENT.format(end)
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        processes = ProcessMonitor()
        processes.know({0: located(int(parent.stdout.readline()))})
        print(file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "over\n"
        found = processes.exit_of(0)
        processes.close()
        parent.stdin.close()
    assert found == (exit_ if TELLS_EXITS else None)


def test_the_kernels_own_kills_are_counted_since_the_last_time(tmp_path):
    file = tmp_path / "vmstat"
    file.write_text("nr_free 7\noom_kill 4\n")
    processes = ProcessMonitor(file)
    processes.know({})
    assert processes.new_memory_kills() == 0
    file.write_text("nr_free 7\noom_kill 6\n")
    assert (processes.new_memory_kills(), processes.new_memory_kills()) == (2, 0)
    missing = ProcessMonitor(tmp_path / "none")
    missing.know({})
    assert missing.new_memory_kills() == 0


def test_the_last_action_is_read_from_outside():
    before, last = descriptors(), LastAction()
    last.begin(2, STEP)
    (fd,) = open_files(own_identity(), [last.share()])
    assert last_action_in(fd) == "STEP of step 3"
    last.begin(3, Action(11, Op.REDUCE_GRAD, None))
    last.begin(3, Action(1, Op.B, 3))
    assert last_action_in(fd) == "1B3 of step 4"
    assert last.share() == last.share()
    last.forget()
    assert last_action_in(fd) == ""
    os.close(fd)
    os.close(last.share())
    assert last_action_in(fd) == ""
    del last
    assert len(descriptors() - before) <= 1  # the mapping has a descriptor of its own


@pytest.mark.parametrize("differs", ["pid_namespace", "user_namespace", "uid", "boot", "began"])
def test_nobody_else_is_ended_who_has_the_number_of_an_actor(differs):
    """As where driver and actors are in containers with one network, or where an actor's number was given anew."""
    with subprocess.Popen(["sleep", "60"]) as innocent:
        its = located(innocent.pid).process
        other = its._replace(**{differs: "another" if differs == "boot" else getattr(its, differs) + 1})
        processes = ProcessMonitor()
        processes.know({0: Located("here", other)})
        processes.kill(0)
        assert processes.number(0) is None and innocent.poll() is None
        processes.know({0: Located("here", its)})
        processes.kill(0)
        assert innocent.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("module", "name"), [(os, "pidfd_open"), (signal, "pidfd_send_signal")])
def test_a_python_that_opens_no_processes_knows_none(monkeypatch, module, name):
    """As one that was built for an old Linux: a launch without recovery needs none of it."""
    monkeypatch.delattr(module, name)
    before, processes = descriptors(), ProcessMonitor()
    processes.know({0: located(os.getppid())})
    assert processes.number(0) is None and not descriptors() - before
