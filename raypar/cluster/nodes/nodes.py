"""The nodes of the cluster to which this process is connected, and facts that tasks on them return."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.cluster.nodes.probes import ray_error_reason
from raypar.cluster.placement.placement import Node
from raypar.cluster.ray_private import draining_nodes, free_resources
from raypar.errors import ConfigError

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 60.0  # a node's first worker process has to start
_HEAD = "node:__internal_head__"  # a resource of the head's node
_KIND = "accelerator_type:"  # begins the resource that says the kind of a node's accelerators
_PACKAGES = ("raypar", "torch", "ray")
_NO_VERSION = "of no release"  # the version of a package that is not installed from a release
_SET_UP = 600.0  # seconds within which Ray sets up a runtime environment on a node
_SAY = 10.0  # seconds between two log lines while waiting


def living_nodes() -> list[Node]:
    """Return the living nodes that are not being drained, this process's node first and then by address."""
    free, own, leaving = free_resources(), own_node(), draining_nodes()
    found = []
    for node in ray.nodes():
        node_id = node["NodeID"]
        if node["Alive"] and (node_id == own or node_id not in leaving):
            total = dict(node["Resources"])
            labels = node.get("Labels") or {}
            left = total if free is None else free.get(node_id, {})
            name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
            found.append(Node(node_id, name, address, total, left, dict(labels)))
    return sorted(found, key=lambda node: (node.id != own, _by_address(node.address), node.id))


def head_address() -> str:
    """Return the address at which other machines reach the cluster's head, with the port of its control server."""
    address = str(ray.get_runtime_context().gcs_address)
    heads = [node["NodeManagerAddress"] for node in ray.nodes() if _HEAD in node["Resources"]]
    return f"{heads[0]}:{address.rpartition(':')[2]}" if heads else address


def lost_nodes() -> list[str]:
    """Return the nodes that Ray has lost, as "host (address)", unless another one is alive at the address."""
    here = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    lost = {one["NodeManagerAddress"]: one["NodeManagerHostname"] for one in ray.nodes() if not one["Alive"]}
    return [f"{name} ({address})" for address, name in sorted(lost.items()) if address not in here]


def is_lasting(node_id: str) -> bool:
    """Return whether a node is alive and not being drained."""
    return any(one["NodeID"] == node_id and one["Alive"] for one in ray.nodes()) and node_id not in draining_nodes()


def named(node_id: str) -> str:
    """Return a node's name, as "host (address)"."""
    found = (one for one in ray.nodes() if one["NodeID"] == node_id)
    return next((f"{one['NodeManagerHostname']} ({one['NodeManagerAddress']})" for one in found), node_id)


