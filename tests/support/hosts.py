"""Several hosts on one machine: Linux namespaces with an address, processes, /tmp and /dev/shm of their own.

All hosts hang on one bridge, in a network of their own that the machine's other processes do not see. They end with the
process that made them, whatever happens to it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NETWORK = "10.77.0"
_OWN = ["--fork", "--pid", "--mount-proc", "--net", "--mount", "--uts", "--ipc", "--kill-child=KILL"]
_IN_CONTAINER = [flag for flag in _OWN if flag != "--net"]
_PRIVATE_FOLDERS = ("/tmp", "/dev/shm", "/run")  # every host mounts an empty file system on each
# Mount an empty file system on the folder $1, in which the folders that follow, which are below it, can still be seen.
# An open descriptor is what is left of a folder that a mount hides.
_MOUNT_PRIVATE = """
private=$1; shift
declare -A descriptors
for kept; do exec {descriptor}<"$kept"; descriptors[$kept]=$descriptor; done
mount -t tmpfs -o mode=1777 tmpfs "$private"
for kept; do
    mkdir -p "$kept"; mount --no-canonicalize --rbind "/proc/self/fd/${descriptors[$kept]}" "$kept"
done
"""
_INIT = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"  # the first process: it reaps what others leave


@dataclass
class Host:
    """A host.

    Attributes:
        name: Its host name.
        address: Its address.
        pid: Its first process, as this process sees it.
        link: The end of its cable at the bridge; "" if it shares the network of the bridge.
    """

    name: str
    address: str
    pid: int
    link: str

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command that runs another one on this host, in the folder of this process."""
        return [*_entering(self.pid), f"--wdns={Path.cwd()}", "--", *map(str, argv)]

    def run(self, *argv: str | Path, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
        """Run a command on this host and return what it printed.

        Raises:
            AssertionError: If it fails, with all that it printed.
        """
        kept = {"env": os.environ | dict(env or {}), "timeout": timeout}
        done = subprocess.run(self.command(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kept)
        assert done.returncode == 0, (
            f"{self.name}: {' '.join(map(str, argv))} ended with {done.returncode}\n{done.stdout}"
        )
        return done.stdout

    def start(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on this host; its output comes through the pipe ``stdout``."""
        kept = {"env": os.environ | dict(env or {}), "text": True}
        return subprocess.Popen(self.command(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kept)

    def die(self) -> None:
        """End all processes of this host at once, as a power cut does."""
        os.kill(self.pid, signal.SIGKILL)


@dataclass
class Network:
    """Hosts on one bridge.

    Attributes:
        hosts: The hosts.
        bridge: The process in whose network the bridge is.
    """

    hosts: list[Host]
    bridge: int

    def cut(self, host: Host) -> None:
        """Pull a host's cable: what is sent is lost, and nobody is told."""
        self._ip("link", "set", host.link, "down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        self._ip("link", "set", host.link, "up")

    def limit(self, rate: str, delay: str = "") -> None:
        """Limit what each host receives and sends to a rate, such as "1gbit", after a delay, such as "2ms".

        A delay needs the kernel's netem, which not every kernel has.
        """
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "400ms"]
        if delay:
            shape = ["root", "netem", "rate", rate, "delay", delay, "limit", "100000"]
        for host in self.hosts:
            _inside(self.bridge, "tc", "qdisc", "replace", "dev", host.link, *shape)
            _inside(host.pid, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def _ip(self, *what: str) -> None:
        _inside(self.bridge, "ip", *what)


@cache
def missing(*programs: str) -> str:
    """Return why this machine can't make hosts, or lacks programs; an empty text if it can, and has them."""
    if absent := [
        name for name in ("unshare", "nsenter", "setpriv", "ip", "tc", *programs) if shutil.which(name) is None
    ]:
        return f"no {' and no '.join(absent)}"
    try:
        with _bridge() as first:
            _inside(first, "ip", "link", "add", "one", "type", "veth", "peer", "name", "other")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces: {error}"
    return ""


@contextmanager
def containers_on_one_host(*names: str) -> Iterator[Network]:
    """Make containers that share a host's network, as with ``docker run --network host``, and so have its address.

    Each has processes and folders of its own.
    """
    with _bridge() as first:
        _inside(first, "ip", "link", "set", "lo", "up")
        _inside(first, "ip", "route", "add", "default", "dev", "bridge")  # without it Ray does not know its own address
        yield Network([_container(first, name) for name in names], first)


@contextmanager
def hosts_on_a_network(*names: str) -> Iterator[Network]:
    """Make hosts on one network, with addresses from 10.77.0.1 on, and end all that runs on them at the end."""
    with _bridge() as first:
        yield Network([_host(first, number, name) for number, name in enumerate(names, 1)], first)


@contextmanager
def _bridge() -> Iterator[int]:
    """Make a bridge, with an address, and yield a process in its network, with which all inside end."""
    ends_with_us = ["setpriv", "--pdeathsig", "KILL"]  # also where nothing here is asked to clean up
    bridge = subprocess.Popen(
        [*ends_with_us, "unshare", *_user(), *_OWN, "bash", "-c", _INIT], stdin=subprocess.DEVNULL
    )
    try:
        first = _first_process(bridge.pid)
        for line in ("link add bridge type bridge", f"addr add {NETWORK}.254/24 dev bridge", "link set bridge up"):
            _inside(first, "ip", *line.split())
        yield first
    finally:
        bridge.kill()
        bridge.wait()


def _host(bridge: int, number: int, name: str) -> Host:
    """Make a host: its namespaces, its cable and its folders."""
    pid, link, address = _apart(bridge, _OWN), f"host{number}", f"{NETWORK}.{number}"
    _inside(bridge, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _inside(bridge, "ip", "link", "set", link, "master", "bridge", "up")
    up = (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up")
    for line in (*up, f"route add default via {NETWORK}.254"):  # without it Ray does not know its own address
        _inside(pid, "ip", *line.split())
    return _furnished(Host(name, address, pid, link))


def _container(bridge: int, name: str) -> Host:
    """Make a container: its namespaces and its folders."""
    return _furnished(Host(name, f"{NETWORK}.254", _apart(bridge, _IN_CONTAINER), ""))


def _apart(bridge: int, namespaces: Sequence[str]) -> int:
    """Return the first process of new namespaces below those of a bridge."""
    made = subprocess.Popen(
        [*_entering(bridge), "unshare", *namespaces, "bash", "-c", _INIT],
        stdin=subprocess.DEVNULL,
    )
    return _first_process(made.pid)


def _furnished(host: Host) -> Host:
    """Give a host its name and its folders."""
    host.run("hostname", host.name)
    for folder in _PRIVATE_FOLDERS:
        host.run("bash", "-ec", _MOUNT_PRIVATE, "mount-private", folder, *_seen_below(folder))
    return host


def _seen_below(private: str) -> list[Path]:
    """Return what programs need of the folders below one that is hidden: the working folder and Python's own."""
    prefixes = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    needed = {Path.cwd(), *prefixes, *(prefix.resolve() for prefix in prefixes)}  # an environment may be a link
    below = sorted(path for path in needed if path.is_relative_to(private))
    return [path for path in below if not any(path != other and path.is_relative_to(other) for other in below)]


def _first_process(pid: int) -> int:
    """Return the first process of the innermost process namespace that a process has made."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name == "bash":
            return pid
        if children:
            pid = int(children[0])
        else:
            time.sleep(0.005)
    raise TimeoutError("no namespace within 10 s")


def _inside(pid: int, *command: str) -> None:
    """Run a command in the network of a process. Raises OSError with what it prints if it fails."""
    done = subprocess.run([*_entering(pid, "--net"), *command], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _entering(pid: int, *kinds: str) -> list[str]:
    """Return what makes a command run in namespaces of a process: those of some kinds, or all that hosts have."""
    if os.geteuid() == 0:
        return ["nsenter", f"--target={pid}", *(kinds or ["--all"])]
    here = ["--user", "--preserve-credentials"]  # in the namespace of users that we have made, we are root
    return ["nsenter", f"--target={pid}", *here, *(kinds or ["--net", "--mount", "--uts", "--ipc", "--pid"])]


def _user() -> list[str]:
    """Return what makes this user the root of the new namespaces."""
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
