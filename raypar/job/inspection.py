"""Looking inside a job: its weights, gradients, messages and times, asked of the actors that have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raypar.actors.collective.ledger import Entry
from raypar.actors.sharding import Shard, join_shards
from raypar.actors.specs.types import KEPT
from raypar.job.lifetime import Lifetime
from raypar.job.loaded_run import LoadedRun
from raypar.reporting.report import ledger_of, timelines_of
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import simulate
from raypar.schedules.timeline import Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.inspect.activations import Sight, Spot


class Inspection:
    """What can be asked of a job's actors about the run that they have. Nothing here changes anything.

    holds  what each rank has of which logical parameters
    """

    def __init__(self, lifetime: Lifetime, loaded: LoadedRun, holds: Sequence[Mapping[str, Shard]]) -> None:
        self._guard, self._demand_open, self._holds = lifetime.guard, lifetime.demand_open, holds
        self._run, self._world, self._calls = loaded.run, loaded.world, loaded.calls
        self._schedule, self._skeleton = loaded.schedule, loaded.skeleton

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every logical parameter."""
        return {name: shard.whole for held in self._holds for name, shard in held.items()}

    def param(self, name: str) -> Tensor:
        """A weight by its logical name, whole, fetched from the actors that hold it, on the CPU."""
        weight: Tensor = self._ask(name, "parameter", range(self._run.mesh.size))
        return weight

    def weights(self, dp: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Every weight of a replica with its logical name, one actor's after the other; both ends of a tie, if they are
        apart.

        A copy goes by the name of its home.
        """
        homes = self._skeleton.homes
        for rank in self._world.replica(dp):
            ranks = self._world.tensor_group(rank)
            held = self._guard(partial(self._calls.some, ranks, "parameters", what="fetching weights"))
            for name in self._holds[rank]:
                yield homes.get(name, name), self._joined(name, ranks, [parts[name] for parts in held])

    def grad(self, name: str) -> Tensor | None:
        """A gradient of the latest step as the optimizer saw it (summed, clipped); None before the first step.

        It comes from the actor that updates the weight: a worker, or a parameter server.
        """
        gradient: Tensor | None = self._ask(name, "gradient", self._world.server_ranks or range(self._world.size))
        return gradient

    def gradients(self) -> dict[str, Tensor | None]:
        """What ``grad`` gives of every parameter, by logical name; every actor is asked once."""
        found: dict[str, Tensor | None] = {}
        for rank in filter(self._world.leads, self._world.server_ranks or range(self._world.size)):
            shards = {name: shard for name, shard in self._holds[rank].items() if found.get(name) is None}
            ranks = self._world.tensor_group(rank) if not all(shard.is_whole for shard in shards.values()) else (rank,)
            ask = partial(self._calls.some, ranks, "gradients", list(shards), what="fetching gradients")
            for (name, shard), *parts in zip(shards.items(), *self._guard(ask), strict=True):
                count = 1 if shard.is_whole else len(ranks)
                found[name] = None if parts[0] is None else self._joined(name, ranks[:count], parts[:count])
        return found

    def watch(self) -> tuple[str, ...]:
        """Have the actors keep what their layers make in the step that a stepper has just opened, and the gradients
        there, for ``sights``; the logical names of those layers, and of modules in them. Instead of a recording."""
        ranks = range(self._run.mesh.size)
        found = self._guard(lambda: self._calls.some(ranks, "watch", what="watching the layers"))
        return tuple(dict.fromkeys(name for names in found for name in names))

    def sights(self, spots: Sequence[Spot]) -> list[dict[int, Sight]]:
        """What the actors have of each of these tensors, which were watched, by rank."""
        ranks = range(self._run.mesh.size)
        found = self._guard(lambda: self._calls.some(ranks, "sights", spots, what="fetching what the layers made"))
        return [{rank: sight for rank, sight in enumerate(one) if sight} for one in zip(*found, strict=True)]

    def grads(self, name: str) -> dict[int, tuple[Shard, Tensor]]:
        """What every actor has of a gradient of the latest step, by rank; those that have none are left out."""
        ranks = [rank for rank in self._world.server_ranks or range(self._world.size) if name in self._holds[rank]]
        found = self._guard(lambda: self._calls.some(ranks, "gradient", name, what=f"fetching {name}"))
        pairs = zip(ranks, found, strict=True)
        return {rank: (self._holds[rank][name], gradient) for rank, gradient in pairs if gradient is not None}

    def ledger(self) -> dict[str, dict[tuple[str, str], Entry]]:
        """What every actor's groups moved since the launch: calls, bytes and seconds by (axis, op)."""
        return ledger_of(self._world, self._guard(lambda: self._calls.all("ledger", what="reading the ledger")))

    def timeline(self, dp: int = 0) -> Timeline:
        """The latest compiled training step of one replica as measured, in seconds from the first action of any.

        Before there is one, ValueError: a step by hand is not measured.
        """
        measured = self._replica(dp, 0)
        if not measured.events:
            raise ValueError("no step has been measured yet: job.step() takes one (a step by hand is not measured)")
        return measured

    def timelines(self, ago: int = 0) -> list[Timeline]:
        """The latest compiled training step on one clock: a timeline for each replica, then one for the servers 0, the
        servers 1, ... of the pipeline ranks.

        ``ago`` asks for a step so many before the latest: actors remember a few. Of others nothing is measured.
        """
        rows = self._guard(lambda: self._calls.all("events", ago, what="reading the timeline"))
        return timelines_of(self._schedule, self._world, rows)

    def overlay(self, dp: int = 0) -> Overlay:
        """The latest compiled training step of one replica over what those before it predict: simulated with their
        costs.

        After the first step there are none, and it is its own prediction. Before it, ValueError.
        """
        measured = self.timeline(dp)
        before = [earlier for ago in range(1, KEPT) if (earlier := self._replica(dp, ago)).events]
        return Overlay(measured, simulate(measured.schedule, costs_of(*(before or [measured]))))

    def _replica(self, dp: int, ago: int) -> Timeline:
        if not 0 <= dp < self._run.mesh.dp:
            raise ValueError(f"there is no replica dp={dp}: the mesh has {self._run.mesh.dp}, counted from 0")
        return self.timelines(ago)[dp]

    def _ask(self, name: str, method: str, ranks: Sequence[int]) -> Any:
        self._demand_open()
        for rank in (holders := [rank for rank in ranks if name in self._holds[rank] and self._world.leads(rank)]):
            found = self._whole(name, method, rank)
            if found is not None or rank == holders[-1]:
                return found
        close = difflib.get_close_matches(str(name), self.parameters, n=3)
        raise KeyError(
            f"no parameter {name!r}: {'did you mean ' + ', '.join(close) if close else 'see job.parameters'}"
        )

    def _whole(self, name: str, method: str, rank: int) -> Tensor | None:
        """A logical tensor of which a rank has all or a part, then the other ranks of its tensor group the rest."""
        ranks = (rank,) if self._holds[rank][name].is_whole else self._world.tensor_group(rank)
        parts = self._guard(partial(self._calls.some, ranks, method, name, what=f"fetching {name}"))
        return None if parts[0] is None else self._joined(name, ranks, parts)

    def _joined(self, name: str, ranks: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """A logical tensor of what these ranks have of it."""
        return join_shards([self._holds[rank][name] for rank in ranks], parts)
