"""The report of a step, and the timelines and ledger made from actors' results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raypar.actors.collective.ledger import LedgerEntry
from raypar.actors.mesh.world import World
from raypar.actors.specs.data import Examples
from raypar.actors.specs.results import Kind, Shadowed, Span, StepResult, losses_of, mean_loss
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import ELEMENTS, LEARNED, Format
from raypar.planner.utilisation import Utilisation
from raypar.reporting.experts import Loads, figures, loads_of, losses_of_layers, shadows_of, totals
from raypar.reporting.loss_text import loss_text
from raypar.reporting.overflow import Overflow, joined_overflow
from raypar.reporting.tables.totals import Totals
from raypar.schedules.action import Op
from raypar.schedules.drawing.notebook import box, notebook_table
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import size
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Call, Event, Timeline

Moved = Mapping[tuple[str, str], tuple[int, int]]  # by (axis, op): calls and bytes

_AT_ONCE = 20e-6  # seconds between two calls, in which nothing else is done
_TIMES = (  # fields that say nothing of a step by hand
    "tokens_per_s",
    "step_ms",
    "bubble",
    "communication",
    "overlap",
    "mfu",
    "hfu",
)


def unit_of(run: Run) -> str:
    """Return what a run's throughput counts: the user's unit, else tokens of a sequence, else samples.

    Of the tokens of examples it is those that are learned, which is not those of prompts and of padding.
    """
    tokens = LEARNED if isinstance(run.data, Examples) else "tokens"
    return run.unit or ("samples" if run.model.seq is None else tokens)


def timelines_of(schedule: Schedule, world: World, rows: Sequence[Sequence[Span]]) -> list[Timeline]:
    """Make the timelines of a step. Their times are seconds since the start of the step's first span.

    Args:
        schedule: The schedule; of an asynchronous one, perhaps only the first steps were performed.
        world: The ranks.
        rows: The spans of every rank, by rank.

    Returns:
        One timeline for each replica, then one for each expert actor or parameter server of a pipeline rank.
    """
    zero = min((span.start for row in rows for span in row), default=0.0)
    if schedule.stream and (steps := {span.action for row in rows for span in row if span.action.op is Op.STEP}):
        schedule = first_steps(schedule, len({step.microbatch for step in steps}))
    lanes = [world.replica(dp) for dp in range(world.mesh.dp)]
    if world.mesh.rank_dp:
        lanes = [tuple(world.trainers_in(row)[0] for row in range(schedule.num_ranks))]
    lanes += zip(*(world.mesh.experts_of(pp) for pp in range(world.mesh.pp)), strict=True)
    lanes += [tuple(world.server_rank(pp, index) for pp in range(world.mesh.pp)) for index in range(world.servers)]
    return [_timeline(schedule, world, zero, {rank: rows[rank] for rank in lane}) for lane in lanes]


def ledger_of(world: World, moved: Sequence[Moved]) -> Totals:
    """Return the calls and bytes by (axis, op) of every actor.

    Args:
        world: The ranks.
        moved: The calls and bytes by (axis, op) of every rank, by rank.

    Returns:
        The entries by actor name and (axis, op).
    """
    return Totals(
        {
            world.label(rank): {key: LedgerEntry(*counts) for key, counts in each.items()}
            for rank, each in enumerate(moved)
        }
    )


def _timeline(schedule: Schedule, world: World, zero: float, rows: dict[int, Sequence[Span]]) -> Timeline:
    events = [
        Event(world.row(rank), world.label(rank), *span._replace(calls=_joined(span.calls))).earlier(zero)
        for rank, row in rows.items()
        for span in row
    ]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)), measured=True)


def _joined(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Join the start of an op and the wait for it, where the actor did nothing in between."""
    found = list[Call]()
    for call in calls:
        if found and found[-1].name == call.name and call.start - found[-1].end < _AT_ONCE:
            call = found.pop()._replace(end=call.end)
        found.append(call)
    return tuple(found)


