"""Comparison of the weights of replicas, which must have the same bits."""

from __future__ import annotations

from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.worker.model_part import Part
from raypar.actors.worker.seat import Seat


def compare_weights(seat: Seat, part: Part, step: int | None) -> None:
    """Compare the weights that optimizers update, over all replicas of an actor.

    Args:
        seat: The actor's seat.
        part: Its part of the model.
        step: Before the update of which step, counted from 1; None: before the first step.

    Raises:
        UnequalReplicasError: Another replica has other weights.
    """
    for owner in range(part.owners.count):
        keys = ("dp", f"ps{owner}") if owner < part.owners.num_dense else ("edp",)
        seat.compare(keys, part.digests(owner), step)


def compare_fixed(seat: Seat, part: Part) -> None:
    """Compare what no optimizer changes, before the first step. Arguments and errors: see ``compare_weights``."""
    for key, fixed in zip(("dp", "edp"), part.fixed_apart(), strict=True):
        if key in seat.groups:
            seat.compare((key,), [digest(fixed)])
