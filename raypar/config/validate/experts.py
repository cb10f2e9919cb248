"""Check that the experts of a model can be divided over the actors of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.skeleton import Skeleton


def expert_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why ``mesh.ep`` cannot divide a run's experts.

    Args:
        run: The run.
        skeleton: The model without weights. Of a GPT or Llama it is not built.
        right: Called with paths of fields, returns whether these have valid values by themselves.
    """
    ep, own = run.mesh.ep, isinstance(run.model, Layers)
    if right("expert_shadows", "mesh.ep") and run.expert_shadows:
        yield from _shadow_faults(run, skeleton, right)
    if ep == 1 or not right("model" if own else "model.layers", "mesh.tp"):
        return
    counts = _counts(run, skeleton)
    if not counts:
        fix = 'name their list in the plan, {"layers.*.experts": "expert"}, say' if own else "give model.moe"
        yield f"mesh.ep is {ep}, but the model has no experts to divide: {fix}, or set mesh.ep to 1"
    for count in sorted(count for count in counts if count % ep):
        fewer = max(few for few in range(1, ep + 1) if count % few == 0)
        near = " or ".join(str(near) for near in (count // ep * ep, count // ep * ep + ep) if near)
        fix = f"use {near} experts, or set mesh.ep to {fewer}"
        yield f"mesh.ep {ep} does not divide the {count} experts of a layer: {fix}"
    if run.data_parallel == "parameter_server":
        yield f"mesh.ep is {ep}, but servers hold all weights of a replica: set data_parallel to 'all_reduce'"
    if run.mesh.folds_experts and run.sequence_parallel:
        fix = f"set mesh.etp to {run.mesh.tensor_ranks}, or sequence_parallel to false"
        yield f"sequence_parallel: with mesh.ep {ep} tensor ranks divide the tokens of experts by themselves: {fix}"
    if own and run.mesh.tensor_ranks > 1:
        yield f"mesh.ep is {ep}, and mesh.tp {run.mesh.tp}: experts of your own layers need mesh.tp 1"
    if right("offload") and run.offload != "none":
        yield f"mesh.ep is {ep}, and offload {run.offload!r}: they do not combine yet: set offload to 'none'"


def _shadow_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why experts cannot be shadowed."""
    if run.mesh.ep == 1:
        yield f"expert_shadows is {run.expert_shadows}, but mesh.ep is 1, so no token travels: set it to 0"
    if right("tile") and run.tile != 1:
        yield "expert_shadows: experts in tiles are never whole on other actors: set it to 0, or tile to 1"
    if isinstance(run.model, Layers) and right("model"):
        for name in skeleton.model.unlike_experts():
            fix = "build them alike, with weights only, or set it to 0"
            yield f"expert_shadows: the experts of {name} have other shapes than one another, or buffers: {fix}"


def _counts(run: Run, skeleton: Skeleton) -> set[int]:
    """Return the numbers of experts that layers have."""
    if isinstance(run.model, Layers):
        return {expert.among for expert in skeleton.model.experts.values()}
    moe = run.model.moe
    if moe is None:
        return set()
    return {moe.experts} if isinstance(moe.experts, int) else {*moe.experts}