@dataclass(frozen=True)
class Report:
    """One training step.

    Attributes:
        step: Its number, counted from 0; texts count from 1.
        loss: Mean over the step's tokens, over all replicas; None if the step has no targets.
        grad_norm: Global 2-norm of the gradients before clipping.
        lr: Learning rate of the update; 0 of a step that was skipped.
        tokens: Number of target elements of the step.
        tokens_per_s: Tokens a second, by the driver's clock.
        step_ms: Duration in milliseconds, by the driver's clock: since the report of the step before. Where an actor
            begins its next step while others end this one, it is a little less than the length of the timeline.
        bubble: Share of the actors' time in which they computed nothing, 0 to 1, from the first action on any of them
            to the last; as in the timeline, if there is one replica.
        communication: Share of the same time in which they wait for collective ops within actions, as the sums of a
            tensor group and the exchange of tokens between experts; a part of what is not ``bubble``. On a GPU, in
            which its stream waits.
        overlap: Share of the gradient reduction that overlapped with compute: 1 - (seconds that an actor spent on
            starting it and waiting for it) / (seconds in which it was under way), mean over the actors. None with one
            replica, and with servers, where actors wait for weights as well.
        in_flight: For each pipeline rank, the most microbatches held between forward and backward (the most of its
            replicas).
        peak_memory: For each pipeline rank, the largest memory during the step, in bytes (the most of its replicas):
            resident memory on CPUs, torch's memory on GPUs.
        samples: Number of samples of the step.
        memory: By kind (weights, gradients, optimizer), for each pipeline rank the bytes that it holds at the most
            (the most of its replicas); they are part of ``peak_memory``, and the rest are activations, messages
            and the process.
        overflow: What values overflow and underflow a number format; None in a step in which they are not counted.
        by_hand: Whether the step was taken by hand. Then its times are those of the moves alone, one after the other,
            which say nothing of a run: they are shown and written nowhere.
        loss_scale: Scale of the loss; None if it was not scaled.
        skipped: Whether the step changed no weight, because a loss or a gradient was not finite, or it has no targets.
        unreached: In the first step after a launch, parameters of your own layers that got no gradient, without those
            that are frozen or of an expert.
        aux_by_layer: Auxiliary losses by kind and layer, as they are in the objective: with their coefficients, means
            over the microbatches and replicas. ``loss`` is without them.
        loads: Tokens of each expert; None if the model has none.
        shadows: Experts that were shadowed, and the prediction that they were for; empty unless the run asks for it.
        mfu: Model FLOPs utilisation, 0 to 1: FLOPs that the model needs, of the peak of the GPUs; None if the FLOPs or
            the peak are not known, as of the user's own layers, and of CPUs.
        hfu: Hardware FLOPs utilisation: the same, with what is recomputed.
        picture: Draws a step by hand as HTML, which a notebook shows above its figures.
    """

    step: int
    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_ms: float
    bubble: float
    overlap: float | None
    in_flight: tuple[int, ...]
    peak_memory: tuple[int, ...]
    samples: int = 0
    memory: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)
    by_hand: bool = False
    loss_scale: float | None = None
    skipped: bool = False
    unreached: tuple[str, ...] = ()
    overflow: Overflow | None = None
    aux_by_layer: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loads: Loads | None = None
    shadows: tuple[Shadowed, ...] = ()
    communication: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    picture: Callable[[], str] | None = field(default=None, compare=False, repr=False)

    @property
    def aux(self) -> dict[str, float]:
        """Auxiliary losses by kind, summed over the layers. The objective of the step is ``loss`` plus all of them."""
        return totals(self.aux_by_layer)

    @property
    def steps_taken(self) -> int:
        """Number of steps taken with this one: its number counted from 1."""
        return self.step + 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``steps_taken`` as a dict, for a line of JSON. Times of a step by hand are None."""
        line = asdict(replace(self, overflow=None, loads=None, shadows=(), picture=None))
        del line["picture"]
        line["steps_taken"] = self.steps_taken
        line["shadows"] = [one._asdict() for one in self.shadows]
        line |= dict.fromkeys(_TIMES) if self.by_hand else {}
        line |= {"overflow": None if self.overflow is None else self.overflow.to_dict()}
        if (loads := self.loads) is not None:
            line |= {"loads": loads.to_dict(), "max_load": loads.max_load, "dropped": loads.dropped}
        return line | {"aux": self.aux}

    def rated(self, utilisation: Utilisation | None) -> Report:
        """Return the report with the utilisation of the run's GPUs."""
        if utilisation is None or self.by_hand:
            return self
        seconds = self.step_ms / 1e3
        return replace(self, mfu=utilisation.mfu(self.samples, seconds), hfu=utilisation.hfu(self.samples, seconds))

    @property
    def utilisation(self) -> str:
        """The utilisation as a text: "MFU 41.2%", with recomputation "MFU 41.2%, HFU 54.9%"; "" if it is not known."""
        return utilisation_text(self.mfu, self.hfu)

    def per_second(self, unit: str) -> float:
        """Return how many of a unit, as ``unit_of`` returns it, were consumed in a second."""
        return self.tokens_per_s if unit in ELEMENTS else 1e3 * self.samples / self.step_ms

    def in_brief(self, unit: str = "tokens") -> dict[str, str]:
        """Return the main figures by name, as texts, for a line or a row; "-" where a step by hand has none.

        Args:
            unit: What throughput counts, as ``unit_of`` returns it.
        """
        times = {
            f"{unit}/s": f"{self.per_second(unit):,.0f}",
            "time": f"{self.step_ms:,.1f} ms",
            "bubble": f"{self.bubble:.1%}",
            **({} if self.mfu is None else {"MFU": f"{self.mfu:.1%}"}),
        }
        return {
            "loss": loss_text(self.loss),
            "gradient norm": f"{self.grad_norm:.4g}",
            "learning rate": f"{self.lr:.4g}",
            **(dict.fromkeys(times, "-") if self.by_hand else times),
            "peak memory": size(max(self.peak_memory, default=0)),
        }

    def __repr__(self) -> str:
        """Return the main figures in a line; the step is counted from 1."""
        figures = [f"{name} {value}" for name, value in self.in_brief().items() if value != "-"]
        notes = [note for note, holds in (("skipped", self.skipped), ("by hand", self.by_hand)) if holds]
        return f"<Report of step {self.steps_taken}: {', '.join([*notes, *figures])}>"

    def _repr_html_(self) -> str:
        rows = [
            ("step", self.steps_taken),
            ("loss", loss_text(self.loss)),
            ("gradient norm", f"{self.grad_norm:.4g}"),
            ("learning rate", f"{self.lr:.4g}"),
            *figures(self.aux, self.loads),
            *([("time", "stepped by hand")] if self.by_hand else self._times()),
            ("activations in flight", " ".join(map(str, self.in_flight))),
            ("peak memory", _sizes(self.peak_memory)),
            *((f"of which {kind}", _sizes(sizes)) for kind, sizes in self.memory.items()),
        ]
        return ("" if self.picture is None else self.picture()) + box(notebook_table(rows))

    def _times(self) -> list[tuple[str, str]]:
        return [
            ("tokens/s", f"{self.tokens_per_s:,.0f}"),
            *([("samples/s", f"{self.per_second('samples'):,.1f}")] if self.samples else []),
            ("time", f"{self.step_ms:,.1f} ms"),
            ("bubble", f"{self.bubble:.1%}"),
            *([("communication within actions", f"{self.communication:.1%}")] if self.communication else []),
            *([("utilisation", self.utilisation)] if self.utilisation else []),
        ]


