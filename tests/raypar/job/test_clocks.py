"""Times of actors on several machines are on one clock."""

from __future__ import annotations

import pytest

from raypar.actors.machine.process_identity import ProcessIdentity, own_identity
from raypar.actors.specs.results import Located
from raypar.job.start import clocks

HERE = own_identity()
BESIDE = HERE._replace(network_namespace=1, pid_namespace=2, uid=3)  # another container of this machine
FAR, SILENT = ProcessIdentity("another boot"), ProcessIdentity("a third")
SHIFTED = HERE._replace(time_namespace=7)


class Machines:
    """Calls to actors whose machines have other clocks; a wait changes from call to call."""

    def __init__(self, monkeypatch):
        self.time, self.offsets, self._waits = 1000.0, {}, iter([0.2, 0.5, 0.01, 0.3, 0.4] * 2)
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.time)
        monkeypatch.setattr(clocks.time, "time", lambda: self.time + 1e9)

    def answers(self, ranks, method, *args, seconds, group=""):
        if method == "set_clock":
            self.offsets |= dict.fromkeys(ranks, args)
            return {}
        (rank,) = ranks
        if rank == 3:
            return {}
        wait = next(self._waits)
        self.time += 0.9 * wait  # the way there is longer than the way back
        now = self.time - 700.0, self.time + 1e9 + 20.0
        self.time += 0.1 * wait
        return {rank: now}


def test_other_machines_learn_what_to_add(monkeypatch):
    machines = Machines(monkeypatch)
    at = enumerate([HERE, FAR, FAR, SILENT, BESIDE])
    clocks.align(machines, {rank: Located("a", process) for rank, process in at})
    assert machines.offsets == {1: pytest.approx((700.0, -20.0), abs=0.005), 2: machines.offsets[1]}, (
        "the shortest wait counts"
    )


def test_one_machine_asks_nobody(monkeypatch):
    machines = Machines(monkeypatch)
    clocks.align(machines, {rank: Located("a", process) for rank, process in enumerate([HERE, BESIDE, HERE])})
    assert (machines.offsets, machines.time) == ({}, 1000.0)


def test_a_container_with_clocks_of_its_own_is_asked(monkeypatch):
    machines = Machines(monkeypatch)
    clocks.align(machines, {0: Located("a", HERE), 1: Located("a", SHIFTED)})
    assert machines.offsets == {1: pytest.approx((700.0, -20.0), abs=0.005)}
