"""The facts of a node, and what is wrong with them: network interfaces, GPUs, /dev/shm, open files, token file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raypar.cluster.placement.placement import Node
from raypar.doctor.finding import Finding

_LEAST_SHM = 1 << 30  # bytes: Docker's default of 64 MiB is too small for Ray's object store
_LEAST_FILES = 4096
_OTHERS_MAY = 0o077
_LOOPBACK = "127."
_LINUX = "linux"
Facts = Mapping[str, Any]


def machine_findings(node: Node, facts: Facts, *, alone: bool) -> Iterator[Finding]:
    """Yield what is found on one node.

    Args:
        node: The node.
        facts: What ``facts_collector`` returned there.
        alone: Whether the cluster has no other node.
    """
    yield from network_findings(node, facts, alone=alone)
    yield from gpu_findings(node, facts)
    yield from memory_findings(node, facts)
    yield from token_findings(str(node), facts)


def network_findings(node: Node, facts: Facts, *, alone: bool) -> Iterator[Finding]:
    """Yield whether the node's address in Ray is one that others reach, and its fastest."""
    interfaces = facts["interfaces"]
    listed = ", ".join(f"{name} {one['address']}{_speed(one['mbits'])}" for name, one in interfaces.items())
    used = next((name for name, one in interfaces.items() if one["address"] == node.address), None)
    if node.address.startswith(_LOOPBACK) and not alone:
        advice = "start its Ray with --node-ip-address=ADDRESS, one of its interfaces'"
        yield Finding("wrong", "network", f"{node} has a loopback address in Ray, which no other node reaches", advice)
    elif used is None and facts["system"] != _LINUX:
        text = f"{node}: which interfaces it has is known on Linux alone, and this is {facts['system']}"
        yield Finding("ok", "network", text)
    elif used is None:
        advice = "with NAT or in a container without the host's network, groups can't connect: give Ray that address"
        yield Finding("wrong", "network", f"{node} has no interface with its address in Ray ({listed})", advice)
    else:
        faster = [
            name
            for name, one in interfaces.items()
            if one["mbits"] > interfaces[used]["mbits"] > 0 and not one["address"].startswith(_LOOPBACK)
        ]
        if faster:
            advice = f"start Ray there with --node-ip-address={interfaces[faster[0]]['address']}"
            yield Finding("slow", "network", f"{node} uses {used}, and {faster[0]} is faster ({listed})", advice)
        else:
            yield Finding("ok", "network", f"{node} uses {used} ({listed})")


def gpu_findings(node: Node, facts: Facts) -> Iterator[Finding]:
    """Yield whether Ray knows the node's GPUs, and torch can use them."""
    there, known = len(facts["gpus"]), int(node.total.get("GPU", 0))
    if there != known:
        advice = f"start its Ray with --num-gpus={there}, or see that nvidia-smi works there"
        yield Finding("wrong", "gpus", f"{node} has {there} GPUs, and its Ray says {known}", advice)
    elif there and "+cpu" in facts["torch"]:
        advice = "install PyPI's torch, or that of a CUDA index"
        yield Finding("wrong", "gpus", f"{node} has {there} GPUs, and its torch {facts['torch']} no CUDA", advice)
    elif there:
        yield Finding("ok", "gpus", f"{node}: {there}, the first {facts['gpus'][0].partition(' (UUID')[0]}")
    else:
        yield Finding("ok", "gpus", f"{node} has none")


def memory_findings(node: Node, facts: Facts) -> Iterator[Finding]:
    """Yield whether /dev/shm, which Linux alone has, and the number of open files are enough."""
    total, free = facts["shm"]["total"], facts["shm"]["free"]
    text = f"{node}: /dev/shm has {total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    if facts["system"] != _LINUX:
        yield Finding("ok", "memory", f"{node}: Ray's object store is in files, as {facts['system']} has no /dev/shm")
    elif total < _LEAST_SHM:
        advice = "Ray puts its object store on the disk then; start the container with --shm-size=2g"
        yield Finding("slow", "memory", text, advice)
    else:
        yield Finding("ok", "memory", text)
    if facts["files"] < _LEAST_FILES:
        advice = "ulimit -n 65536 before ray start: large meshes need a descriptor for every neighbour"
        yield Finding("note", "memory", f"{node}: a process may open {facts['files']} files", advice)


def token_findings(where: str, facts: Facts) -> Iterator[Finding]:
    """Yield whether others on the machine may read the cluster's token."""
    path, mode = facts["token_file"], facts["token_mode"]
    if mode < 0:
        yield Finding("ok", "token", f"{where} has no token file")
    elif mode & _OTHERS_MAY:
        advice = f"chmod 600 {path} there, and make a new one if others have been on that machine"
        yield Finding("danger", "token", f"{where}: others may read the token in {path} (mode {mode:04o})", advice)
    else:
        yield Finding("ok", "token", f"{where}: {path} is its user's alone")


def _speed(mbits: int) -> str:
    return f" at {mbits / 1000:g} Gbit/s" if mbits > 0 else ""


def facts_collector() -> Callable[[], dict[str, Any]]:
    """Return a function that returns the facts of the machine on which it runs.

    It uses the standard library only and is nested, so that it is sent to a node as code: the node may lack raypar.
    """

    def collect() -> dict[str, Any]:
        import fcntl
        import importlib.metadata
        import os
        import resource
        import shutil
        import socket
        import stat
        import struct
        import subprocess
        import sys
        from contextlib import suppress
        from pathlib import Path

        interfaces = {}  # their addresses are asked for as Linux has it: elsewhere there are none
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as queried:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # without an address
                    answer = fcntl.ioctl(queried.fileno(), 0x8915, request)  # SIOCGIFADDR
                    speed = -1
                    with suppress(OSError, ValueError):  # virtual ones have none
                        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
                    interfaces[name] = {"address": socket.inet_ntoa(answer[20:24]), "mbits": speed}
        gpus = []
        if shutil.which("nvidia-smi"):
            with suppress(OSError, subprocess.TimeoutExpired):
                command = ["nvidia-smi", "-L"]
                listed = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
                gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
        token_file = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path("~/.ray/auth_token").expanduser())
        mode = -1
        with suppress(OSError):
            mode = stat.S_IMODE(Path(token_file).stat().st_mode)
        torch = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            torch = importlib.metadata.version("torch")
        shm = {"total": 0, "free": 0}
        with suppress(OSError):
            found = os.statvfs("/dev/shm")
            shm = {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
        return {
            "system": sys.platform,
            "interfaces": interfaces,
            "gpus": gpus,
            "torch": torch,
            "shm": shm,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "token_file": token_file,
            "token_mode": mode,
            "auth_mode": os.environ.get("RAY_AUTH_MODE", "token").lower(),
        }

    return collect