def utilisation_text(mfu: float | None, hfu: float | None) -> str:
    """Say how much of the peak of its GPUs a run reaches; without HFU if nothing is recomputed, "" if not known."""
    if mfu is None or hfu is None:
        return ""
    return f"MFU {mfu:.1%}" + (f", HFU {hfu:.1%}" if hfu > mfu else "")


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(size, sizes))


def report_of(
    step: int,
    seconds: float,
    results: Sequence[StepResult],
    world: World,
    *,
    by_hand: bool = False,
    watched: Format = "fp16",
) -> Report:
    """Make the report of a step from the actors' results.

    Args:
        step: The step, counted from 0.
        seconds: Duration of the step, by the driver's clock.
        results: The actors' results, by rank.
        world: The ranks.
        by_hand: Whether the step was taken by hand.
        watched: The number format whose overflow was counted.

    Returns:
        The report.
    """
    losses, counts = losses_of(results)
    tokens = sum(counts)
    workers = results[: world.mesh.size]
    whole = len(workers) * makespan(workers)
    overlaps = [result.overlap for result in workers if result.overlap is not None]
    ranks = [[results[rank] for rank in world.trainers_of(pp)] for pp in range(world.mesh.pp)]
    return Report(
        step=step,
        loss=mean_loss(losses, counts),
        grad_norm=_norm_of(results, world),
        lr=next((result.lr for result in results if result.lr is not None), 0.0),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        step_ms=seconds * 1e3,
        bubble=1.0 - float_sum(result.busy for result in workers) / whole if whole else 0.0,
        communication=float_sum(result.communication for result in workers) / whole if whole else 0.0,
        overlap=float_sum(overlaps) / len(overlaps) if overlaps else None,
        in_flight=tuple(max(result.in_flight for result in replicas) for replicas in ranks),
        peak_memory=tuple(max(result.peak_memory for result in replicas) for replicas in ranks),
        samples=sum(result.samples for result in workers) // world.mesh.cp,  # cp divides the sequences of a sample
        memory={
            kind: tuple(max(result.memory.get(kind, 0) for result in replicas) for replicas in ranks)
            for kind in workers[0].memory
        },
        by_hand=by_hand,
        loss_scale=next((result.scale for result in results if result.scale is not None), None),
        skipped=any(result.is_skipped for result in results),
        unreached=tuple(dict.fromkeys(name for result in results for name in result.unreached)),
        overflow=joined_overflow(results, world, watched),
        aux_by_layer=losses_of_layers(results, world),
        loads=loads_of(results),
        shadows=shadows_of(results),
    )


