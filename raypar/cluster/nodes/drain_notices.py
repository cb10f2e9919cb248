"""Drain notices of nodes: a preempted machine, one that is being shut down, or one that a user drains."""

from __future__ import annotations

import logging
import math
import time

from raypar.cluster.control_server import ControlServer
from raypar.cluster.nodes.nodes import named
from raypar.cluster.ray_private import draining_nodes

log = logging.getLogger(__name__)
_LOOK = 0.5  # seconds between two queries


class DrainNotices:
    """The drain notices of nodes. Ray has one for each node that is being drained, with or without a deadline.

    Args:
        server: Ray's control server, which has the notices.

    Attributes:
        names: The names of these nodes, as "host (address)", by id.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self.names: dict[str, str] = {}
        # By id: until when the run waits for replacements, in seconds of time.monotonic.
        self._waits: dict[str, float] = {}
        self._next_look = 0.0

    def look(self) -> bool:
        """Query Ray, from time to time; return whether there is a new notice."""
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
        """Whether half the time until a node's deadline is over: then the run waits for no replacement any more."""
        return time.monotonic() > min(self._waits.values(), default=math.inf)

    def __str__(self) -> str:
        return " and ".join(sorted(self.names.values()))
