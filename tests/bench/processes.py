"""The processes of a contestant as the bench sees them: started and asked together, never waited for without end."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.bench.contestants import Contestant
from tests.bench.workload import Size

LAUNCH = 180.0  # seconds until the first step must be done
_CLOSING = 30.0  # seconds to end by themselves: Ray's driver stops a whole cluster
_SHOWN = 30  # lines of a log that an error shows
_LAST_WORDS = 5.0  # seconds between the end of a process' output and its own end


class ProcessError(RuntimeError):
    """A process that crashed or gave no answer; its text ends with that process' log."""


class Processes:
    """Processes that answer every request with a line of JSON each.

    commands  one a process
    folder    for their standard errors: NAME-0.log, NAME-1.log, ...
    """

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self._lines = name, queue.Queue[tuple[int, str]]()
        self._logs = [folder / f"{name}-{rank}.log" for rank in range(len(commands))]
        self._processes = []
        for rank, command in enumerate(commands):
            with self._logs[rank].open("w") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    text=True,
                    start_new_session=True,  # so that it can be killed with all that it started
                )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def ask(self, *request: object, seconds: float) -> list[Any]:
        """Every process' answer, by rank. Raises ProcessError if one ends, or is silent for so many seconds."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended, and its output says so too
                _pipe(process.stdin).write(json.dumps(request) + "\n")
                _pipe(process.stdin).flush()
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[Any]:
        """What every process says next, as ``ask``."""
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(found) < len(self._processes):
            try:
                rank, line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                silent = next(rank for rank in range(len(self._processes)) if rank not in found)
                raise self._error(silent, f"gave no answer within {seconds:g} s") from None
            if not line:
                raise self._error(rank, self._end_of(rank))
            found[rank] = json.loads(line)
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """End them: their input ends, and whoever does not end with it is killed."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                _pipe(process.stdin).close()
        end = time.monotonic() + _CLOSING
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End them at once, with all that they started. Twice is no harm: their ids may be others' by then."""
        processes, self._processes = self._processes, []
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in _pipe(process.stdout):
            self._lines.put((rank, line))
        self._lines.put((rank, ""))

    def _end_of(self, rank: int) -> str:
        try:
            return f"ended with exit code {self._processes[rank].wait(_LAST_WORDS)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def _error(self, rank: int, what: str) -> ProcessError:
        lines = self._logs[rank].read_text(errors="replace").splitlines()[-_SHOWN:]
        return ProcessError("\n".join([f"{self.name}: process {rank} {what}; the end of {self._logs[rank]}:", *lines]))


def start(contestant: Contestant, size: Size, folder: Path) -> Processes:
    """Start a contestant's processes as torchrun would: its environment variables, one thread each."""
    command = [sys.executable, "-m", "tests.bench.child", contestant.name, size.name]
    environment = {
        "WORLD_SIZE": str(contestant.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    commands = [[*command, str(rank)] for rank in range(contestant.processes)]
    return Processes(contestant.name, commands, folder, environment)


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None, "processes are started with both pipes"
    return end


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