def own_node() -> str:
    """Return the id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def facts_of(nodes: Sequence[Node], collect: Callable[[], dict[str, Any]]) -> dict[str, dict[str, Any] | str]:
    """Call a function on every node, in a task that takes no CPU.

    Args:
        nodes: The nodes.
        collect: A nested function, which is sent as code. It must not import raypar, which a node may lack.

    Returns:
        By the node's id, the result of the call; as text, the reason why there is none.
    """
    decorate: Any = ray.remote
    task = decorate(num_cpus=0, max_retries=0)(collect)
    calls = {
        node.id: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in nodes
    }
    environment = ray.get_runtime_context().runtime_env
    seconds = _SET_UP if environment else _ANSWER_SECONDS
    late = f"it did not answer within {seconds:g} s"
    late += f"; perhaps it still sets up the job's runtime_env ({', '.join(environment)})" if environment else ""
    done, end = set[Any](), time.monotonic() + seconds
    while len(done) < len(calls) and time.monotonic() < end:
        done = {*ray.wait(list(calls.values()), num_returns=len(calls), timeout=min(_SAY, seconds))[0]}
        if environment and len(done) < len(calls):
            log.info("waiting for %d nodes to set up the job's runtime_env", len(calls) - len(done))
    return {node: _answer(call) if call in done else late for node, call in calls.items()}


def _answer(call: Any) -> dict[str, Any] | str:
    """Return the result of a finished call, or the reason why it failed."""
    try:
        return dict(ray.get(call))
    except RayError as error:
        return ray_error_reason(error)


def demand_fp8_accelerators(nodes: Sequence[Node], unfit: Collection[str]) -> None:
    """Refuse nodes whose accelerators do not multiply fp8.

    Args:
        nodes: The nodes that get actors on GPUs.
        unfit: The kinds of accelerators that do not, by Ray's names; none if the run does not compute in fp8.

    Raises:
        ConfigError: Some nodes have such accelerators; each is named, with what to do.
    """
    faults = []
    for node in nodes:
        kinds = {name.removeprefix(_KIND) for name in node.total if name.startswith(_KIND)}
        if wrong := sorted(kinds & set(unfit)):
            fix = "set resources.accelerator_type to H100, say, or precision.compute to 'bf16'"
            faults.append(f"node {node} has {wrong[0]} GPUs, which do not multiply fp8: {fix}")
    ConfigError.raise_if(faults)


def demand_alike(nodes: Sequence[Node], folder: Path | None = None) -> None:
    """Refuse nodes whose Python, Ray, torch or raypar differ from this process's, or that do not see its folder.

    Args:
        nodes: The nodes that get actors.
        folder: An existing folder into which all of them write; None without one.

    Raises:
        ConfigError: Some differ, or do not answer; each is named, with what to do.
    """
    others = [node for node in nodes if node.id != own_node()]
    if not others:
        return
    own = versions_collector()()
    answers = facts_of(others, versions_collector())
    faults = [fault for node in others for fault in package_version_faults(node, own, answers[node.id])]
    if folder is not None and not faults:
        faults = [
            f"node {node} does not see the folder {str(folder)!r}: give one that all nodes share, such as one on NFS"
            for node in without_folder(others, folder)
        ]
    ConfigError.raise_if(faults)


def without_folder(nodes: Sequence[Node], folder: Path) -> list[Node]:
    """Return the nodes that do not see a folder.

    Args:
        nodes: The nodes. This process's node sees the folder.
        folder: The folder, in which a temporary file is created.
    """
    others = [node for node in nodes if node.id != own_node()]
    if not others:
        return []
    with NamedTemporaryFile(dir=folder, prefix=".seen-") as mark:
        seen = facts_of(others, _sight_collector(mark.name))
    return [node for node in others if seen[node.id] != {"is_seen": True}]


def _sight_collector(path: str) -> Callable[[], dict[str, Any]]:
    """Return a function that checks whether its node sees a file; nested, so that it is sent as code."""

    def collect() -> dict[str, Any]:
        import os

        return {"is_seen": os.path.exists(path)}  # noqa: PTH110  (a node has no raypar to import from)

    return collect


def versions_collector() -> Callable[[], dict[str, Any]]:
    """Return a function that returns the versions of packages on its node, "" for one that can't be imported.

    It is nested so that it is sent to nodes as code, and imports nothing of raypar. The version of a package that is on
    the path but not installed, as by py_modules or a working_dir of a runtime environment, is not known.
    """
    packages, no_version = _PACKAGES, _NO_VERSION

    def collect() -> dict[str, Any]:
        import importlib.metadata
        import importlib.util
        import platform

        found = {"python": ".".join(platform.python_version_tuple()[:2])}
        for package in packages:
            found[package] = ""
            if importlib.util.find_spec(package) is not None:
                try:
                    found[package] = importlib.metadata.version(package).partition("+")[0]
                except importlib.metadata.PackageNotFoundError:
                    found[package] = no_version
        return found

    return collect


def package_version_faults(node: Node, own: Mapping[str, str], its: Mapping[str, str] | str) -> list[str]:
    """Return the faults of the package versions of a node.

    Args:
        node: The node.
        own: The versions of this process.
        its: Those of the node, or the reason why they are not known.
    """
    if isinstance(its, str):
        return [f"node {node} does not run a task: {its}"]
    faults = []
    for name, version in own.items():
        if its.get(name, "") != version and not (its.get(name) and _NO_VERSION in (version, its[name])):
            there = f"has {name} {its[name]}" if its.get(name) else f"has no {name}"
            mend = f"pip install {name}=={version}" if name != "python" else f"start its Ray with Python {version}"
            mend = "let py_modules of a runtime_env bring it" if version == _NO_VERSION else mend
            faults.append(f"node {node} {there}, this process {version or 'none'}: {mend} there, or take the node away")
    return faults


def _by_address(address: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in address.split("."))
