"""The processes of a job's actors on this node: they can be ended at once, and how they ended is read."""

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

from raypar.actors.last_action import last_action_in
from raypar.actors.process_identity import open_files, open_process
from raypar.actors.specs.results import Located
from raypar.cluster.worker_logs import log_of

_ENDED = 1.0  # seconds in which a process whose connections are closed has ended
_INFO = struct.Struct("<Q52xi")  # of Linux's struct pidfd_info: mask and exit_code
_ASK_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO
_HAS_EXIT = 1 << 3  # PIDFD_INFO_EXIT, since Linux 6.15
_KILLS = "oom_kill "  # in /proc/vmstat: how many processes the kernel has ended for want of memory


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
        """Return what a wait status says, as ``os.wait`` returns it."""
        if not os.WIFSIGNALED(status):
            return cls(os.waitstatus_to_exitcode(status), "")
        number = os.WTERMSIG(status)
        with suppress(ValueError):
            return cls(None, signal.Signals(number).name)
        return cls(None, f"signal {number}")


@dataclass(frozen=True)
class ProcessReport:
    """What its node tells of an actor that has died.

    Attributes:
        last_action: The last action that it began; "" if it is not known.
        exit: How its process ended; None if it is not known.
        memory_kills: How many processes the node's kernel has ended since the last question, for want of memory.
        log_file: Its log; "" if there is none.
        log: The end of the log's text.
        is_silent: Whether nothing is heard of its node.
    """

    last_action: str = ""
    exit: Exit | None = None
    memory_kills: int = 0
    log_file: str = ""
    log: str = ""
    is_silent: bool = False


@dataclass(frozen=True)
class _Opened:
    """Descriptors of a process and of the file with its last action (-1 without one), and the process's number."""

    process: int
    note: int
    number: int


class Processes:
    """The processes of actors on this node, by rank.

    It knows them by descriptors and not by their numbers, which another process may have got meanwhile, or may have in
    this PID namespace. So it can end one without its help: one that is stopped would not end for seconds.

    Args:
        vmstat: The kernel's counts of what it does about memory.
    """

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._opened = dict[int, _Opened]()
        self._vmstat, self._kills = vmstat, 0

    def know(self, located: Mapping[int, Located]) -> None:
        """Know these processes of this node from now on, and no others, by their ranks."""
        self.close()
        self._kills = self._count_kills()
        for rank, at in located.items():
            with suppress(OSError):  # it has just died, or its number is one of another PID namespace
                process, note = open_process(at.process), -1
                with suppress(OSError):
                    (note,) = open_files(at.process, [at.last_action])
                self._opened[rank] = _Opened(process, note, at.process.pid)

    def number(self, rank: int) -> int | None:
        """Return the number of a process; None if it is not known."""
        return self._opened[rank].number if rank in self._opened else None

    def last_action(self, rank: int) -> str:
        """Return the last action that an actor began; "" if it is not known."""
        return last_action_in(self._opened[rank].note) if rank in self._opened else ""

    def exit_of(self, rank: int) -> Exit | None:
        """Return how a process ended; None if it is not known, or if this kernel (before 6.15) does not tell."""
        if rank not in self._opened:
            return None
        fd, end = self._opened[rank].process, time.monotonic() + _ENDED
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1e3 * _ENDED):
            return None
        while time.monotonic() < end:
            asked = bytearray(_INFO.pack(_HAS_EXIT, 0))
            try:
                fcntl.ioctl(fd, _ASK_INFO, asked)
            except OSError:
                return None
            has, status = _INFO.unpack(asked)
            if has & _HAS_EXIT:
                return Exit.of(status)
            time.sleep(0.01)  # until its parent has taken notice
        return None

    def new_memory_kills(self) -> int:
        """Return how many processes of this machine the kernel has ended for want of memory since the last call."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills - before

    def seen(self, rank: int, number: int | None = None) -> ProcessReport:
        """Return what is known of an actor that has died.

        Args:
            rank: Its rank.
            number: The number of its process, if that is told otherwise, and known to be of this node.
        """
        known = self.number(rank)
        log_file, log = log_of(number if known is None else known)
        return ProcessReport(self.last_action(rank), self.exit_of(rank), self.new_memory_kills(), log_file, log)

    def kill(self, rank: int) -> None:
        """End the process of an actor, if it is known, and know it no more."""
        if rank in self._opened:
            with suppress(OSError):
                signal.pidfd_send_signal(self._opened[rank].process, signal.SIGKILL)
            self._forget(rank)

    def close(self) -> None:
        """Know no process any more."""
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
