"""What a step leaves behind for the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raypar.actors.collective.ledger import Entry
from raypar.actors.mesh.world import World
from raypar.actors.specs.results import Span, StepResult
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Event, Timeline

Moved = Mapping[tuple[str, str], tuple[int, int]]  # by (axis, op): calls and bytes


def timelines_of(schedule: Schedule, world: World, rows: Sequence[Sequence[Span]]) -> list[Timeline]:
    """A timeline for each replica, then one for the servers 0, the servers 1, ... of all pipeline ranks.

    ``schedule`` is the run's, and ``rows`` are the spans of every rank. The first of all is at second 0.
    """
    zero = min((span.start for row in rows for span in row), default=0.0)
    lanes = [world.replica(dp) for dp in range(world.mesh.dp)]
    lanes += [tuple(world.server_rank(pp, index) for pp in range(world.mesh.pp)) for index in range(world.servers)]
    return [_timeline(schedule, world, zero, {rank: rows[rank] for rank in lane}) for lane in lanes]


def ledger_of(world: World, moved: Sequence[Moved]) -> dict[str, dict[tuple[str, str], Entry]]:
    """Calls and bytes by (axis, op) of every actor, by its name; ``moved`` are those of every rank."""
    return {
        world.label(rank): {key: Entry(*counts) for key, counts in table.items()} for rank, table in enumerate(moved)
    }


def _timeline(schedule: Schedule, world: World, zero: float, rows: dict[int, Sequence[Span]]) -> Timeline:
    events = [
        Event(world.pp(rank), world.label(rank), action, start - zero, end - zero, nbytes, bucket)
        for rank, row in rows.items()
        for action, start, end, nbytes, bucket in row
    ]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)), measured=True)


@dataclass(frozen=True)
class Report:
    """One training step.

    step          its number, from 0
    loss          mean over the step's tokens, over all replicas
    grad_norm     global 2-norm of the gradients before clipping
    lr            learning rate of the update
    tokens        target elements of the step
    tokens_per_s  as the driver saw it
    step_ms       milliseconds, likewise
    bubble        share of the actors' time in which they computed nothing, 0 to 1
    overlap       share of the gradients' reduction that was hidden behind compute: 1 - (seconds that an actor spent on
                  starting it and waiting for it) / (seconds in which it was under way), mean over the actors; None
                  with one replica, and with servers, whose weights are waited for besides
    in_flight     activations in flight: most microbatches held between forward and backward, for each pipeline rank
                  (of its replicas the most)
    peak_memory   bytes: largest resident memory during the step, on GPUs what torch held there, likewise
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_ms: float
    bubble: float
    overlap: float | None
    in_flight: tuple[int, ...]
    peak_memory: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """The loss on validation data: the mean over its tokens, in nats a token for text.

    perplexity is exp(loss); seconds is what it took.
    """

    step: int
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {"step": self.step, "val_loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}


def report_of(step: int, lr: float, seconds: float, results: Sequence[StepResult], world: World) -> Report:
    """Put together what the actors said of a step, by rank."""
    losses, counts = losses_of(results)
    tokens = sum(counts)
    workers = results[: world.mesh.size]
    idle = [1.0 - result.busy / result.span for result in workers if result.span > 0]
    overlaps = [result.overlap for result in workers if result.overlap is not None]
    ranks = [[workers[rank] for rank in world.replicas_of(pp)] for pp in range(world.mesh.pp)]
    return Report(
        step=step,
        loss=mean_loss(losses, counts),
        grad_norm=next((result.grad_norm for result in results if result.grad_norm is not None), 0.0),
        lr=lr,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        step_ms=seconds * 1e3,
        bubble=sum(idle) / len(idle) if idle else 0.0,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        in_flight=tuple(max(result.in_flight for result in replicas) for replicas in ranks),
        peak_memory=tuple(max(result.peak_memory for result in replicas) for replicas in ranks),
    )


def losses_of(results: Sequence[StepResult]) -> tuple[list[float], list[int]]:
    """Loss and target elements of every microbatch, in the order in which one process would take them: the first
    microbatch of each replica, then the second of each."""
    last = [result for result in results if result.losses]
    losses = [loss for same in zip(*(result.losses for result in last), strict=True) for loss in same]
    counts = [count for same in zip(*(result.counts for result in last), strict=True) for count in same]
    return losses, counts


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The mean over tokens, from microbatches' means over ``counts`` each, added in their order; 0 without tokens."""
    most = max(counts)
    if not most:
        return 0.0
    # shares of the longest one and not counts: equal counts give exactly sum(losses) / len(losses)
    shares = [count / most for count in counts]
    return sum(share * loss for share, loss in zip(shares, losses, strict=True)) / sum(shares)
