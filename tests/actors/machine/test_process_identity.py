"""Which processes can do what with one another, and that nobody else's process is opened by its number."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from raypar.actors.machine import process_identity
from raypar.actors.machine.process_identity import (
    ProcessIdentity,
    open_files,
    open_process,
    own_identity,
    process_began,
)
from tests.support.descriptors import descriptors
from tests.support.namespaces import CONTAINER, OTHER_USER, missing, unshared

IDENTITY = "from raypar.actors.machine.process_identity import own_identity; print(tuple(own_identity()))"
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@contextmanager
def sleeping(**its):
    with subprocess.Popen(["sleep", "60"], **its) as child:
        yield child
        child.kill()


def identity_of(pid):
    return own_identity()._replace(pid=pid, began=process_began(pid))


@pytest.mark.parametrize(
    ("namespaces", "memory", "pids", "clock"),
    [
        (("--mount",), True, True, True),
        (CONTAINER, True, False, True),
        (("--net",), False, True, True),
        (("--user", "--map-root-user"), False, False, True),
        (("--pid", "--fork"), True, False, True),  # its /proc shows the pids of another namespace
        (("--time", "--fork"), True, False, False),
    ],
    ids=str,
)
def test_what_a_process_in_other_namespaces_has_in_common_with_this_one(namespaces, memory, pids, clock):
    if why := missing(*namespaces):
        pytest.skip(why)
    done = subprocess.run(
        [*unshared(*namespaces), sys.executable, "-c", IDENTITY], capture_output=True, text=True, timeout=60
    )
    own, its = own_identity(), ProcessIdentity(*ast.literal_eval(done.stdout))
    if os.geteuid() != 0:
        memory = pids = False  # only a user namespace makes this possible, in which uids are others
    assert own.boot and its.boot == own.boot
    assert (its.memory_domain == own.memory_domain) is memory
    assert (its.pid_domain == own.pid_domain) is pids
    assert (its.clock_domain == own.clock_domain) is clock
    if namespaces == ("--pid", "--fork"):
        assert its.pid_domain == ""
    if not pids:
        with sleeping() as innocent, pytest.raises(ProcessLookupError):
            open_process(its._replace(pid=innocent.pid, began=process_began(innocent.pid)))


def test_another_machine_or_user_has_nothing_in_common_and_who_is_unknown_neither():
    own = own_identity()
    for other in (own._replace(boot="another"), ProcessIdentity()):
        assert other.memory_domain != own.memory_domain and other.pid_domain != own.pid_domain
        assert other.clock_domain != own.clock_domain
    user = own._replace(uid=own.uid + 1)
    assert user.memory_domain != own.memory_domain and user.pid_domain != own.pid_domain
    assert user.clock_domain == own.clock_domain
    with pytest.raises(ProcessLookupError):
        open_process(ProcessIdentity(pid=os.getpid()))


def test_elsewhere_than_on_linux_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    monkeypatch.setattr(process_identity, "_own", process_identity._own.__wrapped__)  # not what is cached
    assert own_identity() == ProcessIdentity(pid=os.getpid())
    assert (own_identity().memory_domain, own_identity().pid_domain, own_identity().clock_domain) == ("", "", "")


def test_a_process_is_opened_by_its_number_and_start_time_and_its_files_are_read(tmp_path):
    (tmp_path / "text").write_text("hello")
    with (tmp_path / "text").open() as file, sleeping(pass_fds=[file.fileno()]) as child:
        its, number, before = identity_of(child.pid), file.fileno(), descriptors()
        (copy,) = open_files(its, [number])
        assert os.pread(copy, 9, 0) == b"hello"
        os.close(copy)
        for other in (its._replace(began=its.began - 1), its._replace(pid=os.getpid())):  # the number is another's now
            with pytest.raises(ProcessLookupError):
                open_process(other)
            with pytest.raises(ProcessLookupError):
                open_files(other, [number])
        with pytest.raises(OSError):
            open_files(its, [number, 99_999])
        opened = open_process(its)
        signal.pidfd_send_signal(opened, signal.SIGTERM)
        os.close(opened)
        assert child.wait(10) == -signal.SIGTERM
        assert process_began(child.pid) is None
        with pytest.raises(OSError):
            open_process(its)
        assert not descriptors() - before


def test_a_process_that_has_ended_and_is_not_waited_for_is_over():
    with sleeping() as child:
        its = identity_of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_began(child.pid) is None
        with pytest.raises(ProcessLookupError):
            open_process(its)


@IS_ROOT
def test_a_process_of_another_user_is_not_opened():
    with sleeping(user=OTHER_USER) as child, pytest.raises(ProcessLookupError):
        open_process(identity_of(child.pid))
