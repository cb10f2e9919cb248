"""End the Ray that this process has started, also when its control server is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ray

from raypar.actors.process_identity import own_identity, process_began
from raypar.actors.system_features import has_feature
from raypar.cluster.ray_private import own_raylet

_PROC = Path("/proc")


def end_without_server() -> None:
    """Shut Ray down, and end the processes that its raylet has started: without a control server they do not end."""
    began = {process: process_began(process) for process in _children(own_raylet())}
    ray.shutdown()
    for process, then in began.items():
        if then is not None and process_began(process) == then:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _children(parent: int | None) -> Iterator[int]:
    """Yield the processes that a process has started; none where the system has no list of processes."""
    if parent is None or not has_feature("process_list") or not own_identity().pid_domain:
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent:
                    yield int(entry.name)
