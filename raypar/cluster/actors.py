"""A job's actors: whether they can be reached, how one takes the place of another, and their end."""

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
from raypar.cluster.nodes import is_lasting
from raypar.cluster.own_ray import end_without_server
from raypar.cluster.replacement_actors import ActorBundle, ClaimOne, Create, PendingActor, nodes_of, succeeded
from raypar.cluster.together import together

log = logging.getLogger(__name__)
_HEARD = 2.5  # seconds in which an actor answers
_LOOK = 0.5  # seconds of one wait: Ray ignores Ctrl-C while waiting


@dataclass
class Actors:
    """A job's actors and what must be released with them.

    Attributes:
        handles: The Ray actor handles, by rank, and then those of actors without one; None where one is missing.
        owns_cluster: Whether the job connected to Ray, and so has to disconnect.
        driver: This process's worker id in Ray, which tells one connection from another.
        device: The kind of device that the actors compute on.
        create: Creates an actor of a name in a home; None where none is replaced.
        claim: Claims a home on any node, for an actor of a name.
        homes: The actors' homes, in the order of their handles.
        wait_for_nodes: Seconds in which a node may come that has room for actors without which the run can't go on.
        vacancies: The places of actors that are lost, as long as no other one has come.
    """

    handles: list[Any]
    owns_cluster: bool
    driver: str
    device: DeviceKind
    create: Create | None = None
    claim: ClaimOne | None = None
    homes: list[ActorBundle] = field(default_factory=list)
    wait_for_nodes: float = 0.0
    vacancies: list[PendingActor] = field(default_factory=list)
    _vacated: int = 0

    @property
    def present(self) -> int:
        """Number of actors that are there and stay."""
        return sum(map(self.stays, range(len(self.handles))))

    def stays(self, number: int) -> bool:
        """Return whether an actor is there, and not to be left."""
        return self.handles[number] is not None and not self.homes[number].is_left

    def vacate(self, number: int, name: str) -> None:
        """End an actor, and let another one start: in the same home, or if its node is lost on any that has room.

        Args:
            number: The actor's rank, or place among those that have none.
            name: The new actor's name in Ray's dashboard, to which numbers are added.
        """
        _try(ray.kill, self.handles[number])
        home = self.homes[number]
        if home.is_left:  # another one is on its way
            _try(ActorBundle.give_back, home)
            self.handles[number] = None
            return
        if is_lost := bool(home.node) and not is_lasting(home.node):
            _try(ActorBundle.give_back, home)
        self._vacate(number, name, None if is_lost else home)

    def leave(self, nodes: Collection[str], name: str) -> None:
        """Let another actor start elsewhere for each that is on nodes that are taken away. Those go on meanwhile.

        Args:
            nodes: Ray's ids of the nodes.
            name: The new actors' name in Ray's dashboard, to which numbers are added.
        """
        for number, (home, node) in enumerate(zip(self.homes, nodes_of(self.homes), strict=True)):
            if self.stays(number) and node in nodes:
                self.homes[number] = replace(home, is_left=True)
                self._claim_for(name, None)

    def dismiss(self, first: int) -> None:
        """End the actors that are left and have no rank.

        Args:
            first: The number of the first actor without one.
        """
        for number in reversed(range(first, len(self.handles))):
            if self.handles[number] is not None and self.homes[number].is_left:
                _try(ray.kill, self.handles[number])
                _try(ActorBundle.give_back, self.homes[number])
                del self.handles[number], self.homes[number]

    def _vacate(self, number: int, name: str, home: ActorBundle | None, starting: Any = None) -> None:
        """Let an actor come to the place of one."""
        self.handles[number] = None
        self._claim_for(name, home, starting)

    def _claim_for(self, name: str, home: ActorBundle | None, starting: Any = None) -> None:
        """Let an actor start; see ``PendingActor``."""
        assert self.create is not None and self.claim is not None
        self._vacated += 1
        self.vacancies.append(PendingActor(f"{name} {self._vacated}", home, self.create, self.claim, starting))

    def look(self) -> None:
        """Let actors that have started be among those without a rank. Returns at once."""
        for vacancy in list(self.vacancies):
            if (found := vacancy.look()) is not None:
                self.vacancies.remove(vacancy)
                self.handles.append(found[0])
                self.homes.append(found[1])

    def wait_for(self, count: int, wait: float = 0.0) -> bool:
        """Wait until so many actors are there, or until no more come in time. Returns whether they are there.

        Args:
            count: Number of actors.
            wait: Seconds in which nodes with room may come, if they are more than a run waits in any case.
        """
        self.look()
        while self.present < count and (hoped := self.hoped(wait)):
            ray.wait([one.awaited for one in hoped], timeout=_LOOK)
            self.look()
        return self.present >= count

    def grow(self, count: int, name: str) -> bool:
        """Start further actors, until so many are there; return whether they are. If not, none is started.

        Args:
            count: Number of actors.
            name: The new actors' name in Ray's dashboard, to which numbers are added.
        """
        before, first = list(self.vacancies), len(self.handles)
        for _ in range(count - self.present - len(before)):
            self._claim_for(name, None)
        if self.wait_for(count, self.wait_for_nodes):
            return True
        for vacancy in [one for one in self.vacancies if one not in before]:
            self.vacancies.remove(vacancy)
            _try(PendingActor.close, vacancy)
        self.shrink(first)
        return False

    def shrink(self, first: int) -> None:
        """End the actors without a rank whose homes the job has claimed, so that others get their room.

        Args:
            first: The number of the first actor that may end.
        """
        for number in reversed(range(first, len(self.handles))):
            if self.handles[number] is not None and self.homes[number].is_claimed:
                _try(ray.kill, self.handles[number])
                _try(ActorBundle.give_back, self.homes[number])
                del self.handles[number], self.homes[number]

    def hoped(self, wait: float = 0.0) -> list[PendingActor]:
        """Return the places to which an actor may still come in time; see ``wait_for``."""
        return [one for one in self.vacancies if not one.is_late(wait)]

    def demand_answers(self, first: int, name: str) -> None:
        """Let others start for those actors without a rank that have died; those that do not answer may be starting.

        Args:
            first: The number of the first of them.
            name: The new actors' name in Ray's dashboard.
        """
        numbers = [number for number in range(first, len(self.handles)) if self.stays(number)]
        asked = {number: self.handles[number].progress.options(concurrency_group="ctl").remote() for number in numbers}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_HEARD) if asked else ([], [])
        for number, ref in asked.items():
            if ref not in answered:
                self._vacate(number, name, self.homes[number], starting=self.handles[number])
            elif not succeeded(ref):
                self.vacate(number, name)

    def seat(self, numbers: Sequence[int]) -> None:
        """Give ranks to actors.

        Args:
            numbers: The number that the actor of each rank has had. All others have no rank then.
        """
        chosen = set(numbers)
        others = [number for number, handle in enumerate(self.handles) if handle is not None and number not in chosen]
        order = [*numbers, *others]
        self.handles, self.homes = [self.handles[one] for one in order], [self.homes[one] for one in order]

    def reachable(self) -> bool:
        """Return whether this process is still connected to the Ray that the actors live in."""
        return ray.is_initialized() and driver_id() == self.driver

    def end(self, *, is_lost: bool = False) -> None:
        """Kill the actors, remove their placement groups, and leave Ray if the job connected to it.

        What Ray fails to do is logged, so that it does not replace the error for which the job ends. A second call does
        nothing.

        Args:
            is_lost: Whether Ray's control server is gone, so that nothing is asked of it: each question would take a
                minute. The actors end with Ray then.
        """
        (handles, self.handles), (vacancies, self.vacancies) = (self.handles, []), (self.vacancies, [])
        if not handles or not self.reachable():  # the actors ended with their Ray
            return
        if is_lost:
            if self.owns_cluster:
                end_without_server()
            return
        try:
            together(partial(_try, ray.kill), [handle for handle in handles if handle is not None])
            for vacancy in vacancies:
                _try(PendingActor.close, vacancy)
            for group in dict.fromkeys(home.group for home in self.homes if home.is_claimed):
                if not _try(remove_placement_group, group):
                    break  # a Ray that does not answer takes a minute to say so, for each of them
        finally:
            if self.owns_cluster:
                ray.shutdown()


def driver_id() -> str:
    """Return this process's worker id in Ray, which changes at every ray.init."""
    return str(ray.get_runtime_context().get_worker_id())


def _try(release: Callable[..., object], what: object) -> bool:
    """Release something, log what goes wrong, and return whether Ray has answered."""
    try:
        release(what)
    except Exception as error:
        log.warning("Ray did not release everything (%s: %s)", type(error).__name__, first_line(error))
        return not isinstance(error, GetTimeoutError)
    return True
