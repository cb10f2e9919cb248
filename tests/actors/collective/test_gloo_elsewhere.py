"""Gloo where the system is less than Linux: with its transport uv, which closes no connection, and in a sandbox."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gloo import group as gloo
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import GroupMember
from tests.support.simulated_macos.sitecustomize import UvGroup


def both(work):
    """``work(rank)`` in a thread for each of two ranks; the results by rank."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result(20) for future in [pool.submit(work, rank) for rank in range(2)]]


@pytest.fixture
def pair(monkeypatch):
    """Two members of a group over uv, with a deadline of 20 s."""
    monkeypatch.setattr(gloo.dist, "ProcessGroupGloo", UvGroup.over(dist.ProcessGroupGloo))
    monkeypatch.setattr(gloo, "has_feature", lambda feature: False)
    device, store = create_device("127.0.0.1"), dist.HashStore()
    members = both(lambda rank: GlooGroup(GroupMember("g", "x", rank, 2, 20.0), store, device))
    yield members
    for rank, member in enumerate(members):
        member._pg.close(1 - rank)


def reason(handle, **settings):
    """Why a wait fails, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(GroupError) as failed:
        handle.wait(**settings)
    return failed.value.reason, time.monotonic() - begin


def test_values_arrive_however_late(pair):
    sums = both(lambda rank: pair[rank].all_reduce(torch.full((9000,), rank + 1.0)))
    got = torch.zeros(3)
    handle = pair[0].recv(got, 1)
    threading.Timer(0.2, lambda: pair[1].send(torch.ones(3), 0).wait()).start()  # several looks later
    handle.wait()
    assert got.sum() == 3.0
    both(lambda rank: sums[rank].wait())


@pytest.mark.parametrize("op", ["recv", "all_reduce", "barrier"])
def test_an_abort_ends_the_waits_of_its_process_at_once(pair, op):
    start = {"recv": lambda: pair[0].recv(torch.zeros(3), 1), "barrier": pair[0].barrier}
    start["all_reduce"] = lambda: pair[0].all_reduce(torch.zeros(9000))
    threading.Timer(0.1, pair[0].abort).start()
    why, seconds = reason(start[op]())
    assert why == "the group was aborted"
    assert seconds < 5.0


def test_a_wait_has_its_deadline(pair):
    why, seconds = reason(pair[0].recv(torch.zeros(3), 1), timeout=0.2)
    assert why == "nothing came within 0.2 s"
    assert 0.2 <= seconds < 5.0


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="there are no batch threads here")
@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_threads_whose_scheduling_can_not_be_set_are_left_as_they_are(monkeypatch, error):
    asked = []

    def refused(*which):
        asked.append(which)
        raise error

    monkeypatch.setattr(gloo.os, "sched_setscheduler", refused)
    assert create_device("127.0.0.1") is not None
    assert asked
