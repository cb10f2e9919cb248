"""The documents of a microbatch: attention and positions do not reach from one into another; padding is in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from raypar.actors.extents import Extents
from raypar.actors.sharding import Sharding
from raypar.actors.specs.types import ProgramName

Reader: TypeAlias = Callable[[ProgramName, int, int], Extents]


class Documents:
    """The documents of the present microbatch, shared by the layers of an actor.

    A stage calls ``turn_to`` before it runs its layers, also when it runs them again. A layer that recomputes something
    by itself keeps the values that it read in its forward.

    Attributes:
        starts: For each of this actor's tokens, the position in the whole sequence where its document begins, (B, S)
            int64; None if a sequence is one document.
        lengths: How many tokens each whole sequence has before its padding, (B,) int64; None if nothing is padding.
        microbatch: The microbatch's number in the step, over all replicas; None before the first one.
        reads: Returns starts and lengths for a program, a step and a microbatch; None if the data has no documents.
    """

    def __init__(self) -> None:
        self.starts: Tensor | None = None
        self.lengths: Tensor | None = None
        self.microbatch: int | None = None
        self.reads: Reader | None = None

    def turn_to(self, program: ProgramName | None, step: int, microbatch: int) -> None:
        """Read where the documents of a microbatch begin, and which of its tokens are padding.

        Args:
            program: "train" or "evaluate"; None for values that are no batch: one document without padding.
            step: The step.
            microbatch: The microbatch's number in the step, over all replicas.
        """
        found = Extents() if self.reads is None or program is None else self.reads(program, step, microbatch)
        self.turn(found, microbatch)

    def turn(self, extents: Extents, microbatch: int) -> None:
        """Set the documents and the padding of the present microbatch."""
        (self.starts, self.lengths), self.microbatch = extents, microbatch

    def real(self, sharding: Sharding, shape: torch.Size) -> Tensor | None:
        """Return which of an actor's tokens (T = B x S) are not padding, (T,) bool; None if there is no padding.

        Args:
            sharding: Which part of the whole sequences (B, S) the actor has.
            shape: B and S of that part.
        """
        if self.lengths is None:
            return None
        sharding = sharding.for_dims(2)
        positions = torch.arange(sharding[1].whole_length(shape[1]), device=self.lengths.device)
        return sharding.take(positions < self.lengths.unsqueeze(1)).flatten()
