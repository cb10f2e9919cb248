"""Check that the experts of a model can be divided over the actors of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.conflicts.named_settings import EP, EXPERT_ACTORS, GRID, OWN_LAYERS, SERVERS, TILES
from raypar.config.conflicts.parallel import multiples_near
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting, several


def _part_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why ``mesh.ep`` or ``mesh.expert_actors`` cannot divide a run's experts."""
    run, skeleton, mesh = examined.run, examined.skeleton, examined.run.mesh
    own = isinstance(run.model, Layers)
    if not mesh.divides_experts:
        return
    field, parts = ("mesh.expert_actors", mesh.expert_actors) if mesh.expert_actors else ("mesh.ep", mesh.ep)
    off = f"set {field} to {0 if mesh.expert_actors else 1}"
    counts = _counts(run, skeleton)
    if not counts:
        fix = 'name their list in the plan, {"layers.*.experts": "expert"}, say' if own else "give model.moe"
        yield f"{field} is {parts}, but the model has no experts to divide: {fix}, or {off}"
    for count in sorted(count for count in counts if count % parts):
        fewer = max(few for few in range(1, parts + 1) if count % few == 0)
        near = multiples_near(count, parts)
        moe = None if isinstance(run.model, Layers) else run.model.moe
        is_one_number = moe is not None and isinstance(moe.experts, int)
        fit = f"set model.moe.experts to {near}" if is_one_number else f"use {near} experts"
        fix = f"{fit}, or set {field} to {fewer}"
        yield f"{field} {parts} does not divide the {count} experts of a layer: {fix}"
    fewest = min((count // parts for count in counts if count % parts == 0), default=run.expert_rounds)
    if run.expert_rounds > fewest:
        few = f"an actor has {fewest} of a layer's experts, and each round needs one"
        yield f"expert_rounds is {run.expert_rounds}, but {few}: set it to {fewest}{' or less' if fewest > 1 else ''}"
    shared = _shared(skeleton) if own else set[int]()
    for name, experts in skeleton.model.expert_lists.items() if own else ():
        if any(id(parameter) in shared for parameter in experts.parameters()):
            yield f"{field} is {parts}, but experts of {name} share a weight: give each one its own, or {off}"
        if any(True for _ in experts.buffers()):
            why = "which checkpoints have by replica, and not by expert"
            yield f"{field} is {parts}, but the experts of {name} have buffers, {why}: make them parameters, or {off}"


def _joint_faults(examined: Examined) -> Iterator[str]:
    """Yield why the load-balancing loss can't be joint over all layers."""
    model, pp = examined.run.model, examined.run.mesh.pp
    if isinstance(model, Layers) or (moe := model.moe) is None or moe.loss != "joint":
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


def idle_expert_faults(examined: Examined) -> Iterator[str]:
    """Yield the pipeline ranks whose expert actors would have no experts.

    Args:
        examined: A run whose layers fit its schedule.
    """
    run, skeleton, placement = examined.run, examined.skeleton, examined.train.placement
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


def _shadow_faults(examined: Examined) -> Iterator[str]:
    """Yield the lists of own experts that can't be shadowed."""
    if examined.run.expert_shadows and isinstance(examined.run.model, Layers):
        for name in examined.skeleton.model.unlike_experts():
            fix = "build them alike, with weights only, or set it to 0"
            yield f"expert_shadows: the experts of {name} have other shapes than one another, or buffers: {fix}"


def _order_faults(examined: Examined) -> Iterator[str]:
    """Yield the orders of experts that are no permutation, or name no list of experts."""
    run, skeleton = examined.run, examined.skeleton
    if not run.expert_order or not _are_counted(run):
        return
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


def _are_counted(run: Run) -> bool:
    """Return whether the number of experts of each block is known. If not, the model's faults report it."""
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


_WHOLE = RunSetting("run", lambda run: not run.mesh.divides_experts, "mesh.ep is 1, so no token travels")
_SHADOWS = RunSetting("expert_shadows", undo="set expert_shadows to 0")
_ROUNDS = RunSetting("expert_rounds", several, undo="set expert_rounds to 1")
_ORDER = RunSetting("expert_order", said="expert_order is given")
_APART = RunSetting("run", lambda run: run.mesh.divides_experts and run.mesh.tp != 1, "mesh.tp is {run.mesh.tp}")
_DIVIDED = (EP, EXPERT_ACTORS)
_HYBRID_EXPERTS = "experts on several actors with hybrid sharding"
NOT_YET: Mapping[str, str] = {_HYBRID_EXPERTS: "actors/expert_parallel/"}  # missing features by their future folder
_LATER = f"raypar has no {_HYBRID_EXPERTS} yet ({NOT_YET[_HYBRID_EXPERTS]})"
_HYBRID = RunSetting(
    "run",
    lambda run: (run.mesh.shard or 1 << 62) < run.mesh.dp * run.mesh.cp,
    "mesh.shard is {run.mesh.shard}",
    "leave mesh.shard out",
)
EXPERT_RULES: tuple[RunRule, ...] = (
    Conflict(EXPERT_ACTORS, EP, "and {other}, but experts are on actors of their own or on ranks"),
    *(Conflict(each, GRID, "but a grid of tensor ranks has no experts", "give mesh.tp a number") for each in _DIVIDED),
    *(Conflict(_HYBRID, each, f"and {{other}}: {_LATER}") for each in _DIVIDED),
    _joint_faults,
    Conflict(_SHADOWS, _WHOLE, fix=_SHADOWS.undo),
    Conflict(_SHADOWS, EXPERT_ACTORS, "but expert actors have no tokens to keep", _SHADOWS.undo),
    Conflict(_SHADOWS, TILES, "but experts in tiles are never whole on other actors"),
    _shadow_faults,
    Conflict(_ROUNDS, _WHOLE, fix=_ROUNDS.undo),
    Conflict(_ROUNDS, _SHADOWS, "and {other}, but shadows are for tokens that travel at once"),
    _order_faults,
    Conflict(_ORDER, _WHOLE, fix="leave it out"),
    _part_faults,
    *(Conflict(each, SERVERS, "but servers hold all weights of a replica", SERVERS.undo) for each in _DIVIDED),
    Conflict(OWN_LAYERS, _APART, "and {other}, but experts of your own layers need mesh.tp 1", "leave mesh.tp out"),
)
