"""A job's actors: whether they can be reached, how one takes the place of another, and their end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypar.actors.errors import first_line
from raypar.actors.specs.types import DeviceKind

log = logging.getLogger(__name__)


@dataclass
class Actors:
    """A job's actors and what must be released with them.

    Attributes:
        handles: The Ray actor handles, by rank.
        group: The placement group.
        owns_cluster: Whether the job connected to Ray, and so has to disconnect.
        driver: This process's worker id in Ray, which tells one connection from another.
        device: The kind of device that the actors compute on.
        create: Creates an actor of a name in a bundle of the placement group; None where none is replaced.
        bundles: The numbers of the actors' bundles, by rank.
        spares: Actors that have no rank yet, with the numbers of their bundles.
    """

    handles: list[Any]
    group: PlacementGroup
    owns_cluster: bool
    driver: str
    device: DeviceKind
    create: Callable[[str, int], Any] | None = None
    bundles: list[int] = field(default_factory=list)
    spares: list[tuple[Any, int]] = field(default_factory=list)

    def replace(self, rank: int, name: str) -> Any:
        """End the actor of a rank, and put a spare or a new actor in its place.

        Args:
            rank: The rank.
            name: The new actor's name in Ray's dashboard, if it is not a spare.

        Returns:
            The handle of the actor.
        """
        assert self.create is not None
        _try(ray.kill, self.handles[rank])
        if self.spares:
            (handle, bundle), freed = self.spares.pop(0), self.bundles[rank]
            self.spares.append((self.create(f"{name} spare", freed), freed))
            self.handles[rank], self.bundles[rank] = handle, bundle
        else:
            self.handles[rank] = self.create(name, self.bundles[rank])
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
            _try(remove_placement_group, self.group)
        finally:
            if self.owns_cluster:
                ray.shutdown()


def driver_id() -> str:
    """Return this process's worker id in Ray, which changes at every ray.init."""
    return str(ray.get_runtime_context().get_worker_id())


def _try(release: Callable[..., object], what: object) -> None:
    try:
        release(what)
    except Exception as error:
        log.warning("Ray did not release everything (%s: %s)", type(error).__name__, first_line(error))
