"""One step of an actor, while it is performed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from raypar.actors.inspect.step import Notes
from raypar.actors.specs.results import Span, Updated
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values
from raypar.schedules.action import Action


@dataclass(slots=True)
class Step:
    """What an actor knows of the step that it performs; ``begin`` makes a new one.

    number     of the step; -1 before the first one
    is_train   whether it has backwards
    notes      of a step that is taken by hand; None of a compiled one
    now        the action under way
    num_bytes  that this action has moved
    events     what was done, between marks of the place
    values     by action: what it provided and another action still needs
    computed   by microbatch: losses that were not read yet
    losses     by microbatch: those that were
    counts     by microbatch: target elements
    in_flight  most microbatches between forward and backward so far
    updated    what is known of the update, once it is made
    """

    program: ProgramName = "train"
    number: int = -1
    is_train: bool = False
    notes: Notes | None = None
    now: Action | None = None
    num_bytes: int = 0
    events: list[Span] = field(default_factory=list)
    values: dict[Action, Values] = field(default_factory=dict)
    computed: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    in_flight: int = 0
    updated: Updated = field(default_factory=Updated)
