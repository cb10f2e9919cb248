"""The identity of a process among those of all machines, and safe access to other processes.

The number of a process (pid) is valid only in one PID namespace of one boot of one machine, and only until the process
has ended: then another process may get the number. Containers may share a network or a user namespace and not the
others, so each use has its domain, the namespaces that two processes must share:

- ``memory_domain``: they can exchange memory through local sockets;
- ``pid_domain``: a pid denotes the same process for both, and each may signal the other and open its files;
- ``clock_domain``: ``time.perf_counter`` counts from the same moment;
- ``boot``: they run on one machine, and so fail together with it.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from raypar.actors.machine.system_features import has_feature

_PROC = Path("/proc")
_STAT = 4096  # bytes, more than the text of /proc/PID/stat has
_UNUSABLE = -1  # instead of a namespace: /proc does not have the numbers of processes in it


class ProcessIdentity(NamedTuple):
    """What distinguishes a process from all others. Unknown by default, as on other systems than Linux.

    Attributes:
        boot: The id of its machine's present boot; "" if it is unknown. Then the domains are "" too.
        user_namespace: The inode of its user namespace, in which its uid is defined; 0 if the kernel has none.
        uid: The user that it runs as.
        network_namespace: The inode of its network namespace.
        pid_namespace: The inode of its PID namespace; -1 if its /proc is that of another namespace.
        time_namespace: The inode of its time namespace.
        pid: Its number in its PID namespace.
        began: Its start time, in clock ticks since the boot.
    """

    boot: str = ""
    user_namespace: int = 0
    uid: int = 0
    network_namespace: int = 0
    pid_namespace: int = 0
    time_namespace: int = 0
    pid: int = 0
    began: int = 0

    @property
    def memory_domain(self) -> str:
        """The domain of processes that can exchange memory through local sockets; "" if it can with none.

        Abstract names of sockets belong to the network namespace. Uids are part of it because a peer must be the same
        user; the kernel translates them between user namespaces, so that only those of one can be compared.
        """
        return self._domain(self.network_namespace)

    @property
    def pid_domain(self) -> str:
        """The domain of processes that can use one another's pids and files; "" if no other process can.

        It includes the time namespace, because start times depend on it.
        """
        return "" if self.pid_namespace == _UNUSABLE else self._domain(self.pid_namespace, self.time_namespace)

    @property
    def clock_domain(self) -> str:
        """The domain of processes whose clocks count from one moment; "" if it is unknown."""
        return f"{self.boot}/{self.time_namespace}" if self.boot else ""

    def _domain(self, *namespaces: int) -> str:
        return "/".join(map(str, (self.boot, self.user_namespace, self.uid, *namespaces))) if self.boot else ""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return _own(os.getpid(), os.geteuid())


@functools.cache
def _own(pid: int, uid: int) -> ProcessIdentity:
    """Read the identity of this process, once for each child that is forked: it takes 0.3 ms."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return ProcessIdentity(
            boot=boot,
            user_namespace=_namespace("user"),
            uid=uid,
            network_namespace=_namespace("net"),
            pid_namespace=_namespace("pid") if (_PROC / "self").readlink().name == str(pid) else _UNUSABLE,
            time_namespace=_namespace("time"),
            pid=pid,
            began=process_began("self") or 0,
        )
    except OSError:  # as on other systems than Linux
        return ProcessIdentity(pid=pid)


def process_began(process: int | Literal["self"]) -> int | None:
    """Return the start of a process of this PID namespace, in clock ticks since the boot; None if it has ended."""
    try:
        return _began((_PROC / str(process) / "stat").read_text(errors="replace"))
    except OSError:
        return None


def open_process(process: ProcessIdentity) -> int:
    """Open a process, to signal it or to wait for its end. A signal can reach no other process.

    Returns:
        Its descriptor (pidfd).

    Raises:
        OSError: It has ended, or this process can't use its pid, or this Python opens no processes.
    """
    _check_domain(process)
    if not has_feature("process_handles"):  # as where Python was built for an old Linux
        raise OSError(errno.ENOSYS, "this Python can't open processes")
    opened = os.pidfd_open(process.pid)
    try:
        with _verified(process):  # after opening: the process with this identity had the pid when it was opened
            return opened
    except OSError:
        os.close(opened)
        raise


def open_files(process: ProcessIdentity, files: Sequence[int]) -> tuple[int, ...]:
    """Open files of another process, to read them.

    Args:
        process: The process.
        files: The descriptors of its open files.

    Returns:
        Their descriptors in this process.

    Raises:
        OSError: The process has ended, or closed one, or this process can't use its pid.
    """
    opened = list[int]()
    try:
        with _verified(process) as folder:
            for file in files:
                opened.append(os.open(f"fd/{file}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder))
    except OSError:
        for one in opened:
            os.close(one)
        raise
    return tuple(opened)


@contextmanager
def _verified(process: ProcessIdentity) -> Iterator[int]:
    """Open the folder of a process in /proc, which stays that of this process, and verify its identity.

    Raises OSError if there is no such process.
    """
    _check_domain(process)
    folder = os.open(_PROC / str(process.pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stat = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            began = _began(os.read(stat, _STAT).decode(errors="replace"))
        finally:
            os.close(stat)
        if began != process.began or os.fstat(folder).st_uid != process.uid:
            raise _none(process)
        yield folder
    finally:
        os.close(folder)


def _check_domain(process: ProcessIdentity) -> None:
    """Raise OSError if a process is not in this process's PID namespace."""
    if not process.pid_domain or process.pid_domain != own_identity().pid_domain:
        raise _none(process)


def _began(stat: str) -> int | None:
    """Return the start time in the text of /proc/PID/stat; None for a zombie."""
    words = stat.rpartition(")")[2].split()
    return None if len(words) < 20 or words[0] in "ZX" else int(words[19])


def _namespace(kind: str) -> int:
    """Return the inode of a namespace of this process; 0 if the kernel has none of the kind. Raises OSError."""
    try:
        return (_PROC / "self" / "ns" / kind).stat().st_ino
    except FileNotFoundError:
        return 0


def _none(process: ProcessIdentity) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {process.pid} is not there, or not counted here")
