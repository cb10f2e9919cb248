"""Conversion of data in several processes: blocks of bytes in, what they are converted to out, in the same order.

A block is converted by itself, so the results are the same for any number of processes. The processes are children of
this one. They are no ``multiprocessing`` ones, which would run the user's script again.
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

from raypar.actors.host_cores import num_cores

_WORTH = 4 << 20  # bytes that keep a process busy for longer than it takes to start
_MOST_PROCESSES = 32  # the parent reads, hashes and writes for all of them
_AHEAD = 2  # blocks a process that wait for it, or for those before them
_SECONDS, _SLOWEST = 120.0, 20_000.0  # that a block may take, and bytes a second besides
_END = 5.0  # seconds that a process may take to end
_PATIENCE = 1.5  # of the parent, which tells of what its threads do not
_AGAIN = "see whether it is stopped or the machine swaps, and begin again"
_DONE, _FAILED = b"+", b"-"  # how an answer begins
_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from raypar.actors.data.conversion import serve; serve()"
)


class ConversionError(ValueError):
    """A process that converts has ended, or does not answer. The text says what helps."""


class BlockConverter(Protocol):
    """Converts blocks: a dataclass of plain fields, which another process can make again."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __call__(self, block: bytes) -> bytes:
        """Convert a block. Raises ValueError if that fails."""


Converted: TypeAlias = Generator[bytes, None, None]
Convert: TypeAlias = Callable[[BlockConverter, Iterable[bytes], int], Converted]
"""Converts blocks of so many bytes in all, and yields what they are converted to, in order.

Raises ValueError for a block that can't be converted, and ConversionError."""


def by_size(conversion: BlockConverter, blocks: Iterable[bytes], size: int) -> Converted:
    """Convert in this process what is small, and the rest in one process for each core.

    Args:
        conversion: What is done with each block.
        blocks: The blocks.
        size: Their bytes, about.

    Raises:
        ValueError: A block can't be converted.
        ConversionError: A process has ended or does not answer.
    """
    count = min(num_cores(), size // _WORTH, _MOST_PROCESSES)
    yield from map(conversion, blocks) if count < 2 else in_processes(conversion, blocks, count)


def in_processes(conversion: BlockConverter, blocks: Iterable[bytes], count: int) -> Converted:
    """Convert blocks in child processes, which end with the last block, or when the caller stops.

    Args:
        conversion: What is done with each block.
        blocks: The blocks. They are read a few ahead.
        count: Number of processes.

    Raises:
        ValueError: A block can't be converted.
        ConversionError: A process has ended or does not answer. It says which and why.
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
            return waiting.popleft().result(_AHEAD * _PATIENCE * longest)
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
    """Return how long a block may take."""
    return _SECONDS + len(block) / _SLOWEST


class _Process:
    """A child process that converts blocks.

    Args:
        conversion: What it does with each block.
    """

    def __init__(self, conversion: BlockConverter) -> None:
        self._pipe, other = Pipe()
        self._said = TemporaryFile()  # noqa: SIM115  (as long as the process)
        kind = type(conversion)
        words = json.dumps(sys.path), str(other.fileno()), kind.__module__, kind.__name__
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *words, json.dumps(asdict(conversion))],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=[other.fileno()],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # there is a process for each core
        )
        other.close()

    def converted(self, block: bytes) -> bytes:
        """Convert a block. Raises ValueError or ConversionError."""
        try:
            self._pipe.send_bytes(block)
            if not self._pipe.poll(seconds := _seconds(block)):
                told = f"process {self._child.pid}, which converts data, has not answered for {seconds:.0f} s"
                raise ConversionError(f"{told}: {_AGAIN}")
            answer = self._pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise ConversionError(self._told_end()) from error
        if answer[:1] == _FAILED:
            raise ValueError(answer[1:].decode())
        return answer[1:]

    def end(self) -> None:
        """End the process, whatever it does. A second call does nothing."""
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END)
        self._pipe.close()
        self._said.close()

    def _told_end(self) -> str:
        """Say how the process has ended, and what it said last."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END)
        code = self._child.returncode
        if code is None or code >= 0:
            self._said.seek(0)
            *_, last = [b"", *(line for line in self._said.read().splitlines() if line.strip())]
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
