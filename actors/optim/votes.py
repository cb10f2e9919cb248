"""The gradient norms and votes that actors exchange after a step, so that all make the same decision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Handle


class GradientTally(NamedTuple):
    """The reports of all actors on a step's gradients, summed.

    Attributes:
        norms: The gradient norm of every logical parameter (n,) float32, in the order of the model's names.
        correction: The factor that turns gradients into those of the mean over the step's tokens: see ``correction``;
            0 for a step without tokens.
        against: Number of replicas whose loss is not finite.
        overflows: Number of tensors, or parts of tensors, whose gradients are not finite.
    """

    norms: Tensor
    correction: float
    against: float
    overflows: float

    @property
    def is_finite(self) -> bool:
        return self.against == 0.0 and self.overflows == 0.0

    @classmethod
    def of(cls, numbers: Tensor) -> GradientTally:
        """Read the report of one actor, or the sum of all reports."""
        return cls(numbers[:-3].sqrt().float(), *numbers[-3:].tolist())


class PendingReport(NamedTuple):
    """The report of an actor on a step's gradients, during the sum over all actors.

    Attributes:
        ballot: The ballot of the actor.
        numbers: Its report, and after the all_reduce the sum of all reports.
        handle: Handle of the all_reduce; None if there is no other actor.
        is_plain: Whether, by this actor's report, the update uses the gradients unchanged.
    """

    ballot: Tensor | None
    numbers: Tensor
    handle: Handle | None
    is_plain: bool


class ReportedGradients(NamedTuple):
    """The gradients that this rank reports for the global norm, so that no copy is counted twice.

    Attributes:
        ballot: Whether it reports the ballot.
        names: The parameters whose gradient norms it reports; None for all that it updates.
    """

    ballot: bool = True
    names: frozenset[str] | None = None


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
