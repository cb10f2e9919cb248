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

_STARTED = 30.0  # seconds in which a new actor starts on a node that lives
_ELSEWHERE = 60.0  # the same where it has just been given a home
_ROOM = 10.0  # seconds in which a node with room is found


@dataclass(frozen=True)
class ActorBundle:
    """Where an actor has its resources.

    Attributes:
        group: A placement group.
        bundle: The number of a bundle in it.
        node: Ray's id of the node on which it is; "" in a group of others, which Ray may move.
        in_use: The numbers of the group's bundles that are homes, for all homes of the group together; None if the
            group is one of others.
        is_left: Whether its node is taken away, and so another actor is to come elsewhere in the place of this one.
    """

    group: PlacementGroup
    bundle: int
    node: str = ""
    in_use: set[int] | None = None
    is_left: bool = False

    @property
    def is_claimed(self) -> bool:
        """Whether the group is of this job, which gives it back."""
        return self.in_use is not None

    def give_back(self) -> None:
        """Give the home back, and with the last one the group: Ray would keep it, also for no one, and move it."""
        if self.in_use is not None:
            self.in_use.discard(self.bundle)
            if not self.in_use:
                remove_placement_group(self.group)


def nodes_of(homes: Iterable[ActorBundle]) -> list[str]:
    """Return for each of some homes Ray's id of the node on which it is now; "" if there is none.

    Ray is asked once for each placement group: its answer has all bundles.
    """
    tables = dict[PlacementGroup, dict[int, str]]()
    found = list[str]()
    for home in homes:
        if not home.node and home.group not in tables:
            tables[home.group] = placement_group_table(home.group)["bundles_to_node_id"]
        found.append(home.node or tables[home.group].get(home.bundle, ""))
    return found


Create = Callable[[str, ActorBundle], Any]  # creates an actor of a name in a home
ClaimOne = Callable[[str], PlacementGroup]  # claims a home on any node for an actor of a name, without waiting


class PendingActor:
    """A place that has no actor. Every call returns at once; what is waited for meanwhile is in ``awaited``.

    A home whose node is lost is looked for on any node, until one has room: also on one that is yet to come, for which
    the claim makes an autoscaler ask. An actor of which nothing is heard is given up, and a home is looked for again.

    Args:
        name: The name of the actor in Ray's dashboard, of no other one; a number is added.
        home: The home of the actor before, if its node lives.
        create: Creates actors.
        claim: Claims homes.
        starting: An actor that is started in the home already; None to start one.

    Attributes:
        awaited: The object ref of what is waited for: a home, or the first answer of an actor.
    """

    def __init__(
        self, name: str, home: ActorBundle | None, create: Create, claim: ClaimOne, starting: Any = None
    ) -> None:
        self._name, self._create, self._claim = name, create, claim
        self._handle: Any = None
        self._claimed: PlacementGroup | None = None  # as long as it is not a home yet
        self._in_time = math.inf  # when it is late
        self._had_room, self._tries = False, 0
        if home is None:
            self._search()
        else:
            self._start(home, _STARTED, starting)

    @property
    def has_room(self) -> bool:
        """Whether there is a home, in which an actor starts."""
        return self._handle is not None

    def is_late(self, wait: float = 0.0) -> bool:
        """Return whether no actor comes in time: there is no room, or nothing is heard of those that were started.

        Args:
            wait: Seconds in which a node with room may come, if they are more than a run waits in any case.
        """
        return time.monotonic() > self._in_time + max(0.0, wait - _ROOM)

    def look(self) -> tuple[Any, ActorBundle] | None:
        """Return the actor and its home, if it has answered."""
        has_come = bool(ray.wait([self.awaited], timeout=0)[0])
        if self._handle is None:
            if has_come and self._claimed is not None:
                (node,) = placement_group_table(self._claimed)["bundles_to_node_id"].values()
                self._start(ActorBundle(self._claimed, 0, node, {0}), _ELSEWHERE)
                self._in_time = self._in_time if self._had_room else self._until
                self._had_room = True
        elif has_come and succeeded(self.awaited):
            return self._handle, self._home
        elif has_come or time.monotonic() > self._until:  # it has died, or nothing is heard of it
            self._give_up()
            self._search()
        return None

    def close(self) -> None:
        """Look no more, and end the actor that has not answered yet."""
        self._give_up()

    def _search(self) -> None:
        self._claimed = self._claim(self._name)
        self.awaited, self._in_time = self._claimed.ready(), min(self._in_time, time.monotonic() + _ROOM)

    def _start(self, home: ActorBundle, seconds: float, starting: Any = None) -> None:
        self._tries += 1
        self._home = home
        self._handle = self._create(f"{self._name} {self._tries}", home) if starting is None else starting
        self.awaited = self._handle.progress.options(concurrency_group="ctl").remote()
        self._until = time.monotonic() + seconds

    def _give_up(self) -> None:
        with suppress(RayError):
            if self._handle is not None:
                ray.kill(self._handle)
                self._home.give_back()
            elif self._claimed is not None:
                remove_placement_group(self._claimed)
        self._handle = self._claimed = None


def succeeded(ref: Any) -> bool:
    """Return whether a finished call succeeded."""
    try:
        ray.get(ref)
    except RayError:
        return False
    return True
