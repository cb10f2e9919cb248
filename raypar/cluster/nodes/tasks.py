"""Ray tasks on all nodes of a cluster: a function of bytes, and its results in the order of the arguments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from raypar.cluster.nodes.probes import ray_error_reason, remote_cause
from raypar.errors import JobError

_GROUP = 8 << 20  # bytes of a task, so many that computing takes longer than sending
_AHEAD = 2  # tasks a CPU
_SECONDS = 600.0  # most seconds between the results of two tasks
_LOOK = 0.5  # seconds of a wait: Ray ignores Ctrl-C while waiting


def is_connected() -> bool:
    """Return whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def in_tasks(call: Callable[[bytes], bytes], blocks: Iterable[bytes], cpus: int) -> Generator[bytes, None, None]:
    """Call a function with each of some blocks, on any node, and yield the results in order.

    A task takes several blocks. One whose node is lost runs again on another node.

    Args:
        call: The function, which every node must be able to import.
        blocks: The blocks. They are read a few tasks ahead.
        cpus: Number of tasks that run at a time.

    Raises:
        ValueError: The function has raised it.
        JobError: A task fails otherwise, or none ends in time.
    """
    decorate: Any = ray.remote
    task, function = decorate(num_cpus=1, max_retries=3)(_called), ray.put(call)
    waiting = deque[Any]()
    try:
        for group in _grouped(blocks):
            if len(waiting) == _AHEAD * cpus:
                yield from _answer(waiting.popleft())
            waiting.append(task.remote(function, group))
        while waiting:
            yield from _answer(waiting.popleft())
    finally:
        for left in waiting:
            ray.cancel(left, force=True)


def _called(call: Callable[[bytes], bytes], blocks: list[bytes]) -> list[bytes]:
    return [*map(call, blocks)]


def _grouped(blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
    group, size = list[bytes](), 0
    for block in blocks:
        group.append(block)
        size += len(block)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _answer(task: Any) -> list[bytes]:
    """Wait for a task, and return its result. Raises ValueError, if the function does, or JobError."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            answer: list[bytes] = ray.get(task, timeout=_LOOK)
        except GetTimeoutError:
            continue
        except RayError as error:
            if isinstance(cause := remote_cause(error), ValueError):
                raise cause from error
            raise JobError(f"a task failed on the cluster: {ray_error_reason(error)}") from error
        return answer
    raise JobError(f"no task has ended on the cluster for {_SECONDS:.0f} s: are CPUs free (ray status)?")
