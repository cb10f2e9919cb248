"""Where the documents of a microbatch begin: attention and positions do not reach from one into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from raypar.actors.specs.types import ProgramName

Reader: TypeAlias = Callable[[ProgramName, int, int], Tensor | None]


class Documents:
    """The documents of the microbatch that is computed, shared by the layers of an actor.

    A stage turns to a microbatch before it runs its layers, also when it runs them again. A layer that computes
    something again by itself keeps what it has read in its forward.

    Attributes:
        starts: Of each of this actor's tokens, the place of the first one of its document in the whole sequence, (B, S)
            int64; None if a sequence is one document.
        reads: Returns them for a program, a step and a microbatch, numbered over all replicas; None if there are none.
    """

    def __init__(self) -> None:
        self.starts: Tensor | None = None
        self.reads: Reader | None = None

    def turn_to(self, program: ProgramName | None, step: int, microbatch: int) -> None:
        """Read where the documents of a microbatch begin.

        Args:
            program: "train" or "evaluate"; None for what is no batch, and one document.
            step: The step.
            microbatch: Its number in the whole step and over all replicas.
        """
        self.starts = None if self.reads is None or program is None else self.reads(program, step, microbatch)
