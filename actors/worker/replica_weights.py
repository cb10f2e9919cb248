"""Comparison of the weights of replicas, which must have the same bits."""

from __future__ import annotations

from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext

DEFAULT_EVERY = 1000  # steps between two comparisons, if the run does not say


def is_due(check_every: int | None, steps: range) -> bool:
    """Return whether replicas compare their weights in one of these steps.

    Args:
        check_every: That of the run. None: in step 2, which finds updates that are not the same, and in every 1,000th.
        steps: The steps, counted from 0.
    """
    if check_every is None:
        return 1 in steps or is_due(DEFAULT_EVERY, steps)
    return bool(check_every) and any((step + 1) % check_every == 0 for step in steps)


def compare_if_due(seat: RankContext, part: ModelPart, steps: range, when: str) -> None:
    """Compare weights if that is due in one of some steps, counted from 0; see ``compare_weights``."""
    if is_due(seat.plan.run.check_every, steps) and not seat.world.servers:  # servers send all the same weights
        compare_weights(seat, part, when)


def compare_weights(seat: RankContext, part: ModelPart, when: str | None) -> None:
    """Compare the weights that optimizers update, over all replicas of an actor that hold the same.

    Args:
        seat: The actor's seat.
        part: Its part of the model.
        when: When in the run, as "in step 3"; None: before the first step, as the weights were made.

    Raises:
        UnequalReplicasError: Another replica has other weights.
    """
    if when is not None and part.weights:  # only shards are always there, and only hybrid sharding has copies of them
        if seat.world.hybrid and seat.world.offload != "parameters":
            with part.home.at_hand(list(part.masters.parameters.values())):
                seat.compare(("replicate",), [digest(part.masters.parameters)], when)
        return
    for owner in range(part.owners.count):
        keys = ("dp", f"ps{owner}") if owner < part.owners.num_dense else ("edp",)
        seat.compare(keys, part.digests(owner), when)


def compare_fixed(seat: RankContext, part: ModelPart) -> None:
    """Compare what no optimizer changes, before the first step. Arguments and errors: see ``compare_weights``."""
    for key, fixed in zip(("dp", "edp"), part.fixed_apart(), strict=True):
        if key in seat.groups:
            seat.compare((key,), [digest(fixed)])
