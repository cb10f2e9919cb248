"""Inspect a job: fetch weights, gradients, communication totals and times from its actors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raypar.actors.bounds import Steps
from raypar.actors.collective.ledger import LedgerEntry
from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.tiles.tile_names import untiled
from raypar.actors.sharding import Shard, join_shards
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import KEPT, DeviceKind
from raypar.cluster.calls.calls import Calls
from raypar.config.arguments import checked_methods
from raypar.errors import ConfigError, UnknownNameError
from raypar.job.look.weights import Weights, held_part, joined, tiles_of, whole_shapes
from raypar.job.start.lifetime import HEARD, Lifetime
from raypar.job.start.loaded_run import Holds
from raypar.job.steps.training_loop import TrainingLoop
from raypar.planner.prediction import from_steps
from raypar.reporting.forecasting import forecast_of
from raypar.reporting.report import ledger_of, timelines_of
from raypar.reporting.tables.actor_table import Whereabouts, actor_of, lost_actor_row, without_rank
from raypar.reporting.tables.memory_table import MemoryTable, memory_table
from raypar.schedules.drawing.notebook import notebook_table
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.formatting import size
from raypar.schedules.nearest_name import did_you_mean
from raypar.schedules.timeline import Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.inspect.activations import Sight, Spot


@checked_methods
class Inspection:
    """Looks inside a job. It never changes a number of the run.

    Args:
        lifetime: The life of the job's actors.
        loop: Knows the run as the actors have it now, calls them, and handles failures.
        device: The device that the actors compute on.
    """

    def __init__(self, lifetime: Lifetime, loop: TrainingLoop, device: DeviceKind) -> None:
        self._lifetime, self._loop, self.device = lifetime, loop, device

    @property
    def _run(self) -> Run:
        return self._loop.loaded.run

    @property
    def _world(self) -> World:
        return self._loop.loaded.world

    @property
    def _skeleton(self) -> Skeleton:
        return self._loop.loaded.skeleton

    @property
    def _holds(self) -> Holds:
        """By rank, the shard that the rank holds of each of its logical parameters."""
        return self._loop.holds

    def _probed(self, ranks: Sequence[int], what: str, look: str, *args: object) -> list[Any]:
        """Call a method of the probes of actors; see ``TrainingLoop.read`` for failures.

        Args:
            ranks: The actors' ranks.
            what: What is going on, for messages.
            look: The name of the method.
            *args: Its arguments.
        """
        return self._loop.read(lambda: self._loop.loaded.calls.some(ranks, "probe", look, *args, what=what))

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all logical parameters by name."""
        return whole_shapes({name: shard.whole for held in self._holds for name, shard in held.items()})

    def param(self, name: str) -> Tensor:
        """Fetch a whole weight, frozen parameter or buffer by its logical name, to the CPU.

        A buffer, such as a running mean, differs between replicas: it is that of replica 0.

        Raises:
            KeyError: There is no such parameter or buffer.
        """
        if name in self._skeleton.fixed:
            return self._fixed(name)
        method = "master" if self._has_masters else "parameter"
        weight: Tensor = self._ask(name, method, self._world.trainers)
        return weight

    @property
    def _has_masters(self) -> bool:
        """Whether the optimizer's weights are others than the layers'."""
        return self._run.precision.is_mixed

    def weights(self, dp: int | None = None) -> Weights:
        """Return the optimizer's weights, or a replica's, as a lazy mapping: each access fetches; dict(...) copies.

        Args:
            dp: Index of the data-parallel replica; None for the optimizer's weights, which in fp32 are the same.

        Raises:
            ValueError: There is no such replica.
        """
        method, ranks = "master", tuple(self._world.trainers)
        if dp is not None or not self._has_masters:
            self._demand_replica(dp or 0, self._run.mesh.ways("dp"))
            method, ranks = "parameter", self._world.holders(dp or 0)
        if self._are_in_parts(method):
            ranks = tuple(dict.fromkeys(one for rank in ranks for one in self._world.tensor_group(rank)))
        held = whole_shapes({name: shard.whole for rank in ranks for name, shard in self._holds[rank].items()})
        shapes = {self._skeleton.originals.get(name, name): shape for name, shape in held.items()}
        return Weights(shapes, partial(self._ask, method=method, ranks=ranks), partial(self._every, method, ranks))

    def _are_in_parts(self, method: str) -> bool:
        """Return whether replicas have parts of the weights, or of the gradients, that a method of probes returns."""
        return self._world.sharded and (method != "parameter" or self._world.gathers)

    def _every(self, method: str, ranks: Collection[int]) -> Iterator[tuple[str, Tensor]]:
        """Fetch all weights, rank by rank, as a method of the probes of some ranks returns them or their parts."""
        if self._are_in_parts(method):
            return self._part_by_part(method, ranks)
        return joined(self._masters() if method == "master" else self._rank_by_rank(ranks))

    def _part_by_part(self, method: str, ranks: Collection[int]) -> Iterator[tuple[str, Tensor]]:
        """Fetch the parts that some ranks have of weights, one pipeline rank after the other, and put them together."""
        for pp in range(self._run.mesh.pp):
            parts = self._from_parts(method, [rank for rank in self._world.trainers_of(pp) if rank in ranks])
            yield from ((self._skeleton.originals.get(name, name), whole) for name, whole in parts.items())

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        """Fetch the optimizer's weights, rank by rank: each from the first replica that updates it."""
        originals = self._skeleton.originals
        for pp in range(self._run.mesh.pp):
            ranks = self._world.trainers_of(pp)
            found = self._probed(ranks, "fetching weights", "masters")
            held = dict(zip(ranks, found, strict=True))
            for name in dict.fromkeys(name for rank in ranks for name in self._holds[rank]):
                first = next(rank for rank in ranks if name in held[rank])
                yield originals.get(name, name), self._joined(name, first, held)

    def _rank_by_rank(self, holders: Collection[int]) -> Iterator[tuple[str, Tensor]]:
        """Fetch the weights that some ranks hold, or their tensor groups."""
        originals, seen = self._skeleton.originals, set[tuple[int, str]]()
        for rank in holders:
            ranks = self._world.tensor_group(rank)
            held = dict(zip(ranks, self._probed(ranks, "fetching weights", "parameters"), strict=True))
            for name in self._spoken(rank):
                if (end := (self._world.pp(rank), name)) not in seen:  # others of its experts' group may have it too
                    seen.add(end)
                    yield originals.get(name, name), self._joined(name, rank, held)

    def grad(self, name: str) -> Tensor | None:
        """Fetch a gradient of the latest step as the optimizer saw it: summed over the replicas, and clipped.

        Args:
            name: Logical name of the parameter.

        Returns:
            The whole gradient on the CPU; None if there is none, as before the first step.

        Raises:
            KeyError: There is no such parameter.
        """
        gradient: Tensor | None = self._ask(name, "gradient", self._updaters)
        return gradient

    def gradients(self) -> dict[str, Tensor | None]:
        """Fetch all gradients by logical name, as ``grad`` does for one, with one call of an actor at most."""
        if self._world.sharded:
            names = dict.fromkeys(untiled(name) for held in self._holds for name in held)
            return dict.fromkeys(names) | self._from_parts("gradient", self._updaters)
        holders: dict[str, int] = {}  # of each parameter, the first rank of the first tensor group that holds it
        for rank in self._updaters:
            for name in self._spoken(rank):
                holders.setdefault(name, rank)
        asked: dict[int, dict[str, None]] = {}
        for name, rank in holders.items():
            for one in self._parts_of(name, rank):
                asked.setdefault(one, {})[name] = None
        arguments = [("gradients", list(names)) for names in asked.values()]
        answers = self._loop.read(
            lambda: self._loop.loaded.calls.each("probe", arguments, what="fetching gradients", ranks=list(asked))
        )
        parts = {rank: dict(zip(asked[rank], answer, strict=True)) for rank, answer in zip(asked, answers, strict=True)}
        return dict(
            joined(
                (name, None if parts[rank][name] is None else self._joined(name, rank, parts))
                for name, rank in holders.items()
            )
        )

    @property
    def _updaters(self) -> Sequence[int]:
        """The ranks among which those are that update weights."""
        return self._world.server_ranks or range(self._world.size)

    def _spoken(self, rank: int) -> list[str]:
        """Return the parameters that a rank holds, whole or in part, as the first rank of its tensor group."""
        if self._world.leads(rank):
            return list(self._holds[rank])
        first = self._holds[self._world.tensor_group(rank)[0]]
        return [name for name in self._holds[rank] if name not in first]

    def _parts_of(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold a parameter together: the rank itself, or its tensor group if it has a part."""
        return (rank,) if self._holds[rank][name].is_whole else self._world.tensor_group(rank)

    def watch(self) -> tuple[str, ...]:
        """Make the actors keep activations and their gradients, for ``sights``, in the step that a stepper just opened.

        A stage cannot be watched and recorded in the same step.

        Returns:
            The logical names of the watched layers, and of the watched modules inside them.
        """
        ranks = range(self._run.mesh.size)
        found = self._probed(ranks, "watching the layers", "watch")
        return tuple(dict.fromkeys(name for names in found for name in names))

    def sights(self, spots: Sequence[Spot]) -> list[dict[int, Sight]]:
        """Fetch the parts of watched tensors: for each, by rank, what the rank has; ranks without one are left out."""
        found = self._probed(range(self._run.mesh.size), "fetching what the layers made", "sights", spots)
        return [{rank: sight for rank, sight in enumerate(one) if sight} for one in zip(*found, strict=True)]

    def grads(self, name: str) -> dict[int, tuple[Shard, Tensor]]:
        """Fetch every actor's part of the gradient of a parameter, by its logical name, of the latest step.

        Returns:
            By rank, the shard and its gradient on the CPU. Ranks without one are left out.
        """
        tiles = self._tiles(name)
        if self._world.sharded and tiles:  # a replica's parts of several tiles are no single slice
            whole = self.grad(name)
            return {} if whole is None else {self._updaters[0]: (Shard(tuple(whole.shape)), whole)}
        if self._world.sharded:
            found = self._probed(self._updaters, f"fetching {name}", "parts", "gradient", [name])
            return {rank: parts[name] for rank, parts in zip(self._updaters, found, strict=True) if name in parts}
        made: dict[int, list[tuple[str, Tensor]]] = {}
        for one in tiles or [name]:
            ranks = [rank for rank in self._updaters if one in self._holds[rank]]
            found = self._probed(ranks, f"fetching {one}", "gradient", one)
            for rank, gradient in zip(ranks, found, strict=True):
                if gradient is not None:
                    made.setdefault(rank, []).append((one, gradient))
        if tiles:
            return {rank: held_part(parts) for rank, parts in sorted(made.items())}
        return {rank: (self._holds[rank][name], gradient) for rank, ((_, gradient),) in made.items()}

    def _actor_table(self) -> str:
        """Return a table of the actors as HTML: coordinates, parameters, memory and device. It calls no actor."""
        import torch

        rows, last = [], self._loop.last
        for rank, held in enumerate(self._holds):
            parts = (shard.take(torch.empty(shard.whole, device="meta")) for shard in held.values())
            works = rank in self._world.trainers
            peak = size(last.peak_memory[self._world.pp(rank)]) if last is not None and works else "-"
            rows.append((rank, self._world.label(rank), f"{sum(part.numel() for part in parts):,}", peak, self.device))
        return notebook_table(rows, ("actor", "coordinates", "parameters", "peak memory", "device"))

    def who(self) -> Whereabouts:
        """Return a table of where every actor is and what it does now, also while another thread takes steps."""
        self._lifetime.demand_open()
        calls, world = self._loop.loaded.calls, self._world
        everyone = range(world.size)
        at = calls.answers(everyone, "located", seconds=HEARD, group="ctl")
        progress = calls.answers(everyone, "progress", seconds=HEARD, group="ctl")
        idle = [rank for rank, found in progress.items() if found.action is None]  # others would answer after the step
        events = calls.answers(idle, "probe", "events", seconds=HEARD)
        actors = self._lifetime.actors
        spare = Calls(actors.handles[world.size :], world, self._run.timeout)
        found = spare.answers(range(len(spare.handles)), "located", seconds=HEARD, group="ctl")
        rows = [
            actor_of(world.label(rank), at.get(rank), progress.get(rank), events.get(rank, [])) for rank in everyone
        ]
        rows += (without_rank(found.get(number)) for number in range(len(spare.handles)))
        rows += (lost_actor_row(has_room=vacancy.has_room) for vacancy in actors.pending)
        return Whereabouts(rows)

    def memory(self) -> MemoryTable:
        """Return the memory of every actor by kind: predicted, and measured in the latest step."""
        held = self._probed(range(self._world.size), "reading the memory", "held")
        return memory_table(replace(self._run, device=self.device), self._loop.loaded.schedule, self._skeleton, held)

    def ledger(self) -> dict[str, dict[tuple[str, str], LedgerEntry]]:
        """Return the communication totals: by actor, then by (axis, op), calls, bytes and seconds.

        What the launch itself sent, as initial values, is under the axis "launch".
        """
        return ledger_of(self._world, self._probed(range(self._world.size), "reading the ledger", "ledger"))

    def timeline(self, dp: int = 0) -> Timeline:
        """Return the measured timeline of one replica's latest compiled training step.

        Args:
            dp: Index of the data-parallel replica.

        Returns:
            The timeline, in seconds since the first action on any actor.

        Raises:
            ValueError: No step was measured yet (a step by hand is not measured), or there is no such replica.
        """
        measured = self._replica(dp, 0)
        if not measured.events:
            raise ConfigError(["no step has been measured yet: job.step() takes one (a step by hand is not measured)"])
        return measured

    def timelines(self, ago: Steps = 0) -> list[Timeline]:
        """Return the measured timelines of a compiled training step, all on one clock.

        Args:
            ago: How many steps before the latest. Actors keep the last few; the timelines of others are empty.

        Returns:
            One per replica, then one for expert actor 0 or server 0 of every pipeline rank, for number 1, and so on.
        """
        rows = self._probed(range(self._world.size), "reading the timeline", "events", ago)
        return timelines_of(self._loop.loaded.schedule, self._world, rows)

    def overlay(self, dp: int = 0, *, before_run: bool = False) -> Overlay:
        """Compare the latest compiled training step of one replica with its prediction.

        The prediction is a simulation with the durations measured in the steps before it; of the first, in itself.

        Args:
            dp: Index of the data-parallel replica.
            before_run: Lay what was predicted before the run over the step, from the calibration if it fits the run.

        Raises:
            ValueError: No step was measured yet, there is no such replica, or nothing was predicted in seconds.
        """
        measured = self.timeline(dp)
        if before_run:
            found = forecast_of(self._run, self._loop.loaded.schedule, self._skeleton)
            if found.timeline is None:
                raise ConfigError([f"no step was predicted in seconds before the run: {found.better}"])
            return Overlay(measured, found.timeline, found.source)
        before = [earlier for ago in range(1, KEPT) if (earlier := self._replica(dp, ago)).events]
        prediction = from_steps(measured, before)
        return Overlay(measured, prediction.timeline, prediction.source)

    def _replica(self, dp: int, ago: int) -> Timeline:
        self._demand_replica(dp, self._run.mesh.dp)
        return self.timelines(ago)[dp]

    def _demand_replica(self, dp: int, count: int) -> None:
        if not 0 <= dp < count:
            raise ConfigError([f"there is no replica dp={dp}: the mesh has {count}, counted from 0"])

    def _fixed(self, name: str) -> Tensor:
        """Fetch a tensor that no optimizer changes, a frozen parameter or a buffer."""
        self._lifetime.demand_open()
        ranks = [rank for rank in self._world.replica(0) if self._world.leads(rank)]
        found = self._probed(ranks, f"fetching {name}", "fixed", name)
        tensor: Tensor = next(tensor for tensor in found if tensor is not None)
        if tuple(tensor.shape) != self._skeleton.fixed[name]:
            raise UnknownNameError(
                f"{name!r} is not trained, and divided over mesh.tp: only weights are put together again"
            )
        return tensor

    def _ask(self, name: str, method: str, ranks: Sequence[int]) -> Any:
        self._lifetime.demand_open()
        if tiles := self._tiles(name):
            if self._are_in_parts(method):
                return self._from_parts(method, ranks, tiles).get(name)
            ((_, whole),) = joined((tile, self._ask(tile, method, ranks)) for tile in tiles)
            return whole
        if self._are_in_parts(method) and any(name in held for held in self._holds):
            return self._from_parts(method, ranks, [name]).get(name)
        for rank in (holders := [rank for rank in ranks if name in self._spoken(rank)]):
            found = self._whole(name, method, rank)
            if found is not None or rank == holders[-1]:
                return found
        if name in self._skeleton.fixed:
            raise UnknownNameError(f"{name!r} is a frozen parameter or a buffer: it has no gradient")
        known = [*self.parameters, *self._skeleton.fixed]
        raise UnknownNameError(f"no parameter {name!r}: {did_you_mean(str(name), known, 'see job.parameters', most=3)}")

    def _tiles(self, name: str) -> list[str]:
        """Return the names of the tiles of a parameter, in order; [] if it is whole."""
        return tiles_of(name, dict.fromkeys(one for held in self._holds for one in held))

    def _whole(self, name: str, method: str, rank: int) -> Tensor | None:
        """Fetch a logical tensor from a rank, or from its whole tensor group if the rank holds only a part."""
        ranks = self._parts_of(name, rank)
        parts = self._probed(ranks, f"fetching {name}", method, name)
        held = {one: {name: part} for one, part in zip(ranks, parts, strict=True)}
        return None if parts[0] is None else self._joined(name, rank, held)

    def _from_parts(self, what: str, ranks: Sequence[int], names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Fetch the parts that ranks update, and put them together.

        Args:
            what: "master", "parameter" or "gradient".
            ranks: The ranks.
            names: Logical names of parameters or their tiles; None for all.

        Returns:
            The whole tensors by logical name. Gradients that nobody has are left out.
        """
        found: dict[str, Tensor] = {}
        for parts in self._probed(ranks, f"fetching {names[0] if names else f'{what}s'}", "parts", what, names):
            for name, (shard, part) in parts.items():
                whole = found.setdefault(untiled(name), part.new_empty(shard.whole))
                shard.put(whole, part)
        return found

    def _joined(self, name: str, rank: int, held: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        """Join a logical tensor that a rank holds, whole or with its tensor group; ``held`` is what each rank has."""
        ranks = self._parts_of(name, rank)
        return join_shards([self._holds[one][name] for one in ranks], [held[one][name] for one in ranks])
