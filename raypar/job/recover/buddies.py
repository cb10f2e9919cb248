"""Buddies: the actor of another node that keeps a copy of an actor's snapshots, and how often it is updated."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raypar.actors.machine.process_identity import ProcessIdentity
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.schedules.grouped import grouped

log = logging.getLogger(__name__)
# Most time of waiting for copies, as a share of the steps' time and in seconds; beyond it copies become less frequent.
_SHARE, _SECONDS = 0.05, 1.0


def failure_domains(processes: Sequence[ProcessIdentity]) -> list[str]:
    """Return by rank the failure domain of its snapshots, for ``buddies_of``; "" if not known.

    It is the machine, with all containers on it. If all ranks are on one machine, it is the container or node whose
    processes share their snapshots: then a copy in another container is the best protection possible.

    Args:
        processes: By rank, the process of its actor.
    """
    machines = [process.boot for process in processes]
    return machines if len({*machines} - {""}) > 1 else [process.pid_domain for process in processes]


def buddies_of(nodes: Sequence[str]) -> tuple[int | None, ...]:
    """Choose for each rank a rank of another node that keeps a copy of its snapshots.

    The nodes form a ring, the largest first, and each copy goes as many ranks further as that node has. So every rank
    keeps one copy, unless one node has more than half of all ranks: then the other ranks share its copies evenly.

    Args:
        nodes: By rank, an identifier of its node; "" if not known.

    Returns:
        By rank, its buddy; None if there is no other node, or if its node is not known.
    """
    ranks_on = grouped((node, rank) for rank, node in enumerate(nodes) if node)
    ring = [rank for of_one in sorted(ranks_on.values(), key=lambda ranks: (-len(ranks), ranks)) for rank in of_one]
    buddies: list[int | None] = [None] * len(nodes)
    if len(ranks_on) < 2:
        return tuple(buddies)
    largest = max(map(len, ranks_on.values()))
    elsewhere = ring[largest:]
    for at, rank in enumerate(ring):
        further = ring[(at + largest) % len(ring)]
        buddies[rank] = further if nodes[further] != nodes[rank] else elsewhere[at % len(elsewhere)]
    return tuple(buddies)


class CopyPace:
    """The interval of copies of snapshots to buddies: the run's, or a longer one if steps have to wait for copies.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.every = -(-run.buddy_every // run.snapshot_every) * run.snapshot_every
        self._waited = self._seconds = 0.0  # at the present pace
        self._lost = set[int]()

    def within(self, step: int) -> int:
        """Return the number of steps within which a copy that begins after a step should be complete; 0: none begins.

        The next copy begins a step later, when every actor knows that this one is complete.

        Args:
            step: Number of the step, from 0.
        """
        return max(1, self.every - 1) if (step + 1) % self.every == 0 else 0

    def learn(self, results: Sequence[StepResult], seconds: float, labels: Sequence[str]) -> None:
        """Record the actors' reports on copies after a step; warn of slow and of lost copies.

        Args:
            results: The step's results by rank.
            seconds: The step's duration.
            labels: The actors' names by rank.
        """
        self._waited += max((result.copied.waited for result in results), default=0.0)
        self._seconds += seconds
        if self._waited > max(_SECONDS, _SHARE * self._seconds):
            figures = self._waited, self._seconds, 2 * self.every
            self.every, self._waited, self._seconds = 2 * self.every, 0.0, 0.0
            log.warning(
                "steps waited %.1f s of %.1f s for copies of snapshots on other nodes, which are made after every %d "
                "steps from now on: set buddy_every to that, or to 0 for no copies",
                *figures,
            )
        for rank, result in enumerate(results):
            if (why := result.copied.lost) and rank not in self._lost:
                self._lost.add(rank)
                log.warning(
                    "the snapshots of %s are copied to another node no more (%s): if its own node is lost, the run "
                    "goes back to its last checkpoint",
                    *(labels[rank], why),
                )
