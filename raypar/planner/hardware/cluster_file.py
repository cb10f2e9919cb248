"""Clusters from flags or from a table of a TOML file, with all their faults at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.data_sheets import (
    DEVICES,
    LINKS,
    MEASURE_DEVICE,
    Device,
    Link,
    data_sheet_faults,
    link_faults,
)
from raypar.schedules.nearest_name import did_you_mean

_USUAL = {"nvlink3": "ib-hdr", "nvlink4": "ib-ndr", "nvlink5": "ib-xdr", "shm": "ethernet-10"}  # else ethernet-100
_KEYS = ("nodes", "each_node", "device", "inside", "between", "adapters", "each_rack", "across", "links")
_NUMBERS = ("nodes", "each_node", "adapters", "each_rack")
_FIGURES = ("bandwidth", "latency")
_LARGEST = 1 << 100  # of whole numbers: what is larger is no figure, or no float at all
_NAMES = ("inside", "between", "across")


@dataclass(frozen=True)
class ReadCluster:
    """A cluster, or why there is none.

    Attributes:
        cluster: The cluster; None if there are faults.
        faults: One sentence for each.
    """

    cluster: Cluster | None
    faults: Sequence[str] = ()


def cluster_of(gpus: int, gpu: str, nodes: int = 0, between: str = "") -> ReadCluster:
    """Return a cluster of so many devices, with the links that such nodes usually have.

    Args:
        gpus: Number of devices.
        gpu: Their name, in any case.
        nodes: Number of nodes; 0: as many as devices of this kind usually fill.
        between: Name of the link between nodes; "" for the usual one.
    """
    faults = [*data_sheet_faults(gpu), *(link_faults(between) if between else ())]
    if gpus < 1:
        faults.append(f"gpus is {gpus}: give 1 or more")
    if nodes < 0:
        faults.append(f"nodes is {nodes}: give 1 or more, or leave it out")
    gpu = gpu.lower()
    if gpu in DEVICES and gpus > 0 and nodes >= 0:
        usual = min(gpus, DEVICES[gpu].each_node)
        count = nodes or -(-gpus // usual)
        if gpus % count:
            low = gpus // count * count
            near = f"{low} or {low + count}" if low else str(count)
            faults.append(f"{gpus} devices do not fill {count} nodes evenly: use {near}, or other nodes")
    if faults:
        return ReadCluster(None, faults)
    table = {"nodes": count, "each_node": gpus // count, "device": gpu}
    return cluster_from(table | ({"between": between} if between else {}))


def cluster_from(table: Mapping[str, Any]) -> ReadCluster:
    """Return the cluster of a table, whose keys are the fields of Cluster.

    ``device`` is the name of a data sheet or a table of the fields of Device; ``links`` has tables of further
    links by name. Links and adapters that are left out are those that such nodes usually have.

    Args:
        table: The table.
    """
    if "actors_per_node" in table or "replicas" in table:
        why = "as a cluster of raypar simulate has: raypar plan asks what its nodes are"
        return ReadCluster(
            None, [f"it has replicas or actors_per_node, {why}, with nodes, each_node, device, ... (docs/planning.md)"]
        )
    faults = list(_key_faults(table))
    device = _device(table.get("device"), faults)
    own = _own_links(table.get("links", {}), faults)
    links = dict(LINKS) | own
    names = {name: table[name] for name in _NAMES if name in table}
    for name, one in names.items():
        if not isinstance(one, str) or one not in links:
            faults += [f"{name}: {fault}" for fault in link_faults(str(one))]
    if device is not None and device.inside not in links:
        faults += [f"device.inside: {fault}" for fault in link_faults(device.inside)]
    faults += [fault for link in own.values() for fault in link.faults()]
    cluster = _filled(table, device or DEVICES["cpu"], names, links)
    wrong = [*dict.fromkeys([*faults, *cluster.faults()])]
    return ReadCluster(None if wrong else cluster, wrong)


def _filled(table: Mapping[str, Any], device: Device, names: Mapping[str, Any], links: Mapping[str, Link]) -> Cluster:
    """Return the cluster of a table. A faulty part is replaced, so that the others can be checked as well."""
    spare = LINKS["ethernet-100"]

    def link(name: object) -> Link:
        return links.get(name, spare) if isinstance(name, str) else spare

    def count(key: str, usual: int) -> int:
        given = table.get(key, usual)
        return given if _is_number(given, whole=True) else 1

    inside = link(names.get("inside", device.inside))
    between = link(names.get("between", _USUAL.get(device.inside, "ethernet-100")))
    each_node = count("each_node", 1)
    usual = each_node if between.name.startswith("ib-") and each_node > 0 else 1
    across = link(names["across"]) if "across" in names else None
    counts = count("adapters", usual), count("each_rack", 0)
    return Cluster(device, count("nodes", 1), each_node, inside, between, *counts, across)


def _key_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield unknown keys, holes, and values of another kind."""
    for key in table:
        if key not in _KEYS:
            yield f"there is no {key!r} in a cluster: {did_you_mean(key, _KEYS, ', '.join(_KEYS), spelled=repr)}"
    for key in ("nodes", "each_node", "device"):
        if key not in table:
            yield f"{key} is missing: " + ("give a data sheet's name, as h100" if key == "device" else "give a number")
    for key in _NUMBERS:
        if key in table and not _is_number(table[key], whole=True):
            yield f"{key} is {table[key]!r}: give a whole number"


