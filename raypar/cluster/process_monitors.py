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
from raypar.cluster.processes import Processes, ProcessReport

log = logging.getLogger(__name__)
_ANSWER = 0.75  # seconds in which another node tells of a death: a recovery waits for it


class ProcessMonitor:
    """The processes of a job's actors on a node; a Ray actor, which outlives those."""

    def __init__(self) -> None:
        self._processes = Processes()

    def know(self, located: Mapping[int, Located]) -> None:
        """Know these processes of this node from now on, and no others, by their ranks."""
        self._processes.know(located)

    def seen(self, rank: int) -> ProcessReport:
        """Return what is known of an actor that has died."""
        return self._processes.seen(rank)

    def kill(self, rank: int) -> None:
        """End the process of an actor."""
        self._processes.kill(rank)


class ProcessMonitors:
    """What is known of the processes of actors, by rank, wherever they are. Nothing of it waits for long."""

    def __init__(self) -> None:
        self._own = Processes()
        self._there = dict[str, Any]()  # by node, the handle of the witness there
        self._nodes = dict[int, str]()  # by rank, the node; of other nodes than this one

    def know(self, located: Mapping[int, Located], nodes: Mapping[int, str]) -> None:
        """Know these processes from now on, and no others, by their ranks. Other nodes are not waited for.

        Args:
            located: Where each is.
            nodes: Ray's id of the node of each that is on another one than this; "" if it is not known.
        """
        self._own.know({rank: at for rank, at in located.items() if rank not in nodes})
        self._nodes = {rank: node for rank, node in nodes.items() if node}
        self.attend(self._nodes.values())
        of_node = dict[str, dict[int, Located]]()
        for rank, node in self._nodes.items():
            of_node.setdefault(node, {})[rank] = located[rank]
        for node, witness in self._there.items():
            with suppress(RayError):
                witness.know.remote(of_node.get(node, {}))

    def attend(self, nodes: Iterable[str]) -> None:
        """Have a witness on each of these other nodes, and on no more. They are not waited for."""
        wanted = set(nodes)
        for node in self._there.keys() - wanted:
            self._end(node)
        for node in wanted - self._there.keys():
            self._there[node] = _start(node)

    def seen(self, rank: int, node_lives: bool, number: int | None = None) -> ProcessReport:
        """Return what is known of an actor that has died.

        Args:
            rank: Its rank.
            node_lives: Whether its node lives, and so can be asked.
            number: The number of its process, if that is known to be of this node.
        """
        node = self._nodes.get(rank)
        if node is None:
            return self._own.seen(rank, number)
        if not node_lives or node not in self._there:
            return ProcessReport(is_silent=True)
        try:
            seen: ProcessReport = ray.get(self._there[node].seen.remote(rank), timeout=_ANSWER)
        except RayError as error:
            log.debug("its node tells nothing of it: %s", error)
            self._end(node)  # another one comes when the actors are known anew
            return ProcessReport(is_silent=True)
        return seen

    def kill(self, rank: int) -> None:
        """End the process of an actor, if it is known. That of another node is not waited for."""
        self._own.kill(rank)
        if (witness := self._there.get(self._nodes.get(rank, ""))) is not None:
            with suppress(RayError):
                witness.kill.remote(rank)

    def close(self) -> None:
        """Know no process any more."""
        self._own.close()
        self._nodes = {}
        for node in list(self._there):
            self._end(node)

    def _end(self, node: str) -> None:
        witness = self._there.pop(node)
        with suppress(Exception):  # they end with the driver at the latest
            if ray.is_initialized():
                ray.kill(witness)


def _start(node: str) -> Any:
    """Start the witness of a node, without waiting for it. It takes no CPU."""
    decorate: Any = ray.remote
    pin = NodeAffinitySchedulingStrategy(node, soft=False)
    kept = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": pin}
    return decorate(num_cpus=0)(ProcessMonitor).options(**kept).remote()
