"""Ray's control server, the GCS: whether it answers, and how Ray ends without it.

Actors compute without it, but after a minute Ray ends all processes.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ray

from raypar.actors.machine.process_identity import own_identity, process_began
from raypar.actors.machine.system_features import has_feature
from raypar.cluster.ray_private import dead_servers, own_raylet

_LOOK = 1.0  # seconds between two checks
_ANSWER = 2.0  # seconds within which it accepts a connection
_PATIENCE = 10.0  # seconds without a connection after which it counts as dead; a restart takes some
_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's setting, after which it ends a process; 60 by itself
_PROC = Path("/proc")


class ControlServer:
    """The control server of the cluster that this process is connected to.

    If this process has started Ray, the server's process is checked, else its port. A cluster whose control server may
    be away for longer, as with Redis storage, sets Ray's limit for that: this class waits half of it.
    """

    def __init__(self) -> None:
        self._next_look, self._refused_at = 0.0, float("inf")
        self._why = ""

    def why_lost(self) -> str:
        """Return why Ray's control server counts as lost; "" if it is alive. It is checked from time to time."""
        if not self._why and time.monotonic() > self._next_look and ray.is_initialized():
            self._next_look = time.monotonic() + _LOOK
            self.answers()
        return self._why

    def answers(self) -> bool:
        """Check now; return whether it accepts calls. Without it Ray would wait for a minute at each call."""
        address = ray.get_runtime_context().gcs_address
        if "gcs_server" in dead_servers():
            self._why = f"Ray's control server (GCS, {address}) has died"
        elif _accepts(address):
            self._refused_at = float("inf")
            return True
        else:
            self._refused_at = min(self._refused_at, time.monotonic())
            if (since := time.monotonic() - self._refused_at) > _patience():
                self._why = f"Ray's control server (GCS, {address}) has not answered for {since:.0f} s"
        return False


def _patience() -> float:
    """Return the seconds for which a cluster's control server may be away."""
    try:
        return max(_PATIENCE, float(os.environ.get(_RECONNECTS, "")) / 2)
    except ValueError:
        return _PATIENCE


def _accepts(address: str) -> bool:
    """Return whether a server accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except (OSError, ValueError):
        return False
    return True


def end_without_server() -> None:
    """Shut Ray down, and end the processes that its raylet has started, which do not end without a control server."""
    began = {process: process_began(process) for process in _children(own_raylet())}
    ray.shutdown()
    for process, then in began.items():
        if then is not None and process_began(process) == then:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _children(parent: int | None) -> Iterator[int]:
    """Yield the child processes of a process; none if the system has no list of processes."""
    if parent is None or not has_feature("process_list") or not own_identity().pid_domain:
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent:
                    yield int(entry.name)
