"""The hosts that tests of clusters make on one machine are apart: own addresses, processes and folders."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import hosts_on_a_network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 2).sendall(b'hello')"
ANSWER = (
    "import socket; door = socket.create_server(('', 7000)); print('open', flush=True);\n"
    "while True: print(door.accept()[0].recv(5).decode(), flush=True)"
)


@pytest.mark.timeout(60)
def test_hosts_are_apart_and_reach_one_another_until_the_cable_is_cut(tmp_path):
    with hosts_on_a_network("first", "second") as network:
        first, second = network.hosts
        assert [host.run("hostname").strip() for host in network.hosts] == ["first", "second"]
        assert "10.77.0.2" in second.run("ip", "-brief", "address")
        first.run("touch", "/tmp/of-first", "/dev/shm/of-first")
        assert [host.run("ls", "/tmp", "/dev/shm").count("of-first") for host in (first, second)] == [2, 0]
        assert "tests" in first.run("ls"), "the working folder is there, also where it is below one that is hidden"
        answers = first.start(sys.executable, "-c", ANSWER)
        assert answers.stdout.readline() == "open\n"
        assert "socket.create_server" not in second.run("ps", "-e", "-o", "args")
        second.run(sys.executable, "-c", CALL, first.address)
        assert answers.stdout.readline() == "hello\n"
        network.cut(first)
        with pytest.raises(AssertionError, match=r"TimeoutError|OSError"):
            second.run(sys.executable, "-c", CALL, first.address)
        network.mend(first)
        second.run(sys.executable, "-c", CALL, first.address)
        first.die()
        answers.wait(10)
    end = time.monotonic() + 5
    ended = Path(f"/proc/{second.pid}")
    while ended.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not ended.exists(), "hosts end with the network"
    assert "bridge" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


MAKER = """
import time
from tests.support.hosts import hosts_on_a_network
with hosts_on_a_network("one") as network:
    print(network.hosts[0].pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_hosts_end_with_the_process_that_made_them_however_that_ends():
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    host = Path(f"/proc/{int(maker.stdout.readline())}")
    assert host.exists()
    maker.kill()
    maker.wait()
    end = time.monotonic() + 10
    while host.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not host.exists()
