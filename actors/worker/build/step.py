"""The state of one step while an actor performs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.actors.inspect.step import Notes
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.specs.results import Span, Updated
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values
from raypar.schedules.action import Action, Op


@dataclass(slots=True)
class StepState:
    """State of the step that an actor performs. ``begin`` creates a new one.

    Attributes:
        program: Name of the program.
        number: Number of the step, of an asynchronous schedule the first one; -1 before the first one.
        length: Number of its microbatches.
        is_train: Whether the step has backwards.
        further: Distance in dp to the replica whose microbatches it has; 0 for the actor's own.
        notes: Notes of a step taken by hand; None in a compiled step.
        now: The action under way; None between two actions.
        num_bytes: Bytes that this action has moved.
        events: Spans of the actions done so far, in marks of the device's clock.
        values: By action, its outputs that another action still needs.
        computed: By microbatch, losses (scalar tensors) that were not read yet.
        copied: Losses that are being copied to the host: by their microbatches, what waits for them (n,).
        losses: By microbatch, losses that were read.
        counts: By microbatch, the number of target elements.
        metrics: By microbatch, the user's metrics (see ``Model.metrics``); only in an evaluation.
        samples: Number of samples so far.
        in_flight: Largest number of microbatches between forward and backward so far.
        backwards: By stage, the number of backwards (B or W) that were begun.
        updates: Gradient norm and learning rate of each update: one, or one for each step of a stream.
    """

    program: ProgramName = "train"
    number: int = -1
    length: int = 0
    is_train: bool = False
    further: int = 0
    notes: Notes | None = None
    now: Action | None = None
    num_bytes: int = 0
    events: list[Span] = field(default_factory=list)
    values: dict[Action, Values] = field(default_factory=dict)
    computed: dict[int, Tensor] = field(default_factory=dict)
    copied: dict[tuple[int, ...], Callable[[], Tensor]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, Tensor] = field(default_factory=dict)
    samples: int = 0
    in_flight: int = 0
    backwards: Counter[int] = field(default_factory=Counter)
    updates: list[Updated] = field(default_factory=list)

    def step_and_index(self, microbatch: int) -> tuple[int, int]:
        """Return the step that a microbatch of the row belongs to, and its number in that step."""
        return self.number + microbatch // self.length, microbatch % self.length

    def step_of(self, action: Action) -> int:
        """Return the step that an action belongs to: in an asynchronous schedule, one of those under way."""
        if action.microbatch is None or action.op is Op.USE:
            return self.number
        return self.number + action.microbatch if action.op is Op.STEP else self.step_and_index(action.microbatch)[0]

    def sums_of(self, microbatch: int) -> tuple[tuple[float, float], ...]:
        """Return, for each metric of a microbatch, its sum and the number of elements in it."""
        return tuple((total, number) for total, number in self.metrics[microbatch].tolist())

    def copy_losses(self, device: ComputeDevice) -> None:
        """Start to copy the computed losses to the host, all at once."""
        if self.computed:
            self.copied[tuple(self.computed)] = device.read_back(torch.stack([*self.computed.values()]))
            self.computed.clear()

    def read_losses(self) -> None:
        """Read the losses that are copied to the host. On a GPU it waits for the copies."""
        for microbatches, read in self.copied.items():
            self.losses |= zip(microbatches, read().tolist(), strict=True)
        self.copied.clear()
