"""The whole examination: this machine, the cluster at RAY_ADDRESS or a Ray of our own, and its nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.machine.this_machine import total_memory
from raypar.cluster.lifecycle.ray_cluster import connected
from raypar.cluster.nodes.nodes import facts_of, head_address, lost_nodes, package_version_faults, versions_collector
from raypar.cluster.placement.placement import Node
from raypar.cluster.ray_private import dashboard_address
from raypar.doctor.exposure import exposure_findings
from raypar.doctor.finding import Finding
from raypar.doctor.group_times import SIZES, Doing, group_time_findings, many_nodes
from raypar.doctor.leftovers import leftover_findings, leftovers, own_sessions, sweep
from raypar.doctor.machines import facts_collector, machine_findings, token_findings
from raypar.errors import ConfigError, JobError
from raypar.schedules.formatting import size

_LOST = "if it is meant to be there, start its Ray again, which the launcher of ray up does by itself in about a minute"


def examined(
    *, sweeps: bool, times: bool, sizes: Sequence[int] = SIZES, doing: Doing = lambda _: None
) -> Iterator[Finding]:
    """Examine, and yield findings as they come.

    Args:
        sweeps: Whether to end what raypar's own Rays left on this machine.
        times: Whether to measure groups.
        sizes: Bytes of the tensors that are measured.
        doing: Called with what takes a while, before it is done.
    """
    found, before = leftovers(), own_sessions()
    yield from sweep(found) if sweeps else leftover_findings(found)
    own = facts_collector()()
    yield from token_findings("this machine", own)
    address = os.environ.get("RAY_ADDRESS", "")
    doing(f"connecting to the cluster at {address}" if address else "starting Ray on this machine")
    try:
        with connected() as nodes:
            yield from cluster_findings(address, nodes)
            doing(f"asking {many_nodes(len(nodes))} for versions, network, GPUs and memory")
            its = node_findings(nodes)
            # The token file of this machine was examined above; if there was none, Ray made one.
            yield from its if address else (one for one in its if one.subject != "token")
            if times:
                yield from group_time_findings(nodes, sizes, doing)
    except (ConfigError, JobError) as error:
        yield Finding("wrong", "ray", str(error))
    finally:
        for session in own_sessions() - before:
            shutil.rmtree(session, ignore_errors=True)


def cluster_findings(address: str, nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield where the cluster is, what it has, and who can run code on it."""
    cpus, gpus = (sum(node.total.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    if address:
        where = f"the cluster at {address}" + (f" ({head_address()})" if address == "auto" else "")
        has = f"{many_nodes(len(nodes))}, {cpus:g} CPUs, {gpus:g} GPUs"
    else:
        where = "no RAY_ADDRESS: a launch starts Ray on this machine, which works"
        machine = f"{num_cores()} cores, {size(total_memory() or 0)} of memory, {gpus:g} GPUs"
        has = f"{machine}; at most {cpus:g} actors start here, and share them"
    yield Finding("ok", "ray", f"{where}: {has}")
    for lost in lost_nodes():
        yield Finding("note", "ray", f"{lost} is lost", _LOST)
    for node in nodes:
        if not node.total.get("CPU"):
            yield Finding("note", "ray", f"{node} has no CPU to give: no actor lands there")
    for node in nodes:
        if its := _special(node):
            yield Finding("ok", "resources", f"{node} has {its}, which a run's resources can ask for")
    if address:
        yield from exposure_findings(head_address(), dashboard_address())


def _special(node: Node) -> str:
    """Say which resources and labels a node has that not all have; "" if it has none."""
    usual = {"CPU", "GPU", "memory", "object_store_memory"}
    found = [
        f"{amount:g} {name}"
        for name, amount in sorted(node.total.items())
        if name not in usual and not name.startswith("node:") and "_group_" not in name
    ]
    labels = [f"{name}={value}" for name, value in sorted(node.labels.items()) if not name.startswith("ray.io/")]
    return " and ".join([*found, *(f"label {label}" for label in labels)])


def node_findings(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the findings about each node, and which versions differ from those of this process."""
    own = versions_collector()()
    versions, facts = facts_of(nodes, versions_collector()), facts_of(nodes, facts_collector())
    for node in nodes:
        if faults := package_version_faults(node, own, versions[node.id]):
            yield from (Finding("wrong", "versions", *_halves(fault)) for fault in faults)
        else:
            yield Finding("ok", "versions", f"{node}: {', '.join(f'{name} {its}' for name, its in own.items())}")
        its: dict[str, Any] | str = facts[node.id]
        if isinstance(its, dict):
            yield from machine_findings(node, its, alone=len(nodes) == 1)


def _halves(fault: str) -> tuple[str, str]:
    """Divide a fault into what is so and what to do."""
    text, _, advice = fault.partition(": ")
    return text, advice
