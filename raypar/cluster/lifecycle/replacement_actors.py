"""Replace lost actors: reserve resources for each, start a new actor there, and wait until it answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

_STARTED = 30.0  # seconds within which a new actor starts on a living node
_ELSEWHERE = 60.0  # the same in a new bundle
_ROOM = 10.0  # seconds within which a node with room is found


@dataclass(frozen=True)
class ActorBundle:
    """The bundle of a placement group that holds an actor's resources.

    Attributes:
        group: The placement group.
        bundle: The number of the bundle in it.
        node: Ray's id of the bundle's node; "" in a group that the job has not claimed, which Ray may move.
        in_use: The numbers of the group's bundles in use, one set shared by all of its bundles; None if the job has not
            claimed the group.
        is_draining: Whether its node is being drained, so that a replacement of its actor starts elsewhere.
    """

    group: PlacementGroup
    bundle: int
    node: str = ""
    in_use: set[int] | None = None
    is_draining: bool = False

    @property
    def is_claimed(self) -> bool:
        """Whether this job has claimed the group, and so removes it."""
        return self.in_use is not None

    def give_back(self) -> None:
        """Release the bundle, and with the last one remove the group, which Ray would keep and move otherwise."""
        if self.in_use is not None:
            self.in_use.discard(self.bundle)
            if not self.in_use:
                remove_placement_group(self.group)


def nodes_of(bundles: Iterable[ActorBundle]) -> list[str]:
    """Return for each bundle Ray's id of its present node; "" if there is none.

    Ray is queried once for each placement group: its answer has all bundles.
    """
    tables = dict[PlacementGroup, dict[int, str]]()
    found = list[str]()
    for one in bundles:
        if not one.node and one.group not in tables:
            tables[one.group] = placement_group_table(one.group)["bundles_to_node_id"]
        found.append(one.node or tables[one.group].get(one.bundle, ""))
    return found


Create = Callable[[str, ActorBundle], Any]  # creates an actor with a name in a bundle
ClaimOne = Callable[[str], PlacementGroup]  # claims a bundle on any node for an actor with a name, without waiting


class PendingActor:
    """A replacement that has not started yet. Every method returns at once; ``awaited`` is the object ref to wait for.

    Without a bundle on a living node it claims one on any node with room, or on a future one: the claim makes an
    autoscaler add a node. An actor that does not answer in time is given up, and another bundle is claimed.

    Args:
        name: The unique name of the actor in Ray's dashboard; a number is added.
        bundle: The bundle of the lost actor, if its node is alive.
        create: Creates actors.
        claim: Claims bundles.
        starting: An actor that is starting in the bundle already; None to start one.

    Attributes:
        awaited: The object ref of the awaited event: a bundle, or the first answer of an actor.
    """

    def __init__(
        self, name: str, bundle: ActorBundle | None, create: Create, claim: ClaimOne, starting: Any = None
    ) -> None:
        self._name, self._create, self._claim = name, create, claim
        self._handle: Any = None
        self._claimed: PlacementGroup | None = None  # until it has resources
        self._in_time = math.inf  # the deadline, in time.monotonic
        self._had_room, self._tries = False, 0
        if bundle is None:
            self._search()
        else:
            self._start(bundle, _STARTED, starting)

    @property
    def has_room(self) -> bool:
        """Whether there is a bundle, in which an actor starts."""
        return self._handle is not None

    def is_late(self, wait: float = 0.0) -> bool:
        """Return whether no actor starts in time: there is no room, or the started actors do not answer.

        Args:
            wait: Seconds to wait for a node with room, if more than a run waits in any case.
        """
        return time.monotonic() > self._in_time + max(0.0, wait - _ROOM)

    def look(self) -> tuple[Any, ActorBundle] | None:
        """Return the actor and its bundle, if it has answered."""
        has_come = bool(ray.wait([self.awaited], timeout=0)[0])
        if self._handle is None:
            if has_come and self._claimed is not None:
                (node,) = placement_group_table(self._claimed)["bundles_to_node_id"].values()
                self._start(ActorBundle(self._claimed, 0, node, {0}), _ELSEWHERE)
                self._in_time = self._in_time if self._had_room else self._until
                self._had_room = True
        elif has_come and succeeded(self.awaited):
            return self._handle, self._bundle
        elif has_come or time.monotonic() > self._until:  # it has died, or does not answer
            self.close()
            self._search()
        return None

    def _search(self) -> None:
        self._claimed = self._claim(self._name)
        self.awaited, self._in_time = self._claimed.ready(), min(self._in_time, time.monotonic() + _ROOM)

    def _start(self, bundle: ActorBundle, seconds: float, starting: Any = None) -> None:
        self._tries += 1
        self._bundle = bundle
        self._handle = self._create(f"{self._name} {self._tries}", bundle) if starting is None else starting
        self.awaited = self._handle.progress.options(concurrency_group="ctl").remote()
        self._until = time.monotonic() + seconds

    def close(self) -> None:
        """Stop the replacement, and end the actor that has not answered yet."""
        with suppress(RayError):
            if self._handle is not None:
                ray.kill(self._handle)
                self._bundle.give_back()
            elif self._claimed is not None:
                remove_placement_group(self._claimed)
        self._handle = self._claimed = None


def succeeded(ref: Any) -> bool:
    """Return whether a finished call succeeded."""
    with suppress(RayError):
        ray.get(ref)
        return True
    return False
