"""A job's actors: whether they can be reached, how one takes the place of another, and their end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypar.actors.errors import first_line
from raypar.actors.specs.types import DeviceKind
from raypar.cluster.nodes import is_alive

log = logging.getLogger(__name__)
_HEARD = 2.5  # seconds in which an actor answers


@dataclass(frozen=True)
class Home:
    """Where an actor has its resources.

    Attributes:
        group: A placement group.
        bundle: The number of a bundle in it.
        node: Ray's id of the node on which it is; "" if Ray has chosen it.
    """

    group: PlacementGroup
    bundle: int
    node: str = ""


@dataclass
class Actors:
    """A job's actors and what must be released with them.

    Attributes:
        handles: The Ray actor handles, by rank.
        group: The placement group.
        owns_cluster: Whether the job connected to Ray, and so has to disconnect.
        driver: This process's worker id in Ray, which tells one connection from another.
        device: The kind of device that the actors compute on.
        create: Creates an actor of a name in a home; None where none is replaced.
        claim: Claims a home on any node, for an actor of a name. Raises NoRoomError.
        homes: The actors' homes, by rank.
        spares: Actors that have no rank yet, with their homes.
    """

    handles: list[Any]
    group: PlacementGroup
    owns_cluster: bool
    driver: str
    device: DeviceKind
    create: Callable[[str, Home], Any] | None = None
    claim: Callable[[str], Home] | None = None
    homes: list[Home] = field(default_factory=list)
    spares: list[tuple[Any, Home]] = field(default_factory=list)
    _claimed: list[PlacementGroup] = field(default_factory=list)

    def replace(self, rank: int, name: str) -> Any:
        """End the actor of a rank, and put a spare that lives in its place, or a new actor in the same home.

        If the home's node is lost, the new actor gets another home; see ``relocate``.

        Args:
            rank: The rank.
            name: The new actor's name in Ray's dashboard, if it is not a spare.

        Returns:
            The handle of the actor.

        Raises:
            NoRoomError: Its node is lost, and no other one has room.
        """
        assert self.create is not None
        _try(ray.kill, self.handles[rank])
        freed, silent = [self.homes[rank]], list[tuple[Any, Home]]()
        while self.spares:
            handle, home = self.spares.pop(0)
            if (lives := _lives(handle)) is None:
                silent.append((handle, home))  # it may be starting
            elif lives:
                self.handles[rank], self.homes[rank] = handle, home
                break
            else:
                freed.append(home)  # a spare that has died is replaced too, by which nothing is lost
        else:
            if _is_lost(freed[0]):
                self.relocate(rank, name)
            else:
                self.handles[rank] = self.create(name, freed[0])
            freed = freed[1:]
        self.spares += silent
        self.spares += [(self.create(f"{name} spare", home), home) for home in freed if not _is_lost(home)]
        return self.handles[rank]

    def relocate(self, rank: int, name: str) -> Any:
        """End the actor of a rank, and start another one on any node that has room.

        Args:
            rank: The rank.
            name: The new actor's name in Ray's dashboard.

        Returns:
            The handle of the actor.

        Raises:
            NoRoomError: No node has room.
        """
        assert self.create is not None and self.claim is not None
        _try(ray.kill, self.handles[rank])
        home = self.claim(name)
        self._claimed.append(home.group)
        self.handles[rank], self.homes[rank] = self.create(name, home), home
        return self.handles[rank]

    def reachable(self) -> bool:
        """Return whether this process is still connected to the Ray that the actors live in."""
        return ray.is_initialized() and driver_id() == self.driver

    def end(self) -> None:
        """Kill the actors, remove their placement group, and leave Ray if the job connected to it.

        What Ray fails to do is logged, so that it does not replace the error for which the job ends. A second call does
        nothing.
        """
        handles, self.handles = self.handles, []
        handles += [handle for handle, _ in self.spares]
        if not handles or not self.reachable():  # the actors ended with their Ray
            return
        try:
            for handle in handles:
                _try(ray.kill, handle)
            for group in (self.group, *self._claimed):
                _try(remove_placement_group, group)
        finally:
            if self.owns_cluster:
                ray.shutdown()


def driver_id() -> str:
    """Return this process's worker id in Ray, which changes at every ray.init."""
    return str(ray.get_runtime_context().get_worker_id())


def _is_lost(home: Home) -> bool:
    """Return whether the node of a home is known, and is there no more."""
    return bool(home.node) and not is_alive(home.node)


def _lives(handle: Any) -> bool | None:
    """Return whether an actor answers, or has died; None if it does neither."""
    answered, _ = ray.wait([ref := handle.progress.options(concurrency_group="ctl").remote()], timeout=_HEARD)
    if not answered:
        return None
    with suppress(RayError):
        ray.get(ref)
        return True
    return False


def _try(release: Callable[..., object], what: object) -> None:
    try:
        release(what)
    except Exception as error:
        log.warning("Ray did not release everything (%s: %s)", type(error).__name__, first_line(error))
