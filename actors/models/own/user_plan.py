"""A user's plan of tensor parallelism: translate it to parallel styles, and find its faults.

A plan maps patterns of module names to kinds such as "column" and "row".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise

from torch import nn

from raypar.actors.autograd.torch_private import has_gradient_hooks
from raypar.actors.models.base import TensorPlan
from raypar.actors.models.module_tree import matches_pattern, modules_named, names_near
from raypar.actors.models.own.plan_kinds import KINDS, PlanKind, kind_of
from raypar.actors.models.placed_step import FEATURES
from raypar.schedules.nearest_name import nearest

_TRIED = 60  # plans that are tried for a message
_WHOLE = ("column_gather_output", "row_split_input", "embedding")  # kinds that take and return whole values


def tensor_plan_of(plan: Mapping[str, str]) -> TensorPlan:
    """Translate a plan to pairs of a name pattern and a kind of parallel style, in the order of application.

    Args:
        plan: The kind for each name pattern. Unknown kinds are left out; ``plan_faults`` reports them.
    """
    kinds = ((pattern, kind_of(text)) for pattern, text in plan.items())
    return tuple((pattern, step) for pattern, kind in kinds if kind is not None for step in kind.steps)


def plan_faults(plan: Mapping[str, str], layers: Mapping[str, nn.Module], tp: int) -> Iterator[str]:
    """Yield the faults of a plan, each with its fix.

    Args:
        plan: The kind for each name pattern.
        layers: The model's layers by logical name, without memory (on the meta device).
        tp: Number of tensor-parallel ranks.
    """
    whole = nn.ModuleDict({layer.rpartition(".")[2]: module for layer, module in layers.items()})
    known: dict[str, str] = {}  # kind of each module, by its first name
    for pattern, kind in plan.items():
        if kind_of(kind) is None:
            yield f"model.plan: {pattern!r} is {kind!r}, which is no kind: use {_near(kind)}"
            continue
        chosen = {f"layers.{inner}": module for inner, module in modules_named(whole, "layers", pattern)}
        if not chosen:
            every = whole.named_modules(prefix="layers", remove_duplicate=False)
            near = names_near(pattern, (name for name, _ in every if name != "layers"))
            yield f"model.plan: {pattern!r} names no module: use {near}"
        others = {name: fault for name, module in chosen.items() if (fault := unfit(kind, name, module))}
        if others:
            name, fault = next(iter(others.items()))
            yield f"model.plan: {pattern!r} is {kind!r}, but {name} {fault}"
        if twice := [name for name in chosen if name in known]:
            yield f"model.plan: {pattern!r} names {twice[0]}, which another pattern names, too: change one of them"
        known |= {name: kind for name in chosen if name not in known and name not in others}
    for name in [name for name, kind in known.items() if _sums(kind)]:
        if inside := [other for other in known if other.startswith(f"{name}.")]:
            kind = known[inside[0]]
            yield f"model.plan: {name} is {known[name]!r}, but {inside[0]} in it is {kind!r}: name what is beside it"
    yield from _name_faults(plan, known, whole)
    kinds = {whole.get_submodule(name.removeprefix("layers.")): kind for name, kind in known.items()}
    yield from _size_faults(known, whole, tp)
    yield from _tie_faults(kinds, whole)


def plan_to_give(layers: Mapping[str, nn.Module], tp: int) -> str:
    """Suggest a plan that divides some of the user's modules, or say that no plan can divide any.

    Args:
        layers: The model's layers by logical name, without memory (on the meta device).
        tp: Number of tensor-parallel ranks.
    """
    every = chain.from_iterable(module.named_modules(prefix=layer) for layer, module in layers.items())
    parts = [(name, module) for name, module in every if module._parameters]
    for plan in islice(_candidates(parts), _TRIED):
        if not any(plan_faults(plan, layers, tp)):
            return f"give Layers(plan={json.dumps(plan)}), say, or set it to 1"
    return f"a plan divides modules of type nn.Linear and nn.Embedding, and none of yours by {tp}: set it to 1"


def _candidates(parts: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, str]]:
    """Yield plans for modules with weights: for MLPs first, then for single modules, whose outputs stay whole."""
    for (up, first), (down, second) in pairwise(parts):
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear) and up.split(".")[1] == down.split(".")[1]:
            outer, inner = first.in_features, first.out_features
            if outer != inner and (inner, outer) == (second.in_features, second.out_features):
                yield {up: "column", down: "row"}
    for name, module in parts:
        yield from ({name: kind} for kind in _WHOLE if unfit(kind, name, module) is None)


def _name_faults(plan: Mapping[str, str], known: Mapping[str, str], whole: nn.Module) -> Iterator[str]:
    """Yield the modules that several layers share, and that a plan names in only some of them.

    An actor that has only one of the layers knows the module by that layer's name alone.

    Args:
        plan: The kind for each name pattern.
        known: The kind of each module, by its first name.
        whole: All layers.
    """
    first = {whole.get_submodule(name.removeprefix("layers.")): name for name in known}
    every = whole.named_modules(prefix="layers", remove_duplicate=False)
    shared = [(path, first[module]) for path, module in every if module in first and path != first[module]]
    for path, name in shared:
        named = any(kind == known[name] and matches_pattern(path, pattern) for pattern, kind in plan.items())
        if path.split(".")[1] != name.split(".")[1] and not named:
            yield f"model.plan: {name} is {known[name]!r}, and it is {path}, too: name it there as well"


def embedding_faults(layers: Mapping[str, nn.Module], *, alone: bool) -> Iterator[str]:
    """Yield the options of embeddings that raypar can't support, each with its fix.

    Args:
        layers: The model's layers by logical name.
        alone: Whether every layer is on one actor only; else other actors hold copies or parts of it.
    """
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name):
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if module.sparse:
                yield f"{path} has sparse gradients, which are not added up and clipped as others are: leave it out"
            if module.max_norm is not None and not alone:
                yield f"{path} has max_norm, which changes the weights of one actor alone: leave it out"


def unfit(kind: str, name: str, module: nn.Module) -> str | None:
    """Return why a kind can't be applied to a module, with the fix; None if it can.

    Args:
        kind: A valid kind.
        name: Logical name of the module.
        module: The module.
    """
    wanted = _known(kind).strategy.of
    if wanted is nn.Module:
        return None
    if type(module) is not wanted:
        return f"is a {type(module).__name__}: name an nn.{wanted.__name__}, inside of it perhaps"
    if "_orig_mod" in name.split("."):
        return "is inside of what torch.compile made, which keeps the whole module: compile nothing that the plan names"
    inside = wanted is not nn.ModuleList  # a list is divided by whole modules
    if extra := {parameter for parameter, _ in module.named_parameters(recurse=inside)} - {"weight", "bias"}:
        return f"has the parameter {min(extra)!r}: leave it out of the plan"
    if has_gradient_hooks(module) or any(map(has_gradient_hooks, module.parameters())):
        return "has hooks on gradients, of which each actor would see a part: leave it out of the plan, or the hooks"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        what = "which counts ids that other actors have"
        return f"has scale_grad_by_freq, {what}: leave it out of the plan, or that out of the embedding"
    return None


def _size_faults(known: Mapping[str, str], whole: nn.Module, tp: int) -> Iterator[str]:
    """Yield the modules that are too small for ``tp`` ranks, or that must be divided equally and can't be.

    Args:
        known: The kind of each module, by its first name.
        whole: All layers.
        tp: Number of tensor-parallel ranks.
    """
    dropping = "dropout" in known.values()
    for name, text in known.items():
        kind = _known(text)
        if not (attribute := kind.strategy.size):
            continue
        module = whole.get_submodule(name.removeprefix("layers."))
        size = int(getattr(module, attribute))
        if size < tp:
            fix = f"set it to {size} at most, or leave it out of the plan"
            yield f"mesh.tp is {tp}, but {name} has {attribute} {size}: {fix}"
        elif kind.name == "column" and dropping and size % tp:
            yield _unequal(name, attribute, size, tp, "the plan has dropout of equal parts")
        else:
            yield from _part_faults(name, module, kind, tp)


def _part_faults(name: str, module: nn.Module, kind: PlanKind, tp: int) -> Iterator[str]:
    """Yield why the input or output of a linear layer can't be gathered or split into equal parts.

    Args:
        name: Its name.
        module: The layer.
        kind: Its kind in the plan.
        tp: Number of tensor-parallel ranks.
    """
    if not isinstance(module, nn.Linear):
        return
    inputs, outputs, column = module.in_features, module.out_features, kind.name == "column"
    if column and kind.given == FEATURES and inputs % tp:
        fix = "let what makes them be 'column_gather_output', and this one 'column'"
        yield f"mesh.tp {tp} does not divide {name}'s in_features {inputs}, of which an actor gets a part: {fix}"
    if not column and kind.given != FEATURES and inputs % tp:
        yield _unequal(name, "in_features", inputs, tp, "its input is split into equal parts")
    if column and kind.made != FEATURES and outputs % tp:
        yield _unequal(name, "out_features", outputs, tp, "its outputs are gathered")
    if not column and kind.made == FEATURES and outputs % tp:
        yield _unequal(name, "out_features", outputs, tp, "its outputs are split into equal parts")


def _unequal(name: str, attribute: str, size: int, tp: int, reason: str) -> str:
    fix = f"use {size // tp * tp} or {size // tp * tp + tp}, or leave it out of the plan"
    return f"mesh.tp {tp} does not divide {name}'s {attribute} {size}, and {reason}: {fix}"


def _tie_faults(kinds: Mapping[nn.Module, str], whole: nn.Module) -> Iterator[str]:
    """Yield the tied weights that the plan treats differently in different modules.

    Args:
        kinds: The kind of each module that the plan names.
        whole: All layers.
    """
    shared = {part for module, kind in kinds.items() if _sums(kind) for part in module.modules()}
    first: dict[nn.Parameter, tuple[str, str]] = {}
    for path, module in whole.named_modules(prefix="layers"):
        dims = _known(kinds[module]).strategy.dims if module in kinds else {}
        for inner, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, how = f"{path}.{inner}", "shared" if module in shared else "not divided"
            how = f"divided along dim {dims[inner]}" if inner in dims else how
            original, before = first.setdefault(parameter, (name, how))
            if how != before:
                yield (
                    f"model.plan: {original} and {name} are one weight, but it is {before} and {how}: divide both "
                    "alike, an embedding by ids and a linear layer by columns, say"
                )


def _known(text: str) -> PlanKind:
    """Return a kind that is known to be valid."""
    kind = kind_of(text)
    assert kind is not None
    return kind


def _sums(text: str) -> bool:
    """Return whether a kind sums gradients of whole weights over the actors."""
    return text == "shared" or _known(text).name.startswith("split")


def _near(kind: str) -> str:
    close = nearest(kind, KINDS, cutoff=0.5)
    return repr(close) if close else f"{' or '.join(map(repr, KINDS))}, with ' from R' or ' to S0' after it, say"
