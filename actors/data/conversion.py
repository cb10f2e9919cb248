"""Conversion of data in several processes: blocks of bytes in, converted blocks out, in the same order.

Each block is converted independently, so the results are the same for any number of processes. The processes are
children of this one. They are not started by ``multiprocessing``, which would run the user's script again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any, ClassVar, Protocol, TypeAlias

from raypar.actors.machine.host_cores import num_cores

_BYTES_PER_PROCESS = 4 << 20  # at least: so many keep a process busy for longer than it takes to start
_MOST_PROCESSES = 32  # the parent reads, hashes and writes for all of them
_AHEAD = 2  # queued blocks per process
_SECONDS, _SLOWEST = 120.0, 20_000.0  # deadline of a block: seconds, plus its bytes at so many a second
_END = 5.0  # seconds that a process may take to end
_PARENT_FACTOR = 1.5  # of the deadline: the parent waits longer than its threads, and reports if they do not
_AGAIN = "see whether it is stopped or the machine swaps, and begin again"
_DONE, _FAILED = b"+", b"-"  # how an answer begins
_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from raypar.actors.data.conversion import serve; serve()"
)


class ConversionError(ValueError):
    """A conversion process has ended, or does not answer. The text says how to fix it."""


class BlockConverter(Protocol):
    """Converts blocks: a dataclass of plain fields, which another process can construct from JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __call__(self, block: bytes) -> bytes:
        """Convert a block. Raises ValueError if that fails."""


Converted: TypeAlias = Generator[bytes, None, None]
Convert: TypeAlias = Callable[[BlockConverter, Iterable[bytes], int], Converted]
"""Converts blocks of so many bytes in total, and yields the converted blocks in order.

Raises ValueError for a block that can't be converted, and ConversionError."""


def by_size(conversion: BlockConverter, blocks: Iterable[bytes], size: int) -> Converted:
    """Convert small data in this process, and larger data in one process for each core.

    Args:
        conversion: Converts each block.
        blocks: The blocks.
        size: Bytes of all blocks, approximately.

    Raises:
        ValueError: A block can't be converted.
        ConversionError: A process has ended or does not answer.
    """
    count = min(num_cores(), size // _BYTES_PER_PROCESS, _MOST_PROCESSES)
    yield from map(conversion, blocks) if count < 2 else in_processes(conversion, blocks, count)


def in_processes(conversion: BlockConverter, blocks: Iterable[bytes], count: int) -> Converted:
    """Convert blocks in child processes, which end with the last block, or when the caller stops.

    Args:
        conversion: Converts each block.
        blocks: The blocks. A few are read ahead.
        count: Number of processes.

    Raises:
        ValueError: A block can't be converted.
        ConversionError: A process has ended or does not answer; the text says which and why.
    """
    idle, waiting = SimpleQueue[_Process](), deque[Future[bytes]]()

    def converted(block: bytes) -> bytes:
        process = idle.get()
        try:
            return process.converted(block)
        finally:
            idle.put(process)

    def first() -> bytes:
        try:
            return waiting.popleft().result(_AHEAD * _PARENT_FACTOR * longest)
        except TimeoutError as error:
            raise ConversionError(f"what converts data does not answer: {_AGAIN}") from error

    processes, longest = list[_Process](), 1.0
    with ThreadPoolExecutor(count) as threads:
        try:
            for _ in range(count):
                processes.append(_Process(conversion))
                idle.put(processes[-1])
            for block in blocks:
                if len(waiting) == _AHEAD * count:
                    yield first()
                longest = max(longest, _seconds(block))
                waiting.append(threads.submit(converted, block))
            while waiting:
                yield first()
        finally:
            for future in waiting:
                future.cancel()
            for process in processes:
                process.end()


def _seconds(block: bytes) -> float:
    """Return the deadline of a block in seconds."""
    return _SECONDS + len(block) / _SLOWEST


class _Process:
    """A child process that converts blocks.

    Args:
        conversion: Converts each block.
    """

    def __init__(self, conversion: BlockConverter) -> None:
        self._pipe, other = Pipe()
        self._output = TemporaryFile()  # noqa: SIM115  (as long as the process)
        kind = type(conversion)
        arguments = json.dumps(sys.path), str(other.fileno()), kind.__module__, kind.__name__
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments, json.dumps(asdict(conversion))],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[other.fileno()],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # there is a process for each core
        )
        other.close()

    def converted(self, block: bytes) -> bytes:
        """Convert a block. Raises ValueError or ConversionError."""
        try:
            self._pipe.send_bytes(block)
            if not self._pipe.poll(seconds := _seconds(block)):
                process = f"process {self._child.pid}, which converts data,"
                raise ConversionError(f"{process} has not answered for {seconds:.0f} s: {_AGAIN}")
            answer = self._pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise ConversionError(self._end_message()) from error
        if answer[:1] == _FAILED:
            raise ValueError(answer[1:].decode())
        return answer[1:]

    def end(self) -> None:
        """End the process, whatever it does. A second call does nothing."""
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END)
        self._pipe.close()
        self._output.close()

    def _end_message(self) -> str:
        """Describe how the process has ended, with the last line of its output."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END)
        code = self._child.returncode
        if code is None or code >= 0:
            self._output.seek(0)
            *_, last = [b"", *(line for line in self._output.read().splitlines() if line.strip())]
            how = f"with exit code {code}" if not last else f"with exit code {code} ({last.decode(errors='replace')})"
        else:
            names = {one.value: one.name for one in signal.Signals}
            how = f"by {names.get(-code, f'signal {-code}')}"
            how += ", perhaps for want of memory" if -code == signal.SIGKILL else ""
        return f"process {self._child.pid}, which converts data, was ended {how}: nothing is left of it, begin again"


def serve() -> None:
    """Convert the blocks that a parent process sends, until it closes the pipe. The main function of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent too, which ends this process
    _, descriptor, module, name, fields = sys.argv[1:]
    conversion: BlockConverter = getattr(import_module(module), name)(**json.loads(fields))
    pipe = Connection(int(descriptor))
    with suppress(EOFError, OSError):
        while True:
            block = pipe.recv_bytes()
            try:
                answer = _DONE + conversion(block)
            except ValueError as error:
                answer = _FAILED + str(error).encode()
            pipe.send_bytes(answer)
