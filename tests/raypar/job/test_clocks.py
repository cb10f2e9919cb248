"""Times of actors on several machines are on one clock."""

from __future__ import annotations

import pytest

from raypar.actors.collective.shm.links import place
from raypar.actors.specs.results import Located
from raypar.job import clocks

HERE, FAR, SILENT = place() or "here", "another boot/1/0", "a third/1/0"


class Machines:
    """Calls to actors whose machines have other clocks; a wait changes from call to call."""

    def __init__(self, monkeypatch):
        self.time, self.told, self._waits = 1000.0, {}, iter([0.2, 0.5, 0.01, 0.3, 0.4] * 2)
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.time)
        monkeypatch.setattr(clocks, "place", lambda: HERE)

    def answers(self, ranks, method, *args, seconds, group=""):
        if method == "set_clock":
            self.told |= dict.fromkeys(ranks, *args)
            return {}
        (rank,) = ranks
        if rank == 3:
            return {}
        wait = next(self._waits)
        self.time += 0.9 * wait  # the way there is longer than the way back
        now = self.time - 700.0
        self.time += 0.1 * wait
        return {rank: now}


def test_other_machines_learn_what_to_add(monkeypatch):
    machines = Machines(monkeypatch)
    at = enumerate([HERE, FAR, FAR, SILENT, HERE])
    clocks.align(machines, {rank: Located("a", 1, place) for rank, place in at})
    assert machines.told == {1: pytest.approx(700.0, abs=0.005), 2: machines.told[1]}, "the shortest wait counts"


def test_one_machine_asks_nobody(monkeypatch):
    machines = Machines(monkeypatch)
    clocks.align(machines, {rank: Located("a", 1, HERE) for rank in range(3)})
    assert (machines.told, machines.time) == ({}, 1000.0)
