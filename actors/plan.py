"""Everything that one actor is told about a run, and what it reports back. Plain data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypar.actors.context import Context
from raypar.actors.mesh import Mesh
from raypar.actors.recompute import Recompute
from raypar.actors.specs import GPT, SGD, AdamW, Batches, Layers, Llama, Text
from raypar.actors.split import Split
from raypar.actors.world import DataParallel, World, Zero
from raypar.schedules.action import Action
from raypar.schedules.schedule import Schedule

ProgramName = Literal["train", "evaluate"]
DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", DeviceKind]

SEND_WINDOW = 8  # sends to one peer that may be under way before an actor waits; every schedule is checked for it
KEPT = 4  # training steps whose events an actor remembers


@dataclass(frozen=True)
class Plan:
    """A run as one actor sees it.

    name      unique to job and generation; the names of its groups begin with it
    rank      this actor's rank in the world
    programs  the lowered schedules by name; of their rows only this actor's is filled
    rows      what this actor performs of each of them: its row, with some backwards in halves
    device    what every actor of the run computes on
    timeout   seconds that any wait on another actor may take
    """

    name: str
    mesh: Mesh
    rank: int
    model: GPT | Llama | Layers
    data: Text | Batches
    optim: AdamW | SGD
    programs: Mapping[ProgramName, Schedule]
    rows: Mapping[ProgramName, tuple[Action, ...]]
    split: Split
    recompute: Recompute
    micro_batch_size: int
    data_parallel: DataParallel
    bucket_mb: float
    servers: int
    zero: Zero | None
    sequence_parallel: bool
    context: Context
    clip: float | None
    seed: int
    steps: int
    threads: int
    device: DeviceKind
    timeout: float

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return World.of(self.mesh, self.data_parallel, self.servers, self.zero)


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


@dataclass(frozen=True)
class StepResult:
    """What one actor has to say of one step.

    losses       mean loss of each microbatch, in their order; only from the last stage
    counts       target elements of each microbatch, likewise
    grad_norm    global norm of the gradients before clipping, the same on every actor; None in an evaluation
    busy, span   seconds of compute, and from the first action to the last
    overlap      share of the gradients' reduction that was hidden behind compute; None without one
    in_flight    most microbatches whose forward was done and whose backward was not, over the actor's stages
    peak_memory  bytes: the process' high-water mark during the step (0 where the system does not tell); on a GPU that
                 of torch's memory there
    """

    losses: tuple[float, ...]
    counts: tuple[int, ...]
    grad_norm: float | None
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


class ActionError(RuntimeError):
    """An action that failed: on which actor, which action, with which peer, and why.

    ``secondary`` marks a failed communication: its cause is often another actor's error.
    """

    def __init__(self, actor: str, action: str, peer: str | None, reason: str, secondary: bool, trace: str) -> None:
        super().__init__(actor, action, peer, reason, secondary, trace)
        self.actor, self.action, self.peer, self.reason = actor, action, peer, reason
        self.secondary, self.trace = secondary, trace

    def __str__(self) -> str:
        whom = f" with {self.peer}" if self.peer else ""
        return f"actor {self.actor}: action {self.action}{whom} failed: {self.reason}"


class NonFiniteError(ArithmeticError):
    """The gradients of a step are not finite; no actor updated its weights."""


class StaleError(RuntimeError):
    """A step that was handed over behind one that could not be made: nothing of it was done."""
