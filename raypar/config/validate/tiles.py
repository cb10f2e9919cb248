"""Check that the linear layers of a run can be cut into the tiles that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.tile_names import tile_count, tile_patterns
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.config.validate.model import divisors_near


def tile_faults(run: Run, skeleton: Skeleton, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why linear layers can't be cut, each with its fix.

    Args:
        run: A run whose tile and model are valid.
        skeleton: The skeleton of its model.
        right: Called with paths of the run's fields, returns whether these have valid values by themselves.
    """
    patterns = tile_patterns(run.model, run.tile)
    if all(count == 1 for count in patterns.values()):
        return
    if right("mesh") and run.mesh.ways("tp") > 1:
        tp = f"mesh.rank_tp is {run.mesh.rank_tp}" if run.mesh.rank_tp else f"mesh.tp is {run.mesh.tp!r}"
        yield f"tile is {run.tile!r}, but {tp}, which divides the same layers: set tile to 1, or leave the other out"
    if right("data_parallel") and run.data_parallel == "parameter_server":
        yield f"tile is {run.tile!r}, but data_parallel is 'parameter_server', whose servers are not told: set it to 1"
    if isinstance(run.model, Transformer) and run.model.moe is not None:
        yield f"tile is {run.tile!r}, but the model has experts, whose matrices are not cut: set it to 1"
        return
    from raypar.actors.models.module_tree import names_near, starred  # imports torch
    from raypar.actors.models.tiled import linears_of
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
    told = set[tuple[str, int, bool, bool]]()  # layers of the same name but for numbers, which have the same faults
    for path, linear in found.items():
        whole = right("optim") and isinstance(run.optim, Muon) and is_matrix(run.optim, f"{path}.weight", 2)
        count, alike = tile_count(patterns, path), (starred(path), linear.out_features, path in tied, whole)
        if count == 1 or alike in told:
            continue
        told.add(alike)
        if linear.out_features % count:
            near = divisors_near(count, linear.out_features)
            yield f"tile cuts {path} into {count}, which does not divide its {linear.out_features} outputs: use {near}"
        if path in tied:
            others = {"blocks.*.mlp.*": count} if isinstance(run.model, Transformer) else "{pattern: tiles}"
            yield f"tile cuts {path}, but its weight is tied with another layer's: leave it out, set tile to {others}"
        if whole:
            yield f"tile cuts {path}, whose matrix Muon updates as a whole: name it in optim.adamw, or leave it out"