def _norm_of(results: Sequence[StepResult], world: World) -> float:
    """Return the gradient norm of a step, which every actor knows, or of its own stages in an asynchronous schedule."""
    if any(result.updates and not result.is_validated for result in results):
        norms = (results[world.trainers_of(pp)[0]].grad_norm or 0.0 for pp in range(world.mesh.pp))
        return math.hypot(*norms)
    return next((result.grad_norm for result in results if result.grad_norm is not None), 0.0)


def reports_of(
    step: int,
    seconds: float,
    results: Sequence[StepResult],
    world: World,
    *,
    by_hand: bool = False,
    watched: Format = "fp16",
) -> list[Report]:
    """Make the reports of the steps that the actors took in one call: one, or several of an asynchronous schedule.

    Of several steps that overlap, each has its own loss, learning rate and gradient norm, and the mean of the rest.

    Args:
        step: The first step, counted from 0.
        seconds: Duration of all of them, by the driver's clock.
        results: The actors' results, by rank.
        world: The ranks.
        by_hand: Whether it is a step by hand.
        watched: The number format whose overflow was counted.
    """
    count = max(len(result.updates) for result in results)
    if not count:
        return [report_of(step, seconds, results, world, by_hand=by_hand, watched=watched)]
    return [
        report_of(step + number, seconds / count, [_of_step(result, number, count) for result in results], world)
        for number in range(count)
    ]


def _of_step(result: StepResult, number: int, count: int) -> StepResult:
    """Return an actor's part of one of the steps that it has reported together."""
    length = len(result.losses) // count
    own = slice(number * length, (number + 1) * length)
    updated = result.updates[number]
    return replace(
        result,
        losses=result.losses[own],
        counts=result.counts[own],
        samples=result.samples // count,
        **updated._asdict(),
    )


def makespan(results: Sequence[StepResult]) -> float:
    """Return the seconds from the first action of any actor in a step to the last of any."""
    took = [result for result in results if result.end > result.start]
    return max(result.end for result in took) - min(result.start for result in took) if took else 0.0
