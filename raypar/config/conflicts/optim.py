"""Rules of the precision and the optimizer: dtypes, its groups of weights, and the average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from raypar.actors.models.skeleton import Skeleton, with_its_names
from raypar.actors.optim.groups import Rule, is_matrix, is_named, optimizer_patterns, rule_of
from raypar.actors.specs.model import GPT, Layers, Transformer
from raypar.actors.specs.optim import Muon
from raypar.config.conflicts.named_settings import CONTEXT, EMA, GRID, OWN_LAYERS, SERVERS, TENSOR, TILES
from raypar.config.conflicts.parallel import multiples_near
from raypar.config.fields import short_repr
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting

if TYPE_CHECKING:
    from torch import Tensor
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.precision import FP8_MULTIPLE, FP16_SMALLEST, WITHOUT_FP8


def _group_faults(examined: Examined) -> Iterator[str]:
    """Yield the faults of patterns of names, and of the matrices that they leave to Muon, each with its fix.

    Without a pattern or Muon nothing is built, and torch is not imported. If sizes of a model are wrong, only names are
    compared.
    """
    examined.demand("optim", "model")
    optim, model = examined.run.optim, examined.run.model
    if not isinstance(optim, Muon) and not any(optimizer_patterns(optim)):
        return
    skeleton = examined.skeleton
    if isinstance(model, Transformer) and any(model.faults(examined.right)):
        skeleton = Skeleton(with_its_names(model), examined.run.seed)
    weights = skeleton.weights
    # With adapters, tied weights are frozen.
    tied = {copy: owner for copy, owner in skeleton.originals.items() if owner in weights}
    named = [*weights, *tied]
    usual = Muon().adamw if isinstance(optim, Muon) and optim.adamw == Muon().adamw else ()
    if isinstance(model, Layers) and usual and not any(is_named(name, usual) for name in named):
        layers = skeleton.model.names
        fix = f"give optim.adamw ('{layers[0]}.*', '{layers[-1]}.*'), say, or () if Muon is to update all matrices"
        yield f"optim.adamw: your own Layers don't say which weights are the embedding and the head: {fix}"
    for field, pattern in optimizer_patterns(optim):
        if pattern in usual and field == "adamw":
            continue  # adapters leave the embedding and the head frozen; of own layers they are asked for above
        if not any(is_named(name, [pattern]) for name in named):
            fix = f"leave it out, or use {_nearest_patterns(pattern, named)}"
            yield f"optim.{field}: {short_repr(pattern)} names no weight that is trained: {fix}"
    rules = {name: rule_of(optim, name, weight.dim()) for name, weight in weights.items()}
    for copy, owner in tied.items():
        other = rule_of(optim, copy, weights[owner].dim())
        if other != rules[owner]:
            what = f"{owner} and {copy} are one tied weight, but {_differs(rules[owner], other)}"
            yield f"optim: {what}: name both, or none"
    if isinstance(optim, Muon):
        matrices = {name: weight for name, weight in weights.items() if is_matrix(optim, name, weight.dim())}
        yield from _matrix_faults(matrices)


def _matrix_faults(matrices: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the reasons why Muon can't update the matrices that are left to it, by logical name."""
    if not matrices:
        yield "optim is a Muon, but no weight of two dims is left to it by optim.adamw: use AdamW, or name fewer"
    if wrong := [name for name, matrix in matrices.items() if not matrix.is_floating_point()]:
        dtype = str(matrices[wrong[0]].dtype).removeprefix("torch.")
        yield f"optim is a Muon, but {wrong[0]} is {dtype}: name it in optim.adamw"


def _differs(owner: Rule, copy: Rule) -> str:
    """Return the first difference of two rules, in words."""
    pairs = zip(("are updated by", "have rates of", "have weight decays of"), owner, copy, strict=True)
    return next(f"{what} {one} and {other}" for what, one, other in pairs if one != other)


def _nearest_patterns(pattern: str, names: list[str]) -> str:
    """Suggest patterns: of all first parts, of all last parts, and names."""
    from raypar.actors.models.module_tree import names_near  # imports torch

    ends = [f"{name.partition('.')[0]}.*" for name in names], [f"*.{name.rpartition('.')[2]}" for name in names]
    return names_near(pattern, [*ends[0], *ends[1], *names])


_HARDLY_MOVES = "but {other}, in which an average hardly moves"
_ROUGH = RunSetting("precision.master", lambda kind: kind != "fp32", undo="set precision.master to 'fp32'")
AVERAGE_RULES: tuple[RunRule, ...] = (
    Conflict(EMA, SERVERS, "but {other}, whose servers keep no averages"),
    Conflict(EMA, _ROUGH, _HARDLY_MOVES),
)
OPTIMIZER_RULES: tuple[RunRule, ...] = (lambda examined: examined.run.optim.faults(examined.right), _group_faults)


def _dtype_faults(examined: Examined) -> Iterator[str]:
    """Yield the faults of the dtypes and of the loss scale by themselves."""
    run = examined.run
    yield from run.precision.faults()
    yield from run.loss_scale.faults(run.precision)


