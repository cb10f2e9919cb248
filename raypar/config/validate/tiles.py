"""Rules of linear layers that are cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.models.tile_names import tile_count, tile_patterns
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.optim import Muon
from raypar.config.rules import Conflict, Examined, RunRule
from raypar.config.validate.model import divisors_near
from raypar.config.validate.settings import EXPERTS, RANK_TP, SERVERS, TENSOR, TILES


def _cut_faults(examined: Examined) -> Iterator[str]:
    """Yield the linear layers that can't be cut, each with its fix."""
    run, skeleton = examined.run, examined.skeleton
    patterns = tile_patterns(run.model, run.tile)
    if all(count == 1 for count in patterns.values()) or EXPERTS.is_in(examined):
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
