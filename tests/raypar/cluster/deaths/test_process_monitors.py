"""What another node tells of a process that has died there; here that other node is this one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import ray
from ray.exceptions import ActorDiedError

from raypar.actors.machine.process_identity import own_identity, process_began
from raypar.actors.specs.results import Located
from raypar.cluster.deaths import process_monitors as module
from raypar.cluster.deaths.process_monitor import Exit, ProcessReport
from raypar.cluster.deaths.process_monitors import ProcessMonitors
from raypar.cluster.nodes.nodes import own_node
from tests.support.kernel import TELLS_EXITS

pytestmark = pytest.mark.usefixtures("cluster")


def identity_of(child):
    return own_identity()._replace(pid=child.pid, began=process_began(child.pid))


@pytest.fixture
def children():
    started = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def test_a_witness_tells_how_a_process_ended_and_ends_one_that_is_stopped(children, monkeypatch):
    node, first = own_node(), children[0]
    witnesses = ProcessMonitors()
    located = {rank: Located("there", identity_of(child)) for rank, child in enumerate(children)}
    witnesses.know(located, dict.fromkeys(located, node))
    ray.get(witnesses._monitors[node].know.remote(located), timeout=30)  # it has started
    first.send_signal(signal.SIGSTOP)
    witnesses.kill(0)
    assert first.wait(10) == -signal.SIGKILL
    children[1].kill()
    children[1].wait()
    seen = witnesses.seen(1, node_lives=True)
    assert seen.exit == (Exit(None, "SIGKILL") if TELLS_EXITS else None)
    assert witnesses.seen(1, node_lives=False) == ProcessReport(is_silent=True), "a node that is gone is not asked"
    monkeypatch.setattr(module, "_ANSWER", 0.2)
    witness = witnesses._monitors[node]
    ray.kill(witness)
    with pytest.raises(ActorDiedError):
        for _ in range(100):  # until it has ended
            ray.get(witness.kill.remote(7), timeout=10)
            time.sleep(0.05)
    before = time.monotonic()
    assert witnesses.seen(1, node_lives=True) == ProcessReport(is_silent=True) and time.monotonic() - before < 2
    assert not witnesses._monitors, "another one is started when actors join again"
    witnesses.close()


def test_there_is_none_where_all_actors_are_on_the_drivers_node(children):
    witnesses = ProcessMonitors()
    witnesses.know({0: Located("here", identity_of(children[0]))}, {})
    assert not witnesses._monitors
    children[0].kill()
    children[0].wait()
    assert witnesses.seen(0, node_lives=True).exit == (Exit(None, "SIGKILL") if TELLS_EXITS else None)
    witnesses.close()
