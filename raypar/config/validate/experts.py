"""Check that the experts of a model can be divided over the actors of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run


def expert_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why ``mesh.ep`` or ``mesh.expert_actors`` cannot divide a run's experts.

    Args:
        run: The run.
        skeleton: The model without weights. Of a GPT or Llama it is not built.
        right: Called with paths of fields, returns whether these have valid values by themselves.
    """
    mesh, own = run.mesh, isinstance(run.model, Layers)
    if right("model", "mesh") and isinstance(run.model, Transformer) and run.model.moe is not None:
        yield from _joint_faults(run.model, run.model.moe, mesh.pp)
    if right("expert_shadows", "mesh") and run.expert_shadows:
        yield from _shadow_faults(run, skeleton, right)
    if right("expert_rounds", "expert_shadows", "mesh") and run.expert_rounds > 1:
        yield from _round_faults(run)
    if right("expert_order", "mesh", "model") and run.expert_order and _are_counted(run):
        yield from _order_faults(run, skeleton)
    if not mesh.divides_experts or not right("model" if own else "model.layers", "mesh.tp"):
        return
    field, parts = ("mesh.expert_actors", mesh.expert_actors) if mesh.expert_actors else ("mesh.ep", mesh.ep)
    off = f"set {field} to {0 if mesh.expert_actors else 1}"
    counts = _counts(run, skeleton)
    if not counts:
        fix = 'name their list in the plan, {"layers.*.experts": "expert"}, say' if own else "give model.moe"
        yield f"{field} is {parts}, but the model has no experts to divide: {fix}, or {off}"
    for count in sorted(count for count in counts if count % parts):
        fewer = max(few for few in range(1, parts + 1) if count % few == 0)
        near = " or ".join(str(near) for near in (count // parts * parts, count // parts * parts + parts) if near)
        moe = None if isinstance(run.model, Layers) else run.model.moe
        is_one_number = moe is not None and isinstance(moe.experts, int)
        fit = f"set model.moe.experts to {near}" if is_one_number else f"use {near} experts"
        fix = f"{fit}, or set {field} to {fewer}"
        yield f"{field} {parts} does not divide the {count} experts of a layer: {fix}"
    fewest = min((count // parts for count in counts if count % parts == 0), default=run.expert_rounds)
    if right("expert_rounds") and run.expert_rounds > fewest:
        few = f"an actor has {fewest} of a layer's experts, and each round needs one"
        yield f"expert_rounds is {run.expert_rounds}, but {few}: set it to {fewest}{' or less' if fewest > 1 else ''}"
    if run.data_parallel == "parameter_server":
        yield f"{field} is {parts}, but servers hold all weights of a replica: set data_parallel to 'all_reduce'"
    shared = _shared(skeleton) if own else set[int]()
    for name, experts in skeleton.model.expert_lists.items() if own else ():
        if any(id(parameter) in shared for parameter in experts.parameters()):
            yield f"{field} is {parts}, but experts of {name} share a weight: give each one its own, or {off}"
        if any(True for _ in experts.buffers()):
            why = "which checkpoints have by replica, and not by expert"
            yield f"{field} is {parts}, but the experts of {name} have buffers, {why}: make them parameters, or {off}"
    if own and mesh.tensor_ranks > 1:
        yield f"{field} is {parts}, and mesh.tp {mesh.tp}: experts of your own layers need mesh.tp 1"


def _joint_faults(model: Transformer, moe: MoE, pp: int) -> Iterator[str]:
    """Yield why the loss of experts can't be one over all layers."""
    if moe.loss != "joint":
        return
    if not isinstance(moe.experts, int):
        yield "model.moe.loss is 'joint', but layers have unequal numbers of experts: give one, or use 'switch'"
    if pp > 1:
        alpha = moe.alpha * moe.top_k / max(1, len(moe.blocks(model.layers)))
        fix = f"set it to 'switch', with moe.alpha {alpha:g} for the same strength at an even load, or mesh.pp to 1"
        yield f"model.moe.loss is 'joint', which needs all layers on one actor, but mesh.pp is {pp}: {fix}"


def _shared(skeleton: Skeleton) -> set[int]:
    """Return the ids of the parameters that several modules of a model have."""
    parts = dict.fromkeys(part for layer in skeleton.model.skeleton for part in layer.modules())
    held = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    return {parameter for parameter, times in held.items() if times > 1}


def idle_expert_faults(run: Run, skeleton: Skeleton, placement: Sequence[int]) -> Iterator[str]:
    """Yield the pipeline ranks whose expert actors would have no experts.

    Args:
        run: A run whose mesh and model are valid, whose split fits the schedule.
        skeleton: The model without weights. Of a GPT or Llama it is not built.
        placement: The pipeline rank of each stage.
    """
    if not run.mesh.expert_actors or not _are_counted(run):
        return
    have = {placement[stage] for stage in _stages(run, skeleton, len(placement))}
    for pp in sorted(set(placement) - have if have else ()):
        yield (
            f"mesh.expert_actors is {run.mesh.expert_actors}, but pp={pp} has no layer with experts: give it one with "
            "split or model.moe, or use fewer pipeline ranks"
        )


def _stages(run: Run, skeleton: Skeleton, num_stages: int) -> set[int]:
    """Return the stages that have a layer with experts."""
    if not isinstance(run.model, Layers):
        parts = split_layers(run.split, transformer_costs(run.model), num_stages)
        return {stage for stage, blocks in enumerate(parts) if any(map(run.model.num_experts, blocks))}
    model = skeleton.model
    layers = {max((name for name in model.names if expert.startswith(f"{name}.")), key=len) for expert in model.experts}
    parts = model.stages(run.split, num_stages)
    return {stage for stage, part in enumerate(parts) if any(model.names[index] in layers for index in part)}


def _shadow_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why experts cannot be shadowed."""
    if not run.mesh.divides_experts:
        yield f"expert_shadows is {run.expert_shadows}, but mesh.ep is 1, so no token travels: set it to 0"
    if run.mesh.expert_actors:
        yield f"expert_shadows is {run.expert_shadows}, but expert actors have no tokens to keep: set it to 0"
    if right("tile") and run.tile != 1:
        yield "expert_shadows: experts in tiles are never whole on other actors: set it to 0, or tile to 1"
    if isinstance(run.model, Layers) and right("model"):
        for name in skeleton.model.unlike_experts():
            fix = "build them alike, with weights only, or set it to 0"
            yield f"expert_shadows: the experts of {name} have other shapes than one another, or buffers: {fix}"


def _round_faults(run: Run) -> Iterator[str]:
    """Yield the reasons why tokens cannot travel to experts in rounds."""
    if not run.mesh.divides_experts:
        yield f"expert_rounds is {run.expert_rounds}, but mesh.ep is 1, so no token travels: set it to 1"
    if run.expert_shadows:
        yield (
            f"expert_rounds is {run.expert_rounds}, and expert_shadows {run.expert_shadows}: shadows are for tokens "
            "that travel at once, so set expert_rounds to 1 or expert_shadows to 0"
        )


def _order_faults(run: Run, skeleton: Skeleton) -> Iterator[str]:
    """Yield the orders of experts that are none, or of no list of experts."""
    if isinstance(run.model, Layers):
        lists = {name: len(experts) for name, experts in skeleton.model.expert_lists.items()}
    else:
        lists = {f"blocks.{block}.mlp.experts": run.model.num_experts(block) for block in range(run.model.layers)}
    for name, words in run.expert_order.items():
        if not (count := lists.get(name, 0)):
            known = next((one for one, many in lists.items() if many), "none")
            yield f"expert_order: there are no experts {name!r}: name a list of them, as {known!r}, or leave it out"
        elif sorted(words.split()) != sorted(map(str, range(count))):
            yield f"expert_order: {name!r} is {words!r}: give each of the numbers 0 to {count - 1} once, with blanks"
    if not run.mesh.divides_experts:
        yield "expert_order is of experts that actors divide, and mesh.ep is 1: leave it out"


def _are_counted(run: Run) -> bool:
    """Return whether it is known how many experts each block has. Where it is not, the model's faults say so."""
    if isinstance(run.model, Layers) or run.model.moe is None or isinstance(run.model.moe.experts, int):
        return True
    return len(run.model.moe.experts) == len(run.model.moe.blocks(run.model.layers))


def _counts(run: Run, skeleton: Skeleton) -> set[int]:
    """Return the numbers of experts that layers have."""
    if isinstance(run.model, Layers):
        return {expert.among for expert in skeleton.model.experts.values()}
    moe = run.model.moe
    if moe is None:
        return set()
    return {moe.experts} if isinstance(moe.experts, int) else {*moe.experts}
