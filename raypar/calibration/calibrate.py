"""The whole calibration: products and attention, memory, groups, then short runs, within about a minute."""

from __future__ import annotations

import os
import platform
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.specs.types import DeviceKind
from raypar.calibration.kernels import GROUP_BYTES, GROUP_OPS, LENGTHS, ROWS, WEIGHTS, Meter, slowest
from raypar.calibration.probes import probed
from raypar.calibration.solved import solved, without_unmeasured
from raypar.cluster.lifecycle.ray_cluster import connected
from raypar.cluster.nodes.probes import answers, probes
from raypar.cluster.placement.placement import Node
from raypar.errors import JobError
from raypar.planner.calibrated.calibration import FORMAT, Calibration, GroupTime, MeasuredUpdate, Origin, busy_with
from raypar.planner.memory.worker import process_bytes

_CALL = 60.0  # seconds within which an actor answers a call
_LEAST_LEFT = 0.1  # part of the time that must remain to measure a kind of block; the first needs none
_MOST_ACTORS = 4  # on CPUs, but no more than cores
_CPUINFO = Path("/proc/cpuinfo")
Say = Callable[[str], object]


def calibrate(seconds: float, say: Say) -> Calibration:
    """Measure this machine, or the cluster at RAY_ADDRESS.

    Args:
        seconds: About the time that it may take. The least important measurements are left out if time is short.
        say: Called with a line for each measurement and each omission.

    Raises:
        ConfigError: Ray can't be started or reached.
        JobError: An actor failed or did not answer in time.
    """
    begin, date, load = time.monotonic(), datetime.now(UTC), os.getloadavg()[0]
    if busy := busy_with(load, num_cores()):
        say(f"what is {busy} is too slow, and its file says so: calibrate again when the machine is quiet")
    with connected() as nodes:
        device: DeviceKind = "cuda" if any(node.total.get("GPU") for node in nodes) else "cpu"
        first = next(node for node in nodes if device == "cpu" or node.total.get("GPU"))
        actors = max(2, min(num_cores(), _MOST_ACTORS)) if device == "cpu" else 2
        members = actors if device == "cpu" else int(first.total["GPU"])
        here, there = _meter_nodes(nodes, first, device, members)
        with probes(Meter, [*here, *there], gpus=int(device == "cuda")) as meters:
            found = _kernels(meters[0], device, begin + seconds / 3, say)
            groups = _groups(meters[: len(here)], meters[len(here) :], device, begin + seconds / 2, say)
        count = len(nodes)
        late = begin + seconds * (1 - _LEAST_LEFT)
    taken = probed(device, actors, say, lambda: time.monotonic() > late)
    found, unmeasured = without_unmeasured(solved(replace(found, groups=tuple(groups)), taken, actors))
    if unmeasured:
        say(f"too little to be measured here, and left out: what {', '.join(unmeasured)} add beyond what is counted")
    seconds = round(time.monotonic() - begin, 1)
    origin = replace(found.origin, nodes=count, date=date.isoformat(timespec="seconds"), seconds=seconds, load=load)
    return replace(found, origin=origin)


def _kernels(meter: Any, device: DeviceKind, end: float, say: Say) -> Calibration:
    """Measure products, attention and memory on one actor; after ``end`` only one product of each shape of weights.

    All other fields of the returned calibration are not measured yet.
    """
    (name,) = answers([meter.setup.remote(device, 1)], _CALL)
    products, left_out = [], 0
    for number, (inner, columns) in enumerate(WEIGHTS, 1):
        say(f"products of (rows, {inner}) and ({inner}, {columns}): {number} of {len(WEIGHTS)}")
        for rows in reversed(ROWS):
            if rows == ROWS[-1] or time.monotonic() < end:
                products += answers([meter.product.remote(rows, inner, columns)], _CALL)
            else:
                left_out += 1
    say("attention and memory")
    attention = answers([meter.attention.remote(tokens) for tokens in LENGTHS], _CALL)
    (memory,) = answers([meter.memory.remote()], _CALL)
    if left_out:
        say(f"{left_out} products were left out, for lack of time: give --seconds more")
    origin = Origin(
        host=platform.node(),
        processor=name or processor(),
        cores=num_cores(),
        nodes=1,
        date="",
        seconds=0.0,
        versions=_versions(),
    )
    return Calibration(
        format=FORMAT,
        origin=origin,
        device=device,
        threads=1,
        products=tuple(products),
        attention=tuple(attention),
        memory=memory,
        besides=(),
        action_forward=0.0,
        action_backward=0.0,
        update=MeasuredUpdate(step=0.0, tensor=0.0, parameter=0.0),
        groups=(),
        busy=1.0,
        message=0.0,
        call=0.0,
        process=process_bytes(device),
    )


def _meter_nodes(nodes: Sequence[Node], first: Node, device: DeviceKind, most: int) -> tuple[list[Node], list[Node]]:
    """Return the nodes of the measuring actors: ``first``, once for each member of its largest group, and another.

    The largest group has at most ``most`` members.
    """
    second = [node for node in nodes if node is not first and device == "cpu"][:1]
    return [first] * max((size for size in (2, 4) if size <= most), default=1), second


def _groups(here: Sequence[Any], there: Sequence[Any], device: DeviceKind, end: float, say: Say) -> list[GroupTime]:
    """Measure groups of two and four members on a node, and of one member on each of two nodes."""
    found: list[GroupTime] = []
    answers([meter.setup.remote(device, 1) for meter in [*here[1:], *there]], _CALL)
    groups = [(here[:size], 1) for size in (2, 4) if size <= len(here)]
    groups += [([here[0], other], 2) for other in there]
    for members, across in groups:
        where = f"{len(members)} members" + (f" on {across} nodes" if across > 1 else "")
        if found and time.monotonic() > end:
            say(f"groups of {where}: left out, for lack of time")
            continue
        say(f"groups of {where}")
        found += _group(members, across)
    return found


def _group(meters: Sequence[Any], across: int) -> list[GroupTime]:
    """Measure all operations among actors on ``across`` nodes. Raises JobError."""
    name, found = f"calibration-{uuid.uuid4().hex[:8]}", list[GroupTime]()
    answers([meter.join.remote(name, len(meters), rank) for rank, meter in enumerate(meters)], _CALL)
    for op in GROUP_OPS:
        for count in GROUP_BYTES:
            calls = [meter.group.remote(op, count, across) for meter in meters]
            found.append(slowest(answers(calls, _CALL), op))
    with suppress(JobError):
        answers([meter.leave.remote(name) for meter in meters], _CALL)
    return found


def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError):
        if named := re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE):
            return named[1].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("raypar", "torch", "ray"):
        found[package] = None
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
