"""How many cores there are for a process."""

from __future__ import annotations

import os

import pytest

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.machine.this_machine import actor_count_faults, num_slots


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_only_the_cores_of_a_process_count(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5})
    assert (num_cores(), num_slots()) == (2, 16)
    (fault,) = actor_count_faults(17)
    assert "the 16 that this machine of 2 cores takes" in fault
