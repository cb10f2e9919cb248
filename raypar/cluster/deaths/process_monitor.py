"""The processes of a job's actors on this node: ending them at once, and reading how they ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raypar.actors.machine.last_action import last_action_in
from raypar.actors.machine.process_identity import open_files, open_process
from raypar.actors.specs.results import Located
from raypar.cluster.deaths.worker_logs import log_of

_ENDED = 1.0  # seconds within which a process ends after its connections are closed
_INFO = struct.Struct("<Q52xi")  # of Linux's struct pidfd_info: mask and exit_code
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO
_HAS_EXIT = 1 << 3  # PIDFD_INFO_EXIT, since Linux 6.15
_KILLS = "oom_kill "  # in /proc/vmstat: number of processes that the kernel has ended for lack of memory


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: Its exit code; None if it ended by a signal.
        signal: The name of that signal; "" without one.
    """

    code: int | None
    signal: str

    @classmethod
    def of(cls, status: int) -> Exit:
        """Return the meaning of a wait status, as returned by ``os.wait``."""
        if not os.WIFSIGNALED(status):
            return cls(os.waitstatus_to_exitcode(status), "")
        number = os.WTERMSIG(status)
        with suppress(ValueError):
            return cls(None, signal.Signals(number).name)
        return cls(None, f"signal {number}")


@dataclass(frozen=True)
class ProcessReport:
    """The report of a node on an actor that has died.

    Attributes:
        last_action: The last action that the actor began; "" if not known.
        exit: How its process ended; None if not known.
        memory_kills: Number of processes that the node's kernel has ended for lack of memory since the last report.
        log_file: The actor's log file; "" if there is none.
        log: The end of the log's text.
        is_silent: Whether its node does not answer.
    """

    last_action: str = ""
    exit: Exit | None = None
    memory_kills: int = 0
    log_file: str = ""
    log: str = ""
    is_silent: bool = False


@dataclass(frozen=True)
class _Opened:
    """Descriptors of a process and of the file with its last action (-1 without one), and its pid."""

    process: int
    note: int
    number: int


class ProcessMonitor:
    """The processes of actors on this node, by rank.

    It holds descriptors and not pids, because another process may get the same pid, or have it in this PID namespace.
    With a descriptor it can end a process at once, even a stopped one, which would not end by itself for seconds.

    Args:
        vmstat: The file with the kernel's counts of virtual memory.
    """

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._opened = dict[int, _Opened]()
        self._vmstat, self._kills = vmstat, 0

    def know(self, located: Mapping[int, Located]) -> None:
        """Monitor these processes of this node, by rank, and no others from now on."""
        self.close()
        self._kills = self._count_kills()
        for rank, at in located.items():
            with suppress(OSError):  # it has just died, or its pid is of another PID namespace
                process, note = open_process(at.process), -1
                with suppress(OSError):
                    (note,) = open_files(at.process, [at.last_action])
                self._opened[rank] = _Opened(process, note, at.process.pid)

    def number(self, rank: int) -> int | None:
        """Return the pid of a process; None if not known."""
        return self._opened[rank].number if rank in self._opened else None

    def last_action(self, rank: int) -> str:
        """Return the last action that an actor began; "" if not known."""
        return last_action_in(self._opened[rank].note) if rank in self._opened else ""

    def exit_of(self, rank: int) -> Exit | None:
        """Return how a process ended; None if it is not monitored, or if this kernel (before 6.15) can't report it."""
        if rank not in self._opened:
            return None
        fd, end = self._opened[rank].process, time.monotonic() + _ENDED
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1e3 * _ENDED):
            return None
        while time.monotonic() < end:
            info = bytearray(_INFO.pack(_HAS_EXIT, 0))
            try:
                fcntl.ioctl(fd, _GET_INFO, info)
            except OSError:
                return None
            has, status = _INFO.unpack(info)
            if has & _HAS_EXIT:
                return Exit.of(status)
            time.sleep(0.01)  # until its parent has waited for it
        return None

    def new_memory_kills(self) -> int:
        """Return the number of processes that this kernel has ended for lack of memory since the last call."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills - before

    def seen(self, rank: int, number: int | None = None) -> ProcessReport:
        """Return the report of an actor that has died.

        Args:
            rank: The actor's rank.
            number: The pid of its process from another source, if it is known to be on this node.
        """
        known = self.number(rank)
        log_file, log = log_of(number if known is None else known)
        return ProcessReport(self.last_action(rank), self.exit_of(rank), self.new_memory_kills(), log_file, log)

    def kill(self, rank: int) -> None:
        """End the process of an actor, if it is monitored, and stop monitoring it."""
        if rank in self._opened:
            with suppress(OSError):
                signal.pidfd_send_signal(self._opened[rank].process, signal.SIGKILL)
            self._forget(rank)

    def close(self) -> None:
        """Stop monitoring all processes."""
        for rank in list(self._opened):
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        one = self._opened.pop(rank)
        os.close(one.process)
        if one.note >= 0:
            os.close(one.note)

    def _count_kills(self) -> int:
        with suppress(OSError, ValueError):
            for line in self._vmstat.read_text().splitlines():
                if line.startswith(_KILLS):
                    return int(line.removeprefix(_KILLS))
        return 0
