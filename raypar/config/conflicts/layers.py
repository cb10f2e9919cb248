"""Rules of the fields that refer to a model's layers: split, recompute, plans, skips, shared weights and tiles."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from raypar.actors.models.partition import split_faults
from raypar.actors.models.tiles.tile_names import tile_count, tile_patterns
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.recompute import recompute_faults
from raypar.config.conflicts.experts import idle_expert_faults
from raypar.config.conflicts.named_settings import (
    EXPERT_ACTORS,
    EXPERTS,
    HALVES,
    OWN_LAYERS,
    RANK_TP,
    SERVERS,
    TENSOR,
    TILES,
)
from raypar.config.conflicts.parallel import divisors_near
from raypar.config.conflicts.replicas import share_faults, sharing_faults
from raypar.config.conflicts.schedules import unversioned_weight_faults
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting


def _layer_faults(examined: Examined) -> Iterator[str]:
    """Yield the fields that do not fit the layers; if all fit, what does not fit their placement on stages."""
    if examined.num_stages is None:
        return
    fits = True
    for fault in _fields_of_layers(examined, examined.num_stages):
        fits = False
        yield fault
    if fits:
        for rule in (share_faults, idle_expert_faults, sharing_faults, _placement_faults):
            yield from rule(examined)


def _fields_of_layers(examined: Examined, num_stages: int) -> Iterator[str]:
    """Yield the faults of split, recompute and own layers."""
    run, model = examined.run, examined.run.model
    if isinstance(model, Layers):
        examined.demand("model")
        count = yield from _own_faults(examined, model)
    else:
        count = model.layers
    if count is not None:
        yield from split_faults(run.split, count, num_stages, run.mesh.pp)
        yield from recompute_faults(run.recompute, count)


def _own_faults(examined: Examined, model: Layers) -> Generator[str, None, int | None]:
    """Yield the faults of own layers, and return how many there are; None if they can't be built."""
    from torch.nn import Module

    from raypar.actors.models.own.their_layers import TheirLayers
    from raypar.actors.models.own.user_layers import UnfitLayersError
    from raypar.actors.models.own.user_plan import embedding_faults, plan_faults  # imports torch
    from raypar.actors.models.skip_connections import skip_faults
    from raypar.config.conflicts.batches import loss_faults, user_function_failure
    from raypar.config.conflicts.transformers_modules import their_plan_faults
    from raypar.config.trial.distributed import shared_norm_faults

    run, skeleton = examined.run, examined.whole
    yield from loss_faults(model)
    if isinstance(model.fn, Module):
        kind, fix = type(model.fn).__name__, "give a function that returns a list of modules, lambda: [...]"
        yield f"model.fn is a module, {kind}: {fix}"
        return None
    try:
        count, layers = len(skeleton.model.body), skeleton.layers
    except UnfitLayersError as error:
        yield from str(error).splitlines()
        return None
    except Exception as error:
        yield user_function_failure("model.fn", error)
        return None
    copied = max(run.mesh.ways("dp"), run.mesh.ways("tp")) > 1
    yield from embedding_faults(layers, alone=not copied and run.data_parallel != "parameter_server")
    if run.mesh.ways("dp") > 1:
        yield from shared_norm_faults(run, layers)
    if isinstance(model.fn, TheirLayers):
        yield from their_plan_faults(model, layers, run.mesh.tensor_ranks)
    else:
        yield from plan_faults(model.plan, layers, run.mesh.tensor_ranks)
    yield from skip_faults(model.skips, count)
    return count


