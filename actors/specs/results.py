"""What an actor reports of a step: losses, norms, times and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raypar.schedules.action import Action


class Span(NamedTuple):
    """Something that an actor did, with seconds of its machine's monotonic clock.

    bytes   that were moved, where that is known
    bucket  None for an action of the row; else REDUCE_GRAD stands for the reduction of the bucket of this number, which
            goes on beside the actions
    """

    action: Action
    start: float
    end: float
    bytes: int = 0
    bucket: int | None = None


class Updated(NamedTuple):
    """What an actor knows of an update; None of one that others make.

    grad_norm  global norm of the gradients before clipping
    lr         learning rate
    """

    grad_norm: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What one actor has to say of one step.

    losses       mean loss of each microbatch, in their order; only from the last stage
    counts       target elements of each microbatch, likewise
    grad_norm    global norm of the gradients before clipping, the same on every actor; None in an evaluation
    lr           learning rate of the update; None in an evaluation, and of an actor that updates nothing
    busy, span   seconds of compute, and from the first action to the last
    overlap      share of the gradients' reduction that was hidden behind compute; None without one
    in_flight    most microbatches whose forward was done and whose backward was not, over the actor's stages
    peak_memory  bytes: the process' high-water mark during the step (0 where the system does not tell); on a GPU that
                 of torch's memory there
    """

    losses: tuple[float, ...]
    counts: tuple[int, ...]
    grad_norm: float | None
    lr: float | None
    busy: float
    span: float
    overlap: float | None
    in_flight: int
    peak_memory: int


@dataclass(frozen=True)
class Progress:
    """Where an actor is: the step, how many of its actions are done, and which one is under way.

    idle  it waits, for as long as it takes, for others that compute
    """

    step: int
    done: int
    action: Action | None
    idle: bool = False
