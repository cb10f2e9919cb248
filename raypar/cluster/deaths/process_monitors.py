"""A monitor actor on each other node, which reports how the processes of that node ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.actors.specs.results import Located
from raypar.cluster.deaths.process_monitor import ProcessMonitor, ProcessReport

log = logging.getLogger(__name__)
_ANSWER = 0.75  # seconds within which another node reports a death: a recovery waits for it


class ProcessMonitors:
    """The processes of actors on all nodes, by rank. No method waits for long.

    Each other node has a ProcessMonitor, a Ray actor, which outlives the job's actors there.
    """

    def __init__(self) -> None:
        self._own = ProcessMonitor()
        self._monitors = dict[str, Any]()  # by node, the handle of its monitor
        self._nodes = dict[int, str]()  # by rank, the node, if it is another one than this

    def know(self, located: Mapping[int, Located], nodes: Mapping[int, str]) -> None:
        """Monitor these processes, by rank, and no others from now on. Does not wait for other nodes.

        Args:
            located: The process of each actor.
            nodes: Ray's id of the node of each actor on another node than this; "" if not known.
        """
        self._own.know({rank: at for rank, at in located.items() if rank not in nodes})
        self._nodes = {rank: node for rank, node in nodes.items() if node}
        self.attend(self._nodes.values())
        of_node = dict[str, dict[int, Located]]()
        for rank, node in self._nodes.items():
            of_node.setdefault(node, {})[rank] = located[rank]
        for node, monitor in self._monitors.items():
            with suppress(RayError):
                monitor.know.remote(of_node.get(node, {}))

    def attend(self, nodes: Iterable[str]) -> None:
        """Have a monitor on each of these other nodes, and on no others. Does not wait for them."""
        wanted = set(nodes)
        for node in self._monitors.keys() - wanted:
            self._end(node)
        for node in wanted - self._monitors.keys():
            self._monitors[node] = _start(node)

    def seen(self, rank: int, node_lives: bool, number: int | None = None) -> ProcessReport:
        """Return the report of an actor that has died.

        Args:
            rank: The actor's rank.
            node_lives: Whether its node is alive, so that its monitor can answer.
            number: The pid of its process, if it is known to be on this node.
        """
        node = self._nodes.get(rank)
        if node is None:
            return self._own.seen(rank, number)
        if not node_lives or node not in self._monitors:
            return ProcessReport(is_silent=True)
        try:
            seen: ProcessReport = ray.get(self._monitors[node].seen.remote(rank), timeout=_ANSWER)
        except RayError as error:
            log.debug("the monitor of its node does not answer: %s", error)
            self._end(node)  # the next ``know`` starts another one
            return ProcessReport(is_silent=True)
        return seen

    def kill(self, rank: int) -> None:
        """End the process of an actor, if it is known. Does not wait for another node."""
        self._own.kill(rank)
        if (monitor := self._monitors.get(self._nodes.get(rank, ""))) is not None:
            with suppress(RayError):
                monitor.kill.remote(rank)

    def close(self) -> None:
        """Stop monitoring all processes."""
        self._own.close()
        self._nodes = {}
        for node in list(self._monitors):
            self._end(node)

    def _end(self, node: str) -> None:
        monitor = self._monitors.pop(node)
        with suppress(Exception):  # it ends with the driver at the latest
            if ray.is_initialized():
                ray.kill(monitor)


def _start(node: str) -> Any:
    """Start the monitor of a node, without waiting for it. It takes no CPU."""
    decorate: Any = ray.remote
    pin = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": pin}
    return decorate(num_cpus=0)(ProcessMonitor).options(**options).remote()
