"""How long a launch takes to draw a model's random initial values, and to send them to all that hold parts of them."""

from __future__ import annotations

from raypar.actors.specs.model import Layers, Transformer
from raypar.planner.sizes.sized_run import SizedRun

DRAW = 4.3e-9  # seconds that one core takes to draw a normal value: docs/decisions/data_parallel.md, 2026-11-30
_FP32 = 4


def initial_seconds(sized: SizedRun, rate: float) -> float:
    """Return the seconds in which actors draw the initial values and send them to each other, before the first step.

    Each of N actors that hold parts of the same tensors draws 1/N of their values. It then receives its slices of what
    the others of its tensor group draw, and what other replicas draw of its slices: all of it, or its spans alone where
    replicas keep no more. Constants count as if they were drawn, and tensors as if all were small.

    Args:
        sized: The run.
        rate: Bytes/s that an actor receives from the others.

    Returns:
        The seconds of the pipeline rank that takes longest; 0 if the values are read from a folder.
    """
    run, world, counts, _ = sized
    if isinstance(run.model, Transformer | Layers) and run.model.hf is not None:
        return 0.0
    none = [0] * len(counts.held)
    found = []
    for pp, (held, experts, frozen) in enumerate(
        zip(counts.held, counts.experts or none, counts.frozen or none, strict=True)
    ):
        replicas = world.replicas_at(pp) if world.sharded else 1
        of_experts = world.expert_replicas if world.sharded and world.experts is not None else 1
        is_divided = world.experts is not None and world.mesh.expert_ranks == 1
        alike = held + frozen - experts, world.mesh.tp_of(pp), replicas, held - experts
        apart = experts, 1 if is_divided else world.mesh.tp_of(pp), of_experts, experts
        seconds = 0.0
        for count, tensor_ranks, members, trained in (alike, apart):
            drawn = count / members  # this actor's share: count x tensor_ranks values of tensor_ranks x members actors
            slices = drawn * (tensor_ranks - 1) / tensor_ranks
            whole = count - trained if world.cuts and world.gathers else count
            spans = (count - whole) / members
            received = slices + (whole + spans) * (members - 1) / members
            seconds += drawn * DRAW + _FP32 * received / rate
        found.append(seconds)
    return max(found)
