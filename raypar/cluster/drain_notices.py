"""Nodes that are about to be taken away: a preempted machine, one that is shut down, or one that somebody drains."""

from __future__ import annotations

import logging
import math
import time

from raypar.cluster.control_server import ControlServer
from raypar.cluster.nodes import named
from raypar.cluster.ray_private import draining_nodes

log = logging.getLogger(__name__)
_LOOK = 0.5  # seconds between two looks


class DrainNotices:
    """The notices of nodes that are taken away. Ray gives one when a node is drained, with or without a deadline.

    Args:
        server: Ray's control server, which is asked.

    Attributes:
        names: The nodes, as "host (address)", by id.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self.names: dict[str, str] = {}
        self._waits: dict[str, float] = {}  # until when others are waited for, in seconds of time.monotonic
        self._next_look = 0.0

    def look(self) -> bool:
        """Ask Ray, from time to time; return whether there is a notice that was not there before."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK
        if not self._server.answers():
            return False
        draining = draining_nodes()
        new = [node for node in draining if node not in self.names]
        for node in new:
            self.names[node] = named(node)
            left = draining[node] - time.time()
            self._waits[node] = time.monotonic() + left / 2
            log.warning("%s is taken away%s", self.names[node], f" in {left:.0f} s" if math.isfinite(left) else "")
        for node in self.names.keys() - draining.keys():
            del self.names[node], self._waits[node]
        return bool(new)

    @property
    def is_urgent(self) -> bool:
        """Whether half the time is over that is left of a node: then nobody is waited for any more."""
        return time.monotonic() > min(self._waits.values(), default=math.inf)

    def __str__(self) -> str:
        return " and ".join(sorted(self.names.values()))
