"""A job's actors: which are present, how lost ones are replaced, and how all are ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import remove_placement_group

from raypar.actors.errors import first_line
from raypar.actors.specs.types import DeviceKind
from raypar.cluster.control_server import end_without_server
from raypar.cluster.lifecycle.replacement_actors import ActorBundle, ClaimOne, Create, PendingActor, nodes_of, succeeded
from raypar.cluster.nodes.nodes import is_lasting
from raypar.cluster.ray_private import disconnect
from raypar.cluster.together import together

log = logging.getLogger(__name__)
_HEARD = 2.5  # seconds within which a living actor answers
_LOOK = 0.5  # seconds of one wait: Ray ignores Ctrl-C while waiting


@dataclass
class Actors:
    """A job's actors and the resources that must be released with them.

    Attributes:
        handles: The Ray actor handles, by rank, then those of spare actors without a rank; None where one is missing.
        owns_cluster: Whether the job connected to Ray, and so has to disconnect.
        driver: This process's worker id in Ray, which differs for each connection.
        device: The kind of device that the actors compute on.
        create: Creates an actor with a name in a bundle; None if actors are not replaced.
        claim: Claims a bundle on any node for an actor with a name.
        bundles: The actors' bundles, in the order of their handles.
        wait_for_nodes: Seconds to wait for a node with room for actors without which the run can't go on.
        pending: The replacements that have not started yet.
    """

    handles: list[Any]
    owns_cluster: bool
    driver: str
    device: DeviceKind
    create: Create | None = None
    claim: ClaimOne | None = None
    bundles: list[ActorBundle] = field(default_factory=list)
    wait_for_nodes: float = 0.0
    pending: list[PendingActor] = field(default_factory=list)
    _num_replaced: int = 0

    @property
    def present(self) -> int:
        """Number of actors that are present and stay."""
        return sum(map(self.stays, range(len(self.handles))))

    def stays(self, number: int) -> bool:
        """Return whether an actor is present, and its node is not being drained."""
        return self.handles[number] is not None and not self.bundles[number].is_draining

    def replace_actor(self, number: int, name: str) -> None:
        """End an actor, and start another one: in the same bundle, or on any node with room if its node is lost.

        Args:
            number: The actor's rank, or its index in ``handles`` if it has none.
            name: The new actor's name in Ray's dashboard, to which numbers are added.
        """
        _try(ray.kill, self.handles[number])
        self.handles[number], bundle = None, self.bundles[number]
        is_lost = bundle.is_draining or (bool(bundle.node) and not is_lasting(bundle.node))
        if is_lost:
            _try(ActorBundle.give_back, bundle)
        if not bundle.is_draining:  # else its replacement is starting already
            self._claim_for(name, None if is_lost else bundle)

    def leave(self, nodes: Collection[str], name: str) -> None:
        """Start a replacement elsewhere for each actor on nodes that are being drained. Those go on meanwhile.

        Args:
            nodes: Ray's ids of the nodes.
            name: The new actors' name in Ray's dashboard, to which numbers are added.
        """
        for number, (bundle, node) in enumerate(zip(self.bundles, nodes_of(self.bundles), strict=True)):
            if self.stays(number) and node in nodes:
                self.bundles[number] = replace(bundle, is_draining=True)
                self._claim_for(name, None)

    def dismiss(self, first: int) -> None:
        """End the actors without a rank whose nodes are being drained.

        Args:
            first: The number of the first actor without one.
        """
        self._end_from(first, lambda bundle: bundle.is_draining)

    def _end_from(self, first: int, is_left: Callable[[ActorBundle], bool]) -> None:
        """End the actors from a number on whose bundles ``is_left`` selects."""
        for number in reversed(range(first, len(self.handles))):
            if self.handles[number] is not None and is_left(self.bundles[number]):
                _try(ray.kill, self.handles[number])
                _try(ActorBundle.give_back, self.bundles[number])
                del self.handles[number], self.bundles[number]

    def _claim_for(self, name: str, bundle: ActorBundle | None, starting: Any = None) -> None:
        """Start an actor; see ``PendingActor``."""
        assert self.create is not None and self.claim is not None
        self._num_replaced += 1
        self.pending.append(PendingActor(f"{name} {self._num_replaced}", bundle, self.create, self.claim, starting))

    def look(self) -> None:
        """Add the replacements that have started to the actors without a rank. Returns at once."""
        for actor in list(self.pending):
            if (found := actor.look()) is not None:
                self.pending.remove(actor)
                self.handles.append(found[0])
                self.bundles.append(found[1])

    def wait_for_actors(self, count: int, wait: float = 0.0) -> bool:
        """Wait until ``count`` actors are present, or until no more come in time. Returns whether they are present.

        Args:
            count: Number of actors.
            wait: Seconds to wait for nodes with room, if more than a run waits in any case.
        """
        self.look()
        while self.present < count and (hoped := self.hoped(wait)):
            ray.wait([one.awaited for one in hoped], timeout=_LOOK)
            self.look()
        return self.present >= count

    def grow(self, count: int, name: str) -> bool:
        """Start further actors until ``count`` are present; return whether they are. If not, none is started.

        Args:
            count: Number of actors.
            name: The new actors' name in Ray's dashboard, to which numbers are added.
        """
        before, first = list(self.pending), len(self.handles)
        for _ in range(count - self.present - len(before)):
            self._claim_for(name, None)
        if self.wait_for_actors(count, self.wait_for_nodes):
            return True
        for actor in [one for one in self.pending if one not in before]:
            self.pending.remove(actor)
            _try(PendingActor.close, actor)
        self.shrink(first)
        return False

    def shrink(self, first: int) -> None:
        """End the actors without a rank whose bundles the job has claimed, so that other jobs get the resources.

        Args:
            first: The number of the first actor that may end.
        """
        self._end_from(first, lambda bundle: bundle.is_claimed)

    def hoped(self, wait: float = 0.0) -> list[PendingActor]:
        """Return the replacements that may still start in time; see ``wait_for_actors``."""
        return [one for one in self.pending if not one.is_late(wait)]

    def demand_answers(self, first: int, name: str) -> None:
        """Replace the actors without a rank that have died; those that do not answer may still be starting.

        Args:
            first: The number of the first actor without a rank.
            name: The new actors' name in Ray's dashboard.
        """
        numbers = [number for number in range(first, len(self.handles)) if self.stays(number)]
        calls = {number: self.handles[number].progress.options(concurrency_group="ctl").remote() for number in numbers}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_HEARD) if calls else ([], [])
        for number, ref in calls.items():
            if ref not in answered:
                self._claim_for(name, self.bundles[number], starting=self.handles[number])
                self.handles[number] = None
            elif not succeeded(ref):
                self.replace_actor(number, name)

    def assign_ranks(self, numbers: Sequence[int]) -> None:
        """Assign ranks to actors.

        Args:
            numbers: By rank, the present number of its actor. All other actors have no rank afterwards.
        """
        chosen = set(numbers)
        spares = [number for number, handle in enumerate(self.handles) if handle is not None and number not in chosen]
        order = [*numbers, *spares]
        self.handles, self.bundles = [self.handles[one] for one in order], [self.bundles[one] for one in order]

    def reachable(self) -> bool:
        """Return whether this process is still connected to the actors' Ray."""
        return ray.is_initialized() and driver_id() == self.driver

    def end(self, *, is_lost: bool = False, has_failed: bool = False) -> None:
        """Kill the actors, remove their placement groups, and leave Ray if the job connected to it.

        Errors of Ray are logged, so that they do not replace the error for which the job ends. A second call does
        nothing.

        Args:
            is_lost: Whether Ray's control server is gone: each call to it would take a minute, so none is made. The
                actors end with Ray then.
            has_failed: Whether the job ends with a failure. Then, or if an actor was replaced, the logs of a Ray of its
                own stay.
        """
        (handles, self.handles), (pending, self.pending) = (self.handles, []), (self.pending, [])
        if not handles or not self.reachable():  # the actors ended with their Ray
            return
        if is_lost:
            if self.owns_cluster:
                end_without_server()
            return
        try:
            together(partial(_try, ray.kill), [handle for handle in handles if handle is not None])
            for actor in pending:
                _try(PendingActor.close, actor)
            for group in dict.fromkeys(bundle.group for bundle in self.bundles if bundle.is_claimed):
                if not _try(remove_placement_group, group):
                    break  # each call to a Ray that does not answer takes a minute
        finally:
            if self.owns_cluster:
                disconnect(keeps_logs=has_failed or self._num_replaced > 0)


def driver_id() -> str:
    """Return this process's worker id in Ray, which changes at every ray.init."""
    return str(ray.get_runtime_context().get_worker_id())


def _try(release: Callable[..., object], resource: object) -> bool:
    """Release a resource, log an error, and return whether Ray has answered."""
    try:
        release(resource)
    except Exception as error:
        log.warning("Ray did not release everything (%s: %s)", type(error).__name__, first_line(error))
        return not isinstance(error, GetTimeoutError)
    return True