def _placement_faults(examined: Examined) -> Iterator[str]:
    """Yield the weights of the user's layers that layers on other actors use without registering them."""
    run, schedule = examined.run, examined.train
    if not isinstance(run.model, Layers) or (schedule.num_ranks == 1 and not schedule.stream):
        return
    from raypar.actors.models.init.unregistered import borrowed  # imports torch
    from raypar.actors.worker.build.weight_owners import ranks_of_layers

    model = examined.skeleton.model
    ranks, names = ranks_of_layers(model, run.split, schedule), model.names
    yield from unversioned_weight_faults(examined.skeleton, schedule, ranks)
    for layer, owner, name in borrowed(model.skeleton):
        if ranks[layer] != ranks[owner]:
            where = f"they are on different actors, pp={ranks[layer]} and pp={ranks[owner]}"
            yield (
                f"model: {names[layer]} uses {names[owner]}.{name} without registering it, and {where}: make the "
                f"module or the parameter an attribute of {names[layer]} (then it is one tied weight), or give "
                "both to one stage with split"
            )


_NOT_SPLIT = RunSetting(
    "run", lambda run: isinstance(run.model, Layers) and not run.model.halves, "your own Layers are not to be split"
)
_HALVES = "give Layers(halves=True), or let backward be auto or whole"
_CORES = "but raypar does not know which of your own layers attend"
_SELECTIVE = RunSetting("recompute", lambda words: "selective" in ((words,) if isinstance(words, str) else words))
LAYER_RULES: tuple[RunRule, ...] = (
    _layer_faults,
    Conflict(_SELECTIVE, OWN_LAYERS, _CORES, "use 'full' or 'none'"),
    Conflict(
        RunSetting("model.skips", said="model.skips has skips"),
        EXPERT_ACTORS,
        "which expert actors have no part in",
        EXPERT_ACTORS.undo,
    ),
    Conflict(HALVES, _NOT_SPLIT, fix=_HALVES),
)


def _cut_faults(examined: Examined) -> Iterator[str]:
    """Yield the linear layers that can't be cut, each with its fix."""
    run, skeleton = examined.run, examined.skeleton
    patterns = tile_patterns(run.model, run.tile)
    if all(count == 1 for count in patterns.values()) or EXPERTS.is_in(examined):
        return
    from raypar.actors.models.module_tree import names_near, starred  # imports torch
    from raypar.actors.models.tiles.tiled import linears_of
    from raypar.actors.optim.groups import is_matrix

    model = skeleton.model
    found = {
        path: linear
        for name, module in zip(model.names, model.skeleton, strict=True)
        for path, linear in linears_of(name, module)
    }
    tied = {name.rpartition(".")[0] for pair in model.ties for name in pair}
    if not found:
        yield f"tile is {run.tile!r}, but the model has no nn.Linear that is trained: leave it out"
        return
    for pattern in patterns:
        if not any(tile_count({pattern: 2}, path) > 1 for path in found):
            yield f"tile: {pattern!r} matches no nn.Linear that is trained: did you mean {names_near(pattern, found)}?"
    reported = set[tuple[str, int, bool, bool]]()  # layers of the same name but for numbers, which have the same faults
    for path, linear in found.items():
        whole = isinstance(run.optim, Muon) and is_matrix(run.optim, f"{path}.weight", 2)
        count, alike = tile_count(patterns, path), (starred(path), linear.out_features, path in tied, whole)
        if count == 1 or alike in reported:
            continue
        reported.add(alike)
        if linear.out_features % count:
            near = divisors_near(count, linear.out_features)
            yield f"tile cuts {path} into {count}, which does not divide its {linear.out_features} outputs: use {near}"
        if path in tied:
            others = {"blocks.*.mlp.*": count} if isinstance(run.model, Transformer) else "{pattern: tiles}"
            yield f"tile cuts {path}, but its weight is tied with another layer's: leave it out, set tile to {others}"
        if whole:
            yield f"tile cuts {path}, whose matrix Muon updates as a whole: name it in optim.adamw, or leave it out"


_ALSO = "but {other}, which divides the same layers"
TILE_RULES: tuple[RunRule, ...] = (
    Conflict(TILES, TENSOR, _ALSO),
    Conflict(TILES, RANK_TP, "but {other} is {run.mesh.rank_tp}, which divides the same layers"),
    Conflict(TILES, SERVERS, "but {other}, whose servers do not know tiles"),
    Conflict(TILES, EXPERTS, "but the model has experts, whose matrices are not cut"),
    _cut_faults,
)
