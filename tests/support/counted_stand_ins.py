"""Stand-ins without Ray, in this process, which answer at once: calls to them and their bytes are counted."""

from __future__ import annotations

import pickle
from collections import Counter
from threading import Lock
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorDiedError

from tests.support.refs import Ref, answered
from tests.support.stand_in_cluster import StandInCluster, StandInHandle
from tests.support.stand_ins import Key, Pace, StandIn


class Died(BaseException):
    """The process of a stand-in has ended."""


class CountedCluster(StandInCluster):
    """A cluster of stand-ins in this process.

    Attributes:
        calls: How often each method was called, of those of a keeper of snapshots too.
        nbytes: Bytes of the arguments and answers of each method; what is put for all is counted once, as "put".
    """

    def __init__(self, actors: int) -> None:
        self.calls, self.nbytes = Counter[str](), Counter[str]()
        self._counting = Lock()  # several threads call at once
        self._there = dict[Key, StandIn | None]()
        here = SimpleNamespace(call=_Call(self, self._there), end=SimpleNamespace(remote=lambda key: None))
        super().__init__(actors, [here], Pace())

    def replaced(self) -> dict[str, Any]:
        ray = SimpleNamespace(
            get=_got, wait=_waited, put=self._put, kill=self.end, is_initialized=lambda: True, cloudpickle=cloudpickle
        )
        named = dict.fromkeys((f"cluster.{name}.ray" for name in ("calls.calls", "lifecycle.ray_cluster")), ray)
        for name, value in super().replaced().items():
            named[name] = ray if name.endswith(".ray") else value
        return named | {
            "cluster.lifecycle.ray_cluster._connect": lambda: False,
            "cluster.lifecycle.ray_cluster.driver_id": lambda: "here",
            "cluster.lifecycle.actors.driver_id": lambda: "here",
            "cluster.nodes.drain_notices.draining_nodes": dict,
            "cluster.deaths.post_mortem._number_here": lambda told: None,
            "job.recover.restarts.own_node": lambda: "here",
        }

    def there(self) -> Any:
        return answered(True)

    def handle(self, number: int, node: str) -> StandInHandle:
        """Return a handle of one more stand-in, on a node."""
        return StandInHandle(self._shared[0], Key(number, node))

    def end(self, handle: StandInHandle) -> None:
        self.asked["kill"] += 1

    def count(self, method: str, what: object) -> None:
        """Count the bytes of a call's arguments, or of its answer."""
        nbytes = len(pickle.dumps(what))
        with self._counting:
            self.nbytes[method] += nbytes

    def count_call(self, method: str) -> None:
        """Count a call."""
        with self._counting:
            self.calls[method] += 1

    @property
    def sent(self) -> int:
        """Bytes of snapshots that those that live have sent to others."""
        return sum(one.sent for one in self._there.values() if one is not None)

    def _put(self, value: object) -> Any:
        self.count("put", value)
        return answered(value)


class _Call:
    """As Ray's method of an actor, which is performed at once."""

    def __init__(self, cluster: CountedCluster, there: dict[Key, StandIn | None]) -> None:
        self._cluster, self._there = cluster, there

    def options(self, **_: Any) -> _Call:
        return self

    def remote(self, key: Key, method: str, *args: Any) -> Ref:
        self._cluster.count_call(args[0] if method == "snapshots" else method)
        self._cluster.count(method, [arg for arg in args if not isinstance(arg, Ref)])
        if key not in self._there:
            self._there[key] = StandIn(key, Pace(), die=_die)
        one = self._there[key]
        if one is None:
            return answered(ActorDiedError())
        try:
            answer = _performed(getattr(one, method)(*(arg.result(0) if isinstance(arg, Ref) else arg for arg in args)))
        except Died:
            self._there[key] = None
            return answered(ActorDiedError())
        except Exception as error:
            return answered(error)
        self._cluster.count(method, answer)
        return answered(answer)


def _performed(found: Any) -> Any:
    """Return what a call returns that waits for nothing."""
    if not hasattr(found, "send"):
        return found
    try:
        while True:
            found.send(None)
    except StopIteration as end:
        return end.value


def _die() -> None:
    raise Died


def _got(refs: Any, timeout: float | None = None) -> Any:
    return [ref.result(0) for ref in refs] if isinstance(refs, list) else refs.result(0)


def _waited(refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
    return list(refs), []
