"""A cluster of nodes of 8 whose actors are stand-ins: launches take them, and what Ray is asked for is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import pytest
import ray

from raypar.cluster.lifecycle.ray_cluster import start_actors
from raypar.cluster.placement.placement import Node
from tests.support.stand_ins import Crowd, Key, Pace

PER_NODE = 8
AT_ONCE = 1 << 16  # calls that a process may have under way
QUESTIONS = 4096  # of those for progress
_NUMBERS = count()  # of all stand-ins, so that a process knows those of one job from those of another


class StandInHandle:
    """As Ray's handle of an actor: ``handle.method.options(...).remote(...)``.

    Args:
        process: Ray's handle of its ``Crowd``.
        key: Which one of them.
        is_alone: Whether the process has no other ones, and so ends with it.
    """

    def __init__(self, process: Any, key: Key, *, is_alone: bool = False) -> None:
        self.process, self.key, self.is_alone = process, key, is_alone

    def __getattr__(self, method: str) -> StandInMethod:
        return StandInMethod(self.process, self.key, method)


class StandInMethod:
    """As Ray's method of an actor."""

    def __init__(self, process: Any, key: Key, method: str, options: dict[str, Any] | None = None) -> None:
        self._process, self._key, self._method, self._options = process, key, method, options

    def options(self, **options: Any) -> StandInMethod:
        return StandInMethod(self._process, self._key, self._method, options)

    def remote(self, *args: object) -> Any:
        call = self._process.call
        return (call.options(**self._options) if self._options else call).remote(self._key, self._method, *args)


class Group:
    """As Ray's placement group, which is there at once.

    Args:
        nodes: The node of each of its bundles.
        first: How many bundles were claimed before.
    """

    def __init__(self, nodes: list[str], first: int) -> None:
        self.nodes, self.first = nodes, first
        self.id = self

    def hex(self) -> str:
        return f"group of {self.first}"

    def ready(self) -> Any:
        return ray.put(True)

    def wait(self, seconds: float) -> bool:
        return True


