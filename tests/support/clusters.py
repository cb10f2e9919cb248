"""A Ray cluster over hosts of namespaces: a head on the first, and the others that joined it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts import Host, Network, containers_on_one_host, hosts_on_a_network

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
PORT = 6379
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "PYTHONPATH": str(ROOT),
}
# A second interface that leads nowhere, with an address that all hosts have: who takes it for his own meets himself.
_ASTRAY = (
    "link add astray0 type veth peer name astray1",
    "addr add 192.168.9.1/24 dev astray0",
    "link set astray0 up",
    "link set astray1 up",
)
# Of Ray's own processes, each of which takes seconds of a core to start, only those that a driver needs.
_SMALL = ["--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false"]
_SMALL_HEAD = ["--no-monitor"]  # no autoscaler


@dataclass
class HostCluster:
    """A Ray cluster of hosts.

    Attributes:
        network: The hosts, the head first.
        env: The environment variables of all its processes.
    """

    network: Network
    env: Mapping[str, str]

    @property
    def head(self) -> Host:
        return self.network.hosts[0]

    @property
    def driver_env(self) -> dict[str, str]:
        """The environment variables of a driver on one of the hosts."""
        return {**self.env, "RAY_ADDRESS": f"{self.head.address}:{PORT}"}

    def drive(self, *argv: str | Path, host: int = 0, timeout: float = 120.0) -> str:
        """Run Python on a host, as a driver, and return what it printed."""
        return self.network.hosts[host].run(sys.executable, *argv, env=self.driver_env, timeout=timeout)


@contextmanager
def cluster_of_hosts(
    *names: str,
    cpus: Sequence[int],
    env: Mapping[str, str] = ENV,
    head: Sequence[str] = ("--include-dashboard=false",),
    blocks: Sequence[str] = (),
    first_pids: Sequence[int] = (),
) -> Iterator[HostCluster]:
    """Start Ray on hosts that are made for it; all of it ends with them.

    Args:
        names: The hosts' names.
        cpus: The number of CPUs that each tells Ray it has.
        env: Environment variables of Ray's processes.
        head: Further options of ``ray start --head``.
        first_pids: If given, the hosts are containers that share one network, and their pids begin with these.
        blocks: The hosts, but the head, whose ``ray start`` stays in the foreground, as a container's first process.
    """
    with (containers_on_one_host if first_pids else hosts_on_a_network)(*names) as network:
        first = network.hosts[0]
        for host, pid in zip(network.hosts, first_pids, strict=False):
            host.run("sh", "-c", f"echo {pid} > /proc/sys/kernel/ns_last_pid")
        for host in () if first_pids else network.hosts:
            for line in _ASTRAY:
                host.run("ip", *line.split())

        def start(host: Host, count: int, *options: str) -> None:
            its = f"--node-ip-address={host.address}"
            command = [RAY, "start", its, f"--num-cpus={count}", *_SMALL, *options]
            if host.name not in blocks:
                host.run(*command, env=env)
                return
            started = host.start(*command, "--block", env=env)
            assert started.stdout is not None
            assert any("Ray runtime started" in line for line in started.stdout), f"{host.name}: Ray did not start"

        start(first, cpus[0], "--head", f"--port={PORT}", *_SMALL_HEAD, *head)
        with ThreadPoolExecutor(
            2
        ) as two_at_once:  # Ray gives a node half a minute to join, however busy the machine is
            joined = [
                two_at_once.submit(start, host, count, f"--address={first.address}:{PORT}")
                for host, count in zip(network.hosts[1:], cpus[1:], strict=True)
            ]
            for one in joined:
                one.result()
        yield HostCluster(network, env)
