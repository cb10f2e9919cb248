"""Ray's control server dies: it is named at once, the run is saved and ends, and nothing of Ray is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from raypar.cluster import control_server
from raypar.cluster.control_server import ControlServer
from raypar.cluster.nodes import drain_notices as notices
from raypar.cluster.nodes.drain_notices import DrainNotices
from tests.support.process_tree import command_line, descendants, lives


@pytest.fixture
def its(monkeypatch):
    """A control server's clock, its port, and which servers of an own Ray have died."""

    class Its:
        now, dead, port = 100.0, (), socket.create_server(("127.0.0.1", 0))

    class Context:
        gcs_address = f"127.0.0.1:{Its.port.getsockname()[1]}"

    monkeypatch.setattr(control_server.time, "monotonic", lambda: Its.now)
    monkeypatch.setattr(control_server, "dead_servers", lambda: list(Its.dead))
    monkeypatch.setattr(control_server.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(control_server.ray, "get_runtime_context", Context)
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    yield Its
    Its.port.close()


def test_an_own_control_server_that_has_died_is_named_at_once(its):
    server = ControlServer()
    assert server.answers() and not server.why_lost()
    its.dead = ("gcs_server",)
    its.now += 1.1
    assert re.fullmatch(r"Ray's control server \(GCS, 127.0.0.1:\d+\) has died", server.why_lost())


@pytest.mark.parametrize(("limit", "seconds"), [(None, 10), ("600", 300), ("many", 10)])
def test_one_of_a_cluster_is_waited_for(its, monkeypatch, limit, seconds):
    if limit is not None:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", limit)
    server = ControlServer()
    its.port.close()
    for _ in range(seconds):
        its.now += 1.1 if not server.why_lost() else 0.0
        assert server.why_lost() == "" or its.now > 100 + seconds
    its.now += 1.1
    assert f"has not answered for {seconds}" in server.why_lost() or its.now > 100 + seconds


def test_one_that_comes_back_in_time_is_not_lost(its):
    server, address = ControlServer(), its.port.getsockname()
    its.port.close()
    assert not server.answers()
    its.now += 9.0
    assert not server.answers() and not server.why_lost()
    its.port = socket.create_server(address)
    its.now += 2.0
    assert server.answers()
    its.port.close()
    its.now += 2.0
    assert not server.answers() and not server.why_lost(), "it is waited for anew"


def test_nothing_is_asked_of_one_that_does_not_answer(its, monkeypatch):
    monkeypatch.setattr(notices, "draining_nodes", lambda: pytest.fail("this takes a minute"))
    its.dead = ("gcs_server",)
    assert not DrainNotices(ControlServer()).look()


def train(folder, *words, env=None):
    command = [sys.executable, "-m", "raypar", "train", "gpt-tiny", "--steps=1000000", f"--folder={folder}"]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def begun(process, steps=1):
    """Wait until a command has taken some steps; return its processes."""
    seen = 0
    for line in process.stdout:
        seen += line.startswith("step ")
        if seen == steps:
            return descendants(process.pid)
    pytest.fail("it has ended")


def server_below(pid):
    """The control server of the Ray that a process has started."""
    (server,) = [one for one in descendants(pid) if Path(command_line(one).split(" ")[0]).name == "gcs_server"]
    return server


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_run_whose_own_control_server_dies_is_saved_and_leaves_nothing(tmp_path):
    process = train(tmp_path / "run")
    processes = begun(process)
    os.kill(server_below(process.pid), signal.SIGKILL)
    killed = time.monotonic()
    lines = [(time.monotonic() - killed, line) for line in process.stdout if not line.startswith("step ")]
    assert process.wait() == 4
    named = [after for after, line in lines if "Ray's control server (GCS, " in line and "saved as step-" in line]
    assert named and named[0] < 15, lines
    assert any("resume with: raypar train --resume" in line for _, line in lines), lines
    end = time.monotonic() + 10
    while left := [command_line(pid) for pid in processes if lives(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_run_in_a_cluster_whose_head_ends_with_its_control_server_names_that(tmp_path):
    ray = Path(sys.executable).with_name("ray")
    short = tempfile.mkdtemp(prefix="r", dir="/tmp")
    env = os.environ | {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    cluster = subprocess.Popen([ray, "start", *options, "--block"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert any("Ray runtime started" in line for line in cluster.stdout)
        process = train(tmp_path / "run", env=env | {"RAY_ADDRESS": f"127.0.0.1:{port}"})
        begun(process)
        os.kill(server_below(cluster.pid), signal.SIGKILL)
        killed = time.monotonic()
        lines = [(time.monotonic() - killed, line) for line in process.stdout if not line.startswith("step ")]
        assert process.wait() == 4, lines
        named = [after for after, line in lines if "Ray's control server" in line]
        assert named and named[0] < 15, lines
    finally:
        for pid in [*descendants(cluster.pid), cluster.pid]:
            os.kill(pid, signal.SIGKILL)
        cluster.wait()
        shutil.rmtree(short, ignore_errors=True)