def _eps_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if the optimizer's states are fp16, in which its eps is 0."""
    run = examined.run
    eps = {AdamW: "eps", Muon: "adamw_eps"}.get(type(run.optim), "")
    value, is_all_fp16 = getattr(run.optim, eps, 1.0), run.precision.master == run.precision.layers == "fp16"
    if is_all_fp16 and value <= FP16_SMALLEST / 2:
        yield (
            f"optim.{eps} {value:g} is 0 in fp16, so an update could be infinite: set precision.master to fp32, or "
            f"optim.{eps} to 1e-4"
        )


def _fp8_size_faults(examined: Examined) -> Iterator[str]:
    """Yield the sizes of linear layers, on each actor of tp, that products in fp8 do not take."""
    run, model = examined.run, examined.run.model
    if run.precision.compute != "fp8" or not isinstance(model, Transformer) or run.mesh.grid is not None:
        return
    examined.demand("model", "mesh")
    tp, moe = math.lcm(*run.mesh.rank_tp or (run.mesh.tensor_ranks,)), model.moe
    each = FP8_MULTIPLE * tp
    is_gpt = isinstance(model, GPT)  # the width of its MLPs is a multiple of hidden
    if model.hidden % FP8_MULTIPLE:
        yield _fp8_fault("model.hidden", model.hidden, each if is_gpt else FP8_MULTIPLE)
    heads = {"heads": model.heads, "kv_heads": model.num_kv_heads}
    for field, count in heads.items():
        own = count // tp if count % tp == 0 else 1  # of keys and values that tp does not divide, an actor has one head
        if own * model.head_size % FP8_MULTIPLE:
            what = f"{own} x {model.head_size} outputs of model.{field} on an actor"
            yield f"precision.compute is 'fp8', which takes multiples of {FP8_MULTIPLE}, but not {what}: {_HEADS}"
            break
    has_mlps = moe is None or moe.width is None or moe.residual or not all(map(model.num_experts, range(model.layers)))
    if has_mlps and model.mlp_width % each and not (is_gpt and model.hidden % FP8_MULTIPLE):
        field, size = ("hidden", model.hidden) if is_gpt else ("ffn", model.mlp_width)
        yield _fp8_fault(f"model.{field}", size, each)
    if moe is not None and moe.width is not None and moe.width % each:
        yield _fp8_fault("model.moe.width", moe.width, each)


def _fp8_fault(field: str, size: int, each: int) -> str:
    ways = f" x tp {each // FP8_MULTIPLE}" if each > FP8_MULTIPLE else ""
    what = f"precision.compute is 'fp8', whose products take multiples of {FP8_MULTIPLE}{ways}, but {field} is {size}"
    return f"{what}: set it to {multiples_near(size, each)}, or precision.compute to 'bf16'"


_HEADS = f"set model.head_width to a multiple of {FP8_MULTIPLE}, or precision.compute to 'bf16'"
_FP8_EXPERTS = RunSetting(
    "run",
    lambda run: run.precision.compute == "fp8" and getattr(run.model, "moe", None) is not None,
    "model.moe is given, and precision.compute is 'fp8'",
    "set precision.compute to 'bf16'",
)
_ROUTED = "but {other}, whose other roundings in fp8 change which experts tokens choose"
_FP8 = RunSetting("precision.compute", "fp8", undo="set precision.compute to 'bf16'")
_OLD_CARDS = RunSetting("resources.accelerator_type", lambda kind: kind in WITHOUT_FP8)
_HALF = RunSetting("precision.is_half", said="precision.compute is {run.precision.compute!r}")
_SKIPS = RunSetting(
    "run",
    lambda run: run.counts_skips and not run.precision.is_half,
    "nonfinite is {run.nonfinite!r}, and loss_scale.use {run.loss_scale.use!r}",
)
_REWINDS = RunSetting("nonfinite", "rewind")
_UNSAVED = RunSetting(
    "run", lambda run: run.folder is None or not run.save_every, "no checkpoints are saved on the way"
)
PRECISION_RULES: tuple[RunRule, ...] = (
    _dtype_faults,
    Conflict(_HALF, SERVERS, "but parameter servers hold fp32 weights only", SERVERS.undo),
    Conflict(_SKIPS, SERVERS, "but parameter servers do not skip steps", SERVERS.undo),
    _eps_faults,
    Conflict(_FP8, OWN_LAYERS, "but raypar does not know which of your own linear layers make logits"),
    Conflict(_FP8, GRID, "but {other}, whose blocks of matrices are multiplied in bf16"),
    Conflict(_FP8_EXPERTS, TENSOR, _ROUTED),
    Conflict(_FP8_EXPERTS, CONTEXT, _ROUTED),
    Conflict(_FP8, TILES, "but {other}, and tiles are multiplied in bf16"),
    Conflict(_FP8, _OLD_CARDS, "but {other}, which does not multiply fp8", "take H100, say, or compute in bf16"),
    _fp8_size_faults,
    Conflict(_REWINDS, _UNSAVED, fix="give folder and save_every"),
)
