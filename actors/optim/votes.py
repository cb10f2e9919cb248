"""The gradient norms and votes that actors exchange after a step, so that all make the same decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Handle
from raypar.actors.optim.block_norm import ExactSum

ReadBallot = Callable[[], Tensor | None]
"""Returns the sum of ``ballot_of`` over the replicas, (3,) float64, if an actor has it. On a GPU it may wait."""


class GradientTally(NamedTuple):
    """The reports of all actors on a step's gradients, summed.

    Attributes:
        squares: The sum of the squares of all gradients' block norms. Parts that are not finite may be counted by
            several actors.
        correction: The factor that turns gradients into those of the mean over the step's tokens: see ``correction``;
            0 for a step without tokens.
        against: Number of replicas whose loss is not finite.
    """

    squares: ExactSum
    correction: float = 0.0
    against: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether all losses and all block norms are finite."""
        return self.against == 0 and self.squares.is_finite

    def norm(self) -> Tensor:
        """Return the global gradient norm: () float32 on the host."""
        return self.squares.root()

    def message(self) -> Tensor:
        """Return this report as (23,) float64, whatever the model is; the sum of messages is the summed report."""
        return torch.tensor([*self.squares.numbers(), self.correction, self.against], dtype=torch.float64)

    @classmethod
    def read(cls, message: Tensor) -> GradientTally:
        """Read the message of one actor, or the sum of all messages."""
        *squares, factor, against = message.tolist()
        return cls(ExactSum.read(squares), factor, int(against))


class PendingReport(NamedTuple):
    """The report of an actor on a step's gradients, during the sum over all actors.

    Attributes:
        ballot: The ballot of the actor.
        message: The message of its report, and after the all_reduce the sum of all messages.
        handle: Handle of the all_reduce; None if there is no other actor.
        is_plain: Whether, by this actor's report, the update uses the gradients unchanged.
    """

    ballot: Tensor | None
    message: Tensor
    handle: Handle | None
    is_plain: bool


class ReportedGradients(NamedTuple):
    """The gradients that this rank reports for the global norm, so that no copy is counted twice.

    Attributes:
        ballot: Whether it reports the ballot.
        dense: Whether it reports the gradients of parameters that are not experts'.
        experts: Whether it reports those of experts.
    """

    ballot: bool = True
    dense: bool = True
    experts: bool = True


def ballot_of(tokens: int, expected: float, *, sound: bool) -> Tensor:
    """Return the report of a replica's last stage at the end of a step. It is summed over the replicas.

    Args:
        tokens: Number of target elements in this replica's part of the step.
        expected: Number of target elements that its losses were weighted for, see ``TokenMean``.
        sound: Whether all its losses are finite; if not, it votes no.

    Returns:
        (3,) float64 on the host: tokens, expected tokens, and 1 for a no vote.
    """
    return torch.tensor([tokens, expected, not sound], dtype=torch.float64)  # fp32 is not exact above 2**24 tokens