class RayWithStandIns:
    """Ray, but that it ends stand-ins too."""

    def __init__(self, cluster: StandInCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def kill(self, handle: Any) -> None:
        self._cluster.end(handle)


def start_crowd(pace: Pace) -> Any:
    """Start a process of stand-ins, which take so long; return its handle."""
    decorate: Any = ray.remote
    groups = {"ctl": QUESTIONS, "disk": 64}
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": AT_ONCE, "concurrency_groups": groups}
    return decorate(**options)(Crowd).remote(pace)


class StandInCluster:
    """A cluster of stand-ins.

    Args:
        actors: How many it has room for.
        shared: The processes that they share; see ``start_crowd``.
        pace: How long those take that have their own.
        alone: The ranks of those that have a process each, as long as they live.

    Attributes:
        asked: How often Ray was asked to do something: create, kill, claim, remove, witness.
        handles: The handles of the stand-ins that a launch has created, by rank.
    """

    def __init__(self, actors: int, shared: Sequence[Any], pace: Pace, alone: Collection[int] = ()) -> None:
        self._shared, self._own = shared, {rank: start_crowd(pace) for rank in alone}
        for process in self._own.values():
            ray.get(process.last_return.remote())  # it has started
        room = {"CPU": float(PER_NODE)}
        self._nodes = [
            Node(f"node-{at}", f"host-{at}", f"10.0.{at >> 8}.{at & 255}", room, room)
            for at in range(-(-actors // PER_NODE))
        ]
        self._further = count()
        self._claimed = 0  # bundles
        self.asked, self.handles, self._groups = Counter[str](), dict[int, StandInHandle](), list[Group]()

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Within it whatever launches a run finds this cluster."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.replaced().items():
                patch.setattr(f"raypar.{name}", value)
            yield self

    def close(self) -> None:
        """End the processes that are not shared."""
        for process in self._own.values():
            ray.kill(process)

    def replaced(self) -> dict[str, Any]:
        """Return what takes the place of Ray's functions, by the names of raypar that they have."""
        seen, removed, table = RayWithStandIns(self), self.remove, self.table
        return {
            "cluster.lifecycle.actors.ray": seen,
            "cluster.lifecycle.actors.is_lasting": lambda node: True,
            "cluster.lifecycle.actors.remove_placement_group": removed,
            "cluster.lifecycle.replacement_actors.ray": seen,
            "cluster.lifecycle.replacement_actors.remove_placement_group": removed,
            "cluster.lifecycle.replacement_actors.placement_group_table": table,
            "cluster.deaths.process_monitors.ray": seen,
            "cluster.deaths.process_monitors._start": self.witness,
            "cluster.lifecycle.ray_cluster.living_nodes": lambda: list(self._nodes),
            "cluster.lifecycle.ray_cluster.demand_alike": lambda *_: None,
            "cluster.lifecycle.claims.placement_group": self.claim,
            "cluster.lifecycle.claims.remove_placement_group": removed,
            "cluster.lifecycle.claims.placement_group_table": table,
            "cluster.lifecycle.ray_cluster._remote": lambda *_: ActorClass(self),
            "job.launch.start_actors": start_actors,  # where a test has launches take actors that are kept
        }

    def last_return(self) -> float:
        """When a stand-in that shares a process has returned last, in seconds of ``time.perf_counter``."""
        return float(max(ray.get([process.last_return.remote() for process in self._shared])))

    def claim(self, bundles: Any, **options: Any) -> Group:
        """Instead of Ray's ``placement_group``."""
        self.asked["claim"] += 1
        pins = options.get("bundle_label_selector") or [{}] * len(bundles)
        nodes = [next(iter(pin.values()), "") or self._next_node() for pin in pins]
        self._groups.append(Group(nodes, self._claimed))
        self._claimed += len(bundles)
        return self._groups[-1]

    def table(self, group: Group | None = None) -> dict[str, Any]:
        """Instead of Ray's ``placement_group_table``."""
        if group is None:
            return {one.hex(): self.table(one) for one in self._groups}
        return {"bundles_to_node_id": dict(enumerate(group.nodes))}

    def remove(self, group: Group) -> None:
        """Instead of Ray's ``remove_placement_group``."""
        self.asked["remove"] += 1

    def create(self, where: Any) -> StandInHandle:
        """Create a stand-in; those of a node share a process, unless they have their own."""
        self.asked["create"] += 1
        group, bundle = where.placement_group, where.placement_group_bundle_index
        key, rank = Key(next(_NUMBERS), group.nodes[bundle]), group.first + bundle  # a launch claims in their order
        is_alone = rank in self._own and rank not in self.handles
        process = self._own[rank] if is_alone else self._shared[rank // PER_NODE % len(self._shared)]
        handle = StandInHandle(process, key, is_alone=is_alone)
        self.handles.setdefault(rank, handle)
        return handle

    def witness(self, node: str) -> StandInHandle:
        """Create what tells of the processes of a node."""
        self.asked["witness"] += 1
        return StandInHandle(self._shared[0], Key(-self.asked["witness"], node))

    def end(self, handle: StandInHandle) -> None:
        """Instead of ``ray.kill``."""
        self.asked["kill"] += 1
        if handle.is_alone:
            ray.kill(handle.process)
        else:
            handle.process.end.remote(handle.key)

    def _next_node(self) -> str:
        """Return a node for an actor that is not pinned to one."""
        return f"further-{next(self._further) // PER_NODE}"


class ActorClass:
    """As Ray's class of actors."""

    def __init__(self, cluster: StandInCluster, where: Any = None) -> None:
        self._cluster, self._where = cluster, where

    def options(self, name: str, scheduling_strategy: Any) -> ActorClass:
        return ActorClass(self._cluster, scheduling_strategy)

    def remote(self) -> StandInHandle:
        return self._cluster.create(self._where)
