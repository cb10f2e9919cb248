"""Ray's control server, the GCS: is it there? Actors compute without it, but after a minute Ray ends all processes."""

from __future__ import annotations

import os
import socket
import time

import ray

from raypar.cluster.ray_private import dead_servers

_LOOK = 1.0  # seconds between two looks
_ANSWER = 2.0  # seconds that it may take to accept a connection
_PATIENCE = 10.0  # seconds without a connection after which it is taken for dead; one that is restarted needs some
_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's setting, after which it ends a process; 60 by itself


class ControlServer:
    """The control server of the cluster that this process is connected to.

    Of a Ray that this process has started the server's process is looked at, of a cluster its port. A cluster whose
    control server may be away for longer, as with a Redis behind it, sets Ray's limit for that: half of it is waited.
    """

    def __init__(self) -> None:
        self._next_look, self._refused_at = 0.0, float("inf")
        self._why = ""

    def why_lost(self) -> str:
        """Return why nothing can be asked of Ray any more; "" if its control server is there.

        It is looked at from time to time.
        """
        if not self._why and time.monotonic() > self._next_look and ray.is_initialized():
            self._next_look = time.monotonic() + _LOOK
            self.answers()
        return self._why

    def answers(self) -> bool:
        """Look now; return whether it can be asked something, for which Ray would else wait for a minute."""
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
    """Return for how many seconds a cluster's control server may be away."""
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