def _device(given: object, faults: list[str]) -> Device | None:
    """Return the device of a name or a table; add its faults."""
    if given is None:
        return None
    if isinstance(given, str):
        faults += data_sheet_faults(given)
        return DEVICES.get(given.lower())
    if not isinstance(given, Mapping):
        faults.append(f"device is {given!r}: give a name or a table")
        return None
    kinds = {field.name: field for field in fields(Device)}
    wrong = [f"there is no device.{key}: fields are {', '.join(kinds)}" for key in given if key not in kinds]
    holes = [name for name, field in kinds.items() if field.default is MISSING and name not in given]
    if holes:
        wrong.append(f"device lacks {', '.join(holes)}: {MEASURE_DEVICE}")
    texts, whole = ("name", "inside", "source"), ("each_node", "units")
    for key, value in given.items():
        if key in kinds and isinstance(value, str) != (key in texts):
            wrong.append(f"device.{key} is {value!r}: give a {'text' if key in texts else 'number'}")
        elif key in kinds and key not in texts and not _is_number(value, whole=key in whole):
            wrong.append(f"device.{key} is {value!r}: give a {'whole ' if key in whole else ''}number")
    faults += wrong
    return None if wrong else Device(**given)


def _own_links(given: object, faults: list[str]) -> dict[str, Link]:
    """Return the links of the table; add their faults."""
    found: dict[str, Link] = {}
    if not isinstance(given, Mapping):
        faults.append(f"links is {given!r}: give tables, as [links.mine]")
        return found
    for name, table in given.items():
        figures = table if isinstance(table, Mapping) else {}
        holes = [key for key in _FIGURES if not _is_number(figures.get(key))]
        faults += [
            f"there is no links.{name}.{key}: a link has {' and '.join(_FIGURES)}"
            for key in figures
            if key not in _FIGURES
        ]
        if holes:
            faults.append(f"links.{name} lacks the number {' and '.join(holes)}: give bytes/s and seconds")
        else:
            found[name] = Link(name, float(figures["bandwidth"]), float(figures["latency"]), "the cluster file")
    return found


def _is_number(value: object, *, whole: bool = False) -> bool:
    """Return whether a value is a number that a float can be, or a whole one; true and false are none."""
    is_one = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    return is_one and not (isinstance(value, int) and abs(value) > _LARGEST)
