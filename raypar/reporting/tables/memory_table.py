"""The memory of a run's actors by kind, as a formula has it and as it was measured, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.memory.all_actors import actors_memory
from raypar.planner.memory.kv_cache import cache_bytes
from raypar.planner.memory.worker import ActorMemory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from raypar.reporting.tables.totals import unknown_actor
from raypar.schedules.drawing.cells import lines_in_width
from raypar.schedules.drawing.notebook import box, notebook_table
from raypar.schedules.formatting import aligned, size
from raypar.schedules.schedule import Schedule

if TYPE_CHECKING:
    from raypar.actors.inspect.step import ActorContents


class Figure(NamedTuple):
    """Bytes of one kind on one actor.

    Attributes:
        formula: What was predicted; None if there is no formula.
        measured: What was measured, at the most in the latest step; None before the first.
    """

    formula: int | None
    measured: int | None

    def __str__(self) -> str:
        return " / ".join("-" if count is None else size(count) for count in self)


class MemoryTable(dict[str, dict[str, Figure]]):
    """Memory by actor, then by kind: weights, gradients, optimizer, gathered, buckets, activations, process, peak.

    ``activations`` are the rest of the peak: activations, messages, and what comes and goes within an action. What is
    ``offloaded`` to host memory or to files is not a part of the peak, nor is the ``cache`` of keys and values while a
    text is generated, after the step that was measured. A REPL and a notebook show a table, whose cells
    are the formula and the measurement.
    """

    def __missing__(self, actor: str) -> dict[str, Figure]:
        raise unknown_actor(actor, self)

    def __repr__(self) -> str:
        cells = [self._heads, *([str(figures.get(kind, "")) for kind in self._head] for figures in self.values())]
        return "\n".join(lines_in_width(["formula / measured", *self], aligned(cells)))

    def _repr_html_(self) -> str:
        rows = [(actor, *(figures.get(kind, "") for kind in self._head)) for actor, figures in self.items()]
        return box(notebook_table(rows, ("formula / measured", *self._heads)))

    @property
    def _head(self) -> list[str]:
        """The kinds of all actors."""
        return list(dict.fromkeys(kind for figures in sorted(self.values(), key=len)[::-1] for kind in figures))

    @property
    def _heads(self) -> list[str]:
        """The kinds as the head of the table has them: activations have more in them than those of a plan."""
        return ["activations, working" if kind == "activations" else kind for kind in self._head]


def memory_table(run: Run, schedule: Schedule, skeleton: Skeleton, held: Sequence[ActorContents]) -> MemoryTable:
    """Compare what a run's actors hold with the formulas.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights.
        held: What every actor holds, by rank, after a training step or before the first.
    """
    sized, found = SizedRun.of(run, schedule, skeleton), MemoryTable()
    world, formulas = sized.world, actors_memory(sized, from_flops(sized).timeline)
    for rank, one in enumerate(held):
        pp, of_kind = world.pp(rank), formulas.workers if rank < world.mesh.size else formulas.others
        found[one.actor] = dict(_figures(of_kind[pp], one, _cache(run, schedule, one, pp)))
    return found


def _cache(run: Run, schedule: Schedule, held: ActorContents, pp: int) -> int | None:
    """Return what a formula says of the caches of a generation on an actor; None if there is no generation."""
    if not held.sequences or not isinstance(run.model, Transformer):
        return None
    return cache_bytes(run, run.model, schedule, held.sequences)[pp]


def _figures(formula: ActorMemory, held: ActorContents, cache: int | None) -> Iterator[tuple[str, Figure]]:
    """Yield the kinds of memory of one actor, whose caches of keys and values take so many bytes by a formula."""
    found = held.most if held.has_trained else held.now
    for kind in ("weights", "gradients", "optimizer", "gathered", "buckets"):
        if kind in found:
            yield kind, Figure(getattr(formula, kind), found[kind])
    unknown, measured = formula.activations is None, held.has_trained and held.memory > 0
    known = sum(count for kind, count in found.items() if kind not in ("offloaded", "cache")) + formula.snapshots
    rest = max(0, held.memory - held.process - known)
    yield "activations", Figure(None if unknown else formula.passing, rest if measured else None)
    if formula.snapshots:
        yield "snapshots", Figure(formula.snapshots, None)
    yield "process", Figure(formula.process, held.process or None)
    yield "peak", Figure(None if unknown else formula.peak, held.memory if measured else None)
    if "cache" in found:
        yield "cache", Figure(cache, found["cache"])
    if "offloaded" in found:
        yield "offloaded", Figure(formula.offloaded, found["offloaded"])
