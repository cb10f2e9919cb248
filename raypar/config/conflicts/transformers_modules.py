"""Check that the tensor-parallel plan of a type of transformers fits its modules. Imports torch.

A declared plan is for the largest models of its type, and not tested with each config, so it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from raypar.actors.models.module_tree import modules_named
from raypar.actors.models.own.plan_kinds import kind_of
from raypar.actors.models.own.their_layers import TheirLayers, config_object
from raypar.actors.models.own.user_plan import plan_faults, unfit
from raypar.actors.models.placed_step import FEATURES
from raypar.actors.specs.model import Layers

_MOST_NAMED = 3  # modules that are named for each kind of fault
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def their_plan_faults(model: Layers, layers: Mapping[str, nn.Module], tp: int) -> Iterator[str]:
    """Yield why tensor ranks can't divide a model of the modules of transformers, each with its cause.

    Without tensor ranks nothing is divided, and the plan does not matter.

    Args:
        model: The model, of which ``fn`` is one of TheirLayers.
        layers: Its layers by logical name, without memory (on the meta device).
        tp: Number of tensor-parallel ranks.
    """
    if tp == 1:
        return
    assert isinstance(model.fn, TheirLayers)
    config = config_object(json.loads(model.fn.config))
    what = f"mesh.tp is {tp}, and the base_model_tp_plan that transformers declares for {config.model_type!r}"
    chosen = {pattern: _chosen(layers, pattern) for pattern in model.plan}
    absent = [pattern for pattern, modules in chosen.items() if not modules]
    wrong = [
        f"{_theirs(name)} {why}"
        for pattern, modules in chosen.items()
        for name, module in modules.items()
        if (why := unfit(model.plan[pattern], name, module))
    ]
    apart = [] if absent or wrong else [*_left_out(model.plan, chosen, layers)]
    for names, fault in (
        (absent, "names modules that this model has not"),
        (wrong, "does not fit its modules"),
        (apart, "divides modules, and leaves out weights that only fit them whole"),
    ):
        if names:
            short = dict.fromkeys(_theirs(name) for name in names)
            yield f"{what} {fault}: {', '.join([*short][:_MOST_NAMED])}: set mesh.tp to 1"
    if not (absent or wrong or apart):
        yield from _head_faults(config, model.plan, chosen, tp)
        yield from plan_faults(model.plan, layers, tp)


def _chosen(layers: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    """Return the modules that a pattern names, by logical name."""
    return {
        f"{layer}.{inner}".rstrip("."): module
        for layer, whole in layers.items()
        for inner, module in modules_named(whole, layer, pattern)
        if not isinstance(module, nn.Identity)  # instead of a module of another layer
    }


def _left_out(
    plan: Mapping[str, str], chosen: Mapping[str, Mapping[str, nn.Module]], layers: Mapping[str, nn.Module]
) -> Iterator[str]:
    """Yield the weights that the plan does not name, in modules with linear layers whose outputs stay divided.

    Such a weight is for all heads or features, or every rank has a part of its gradient.
    """
    named = [name for modules in chosen.values() for name in modules]
    for pattern, modules in chosen.items():
        kind = kind_of(plan[pattern])
        if kind is None or kind.name != "column" or kind.made != FEATURES:
            continue
        for name in modules:
            parent = name.rpartition(".")[0]
            layer = next(one for one in layers if name.startswith(f"{one}."))
            whole = layers[layer].get_submodule(parent.removeprefix(f"{layer}."))
            for inner, _ in whole.named_parameters(prefix=parent):
                if not any(inner.startswith(f"{one}.") for one in named):
                    yield inner


def _head_faults(
    config: Any, plan: Mapping[str, str], chosen: Mapping[str, Mapping[str, nn.Module]], tp: int
) -> Iterator[str]:
    """Yield the numbers of heads that tensor ranks do not divide, if each rank has some of the heads."""
    for projection, field in _HEADS.items():
        heads = getattr(config, field, None)
        divided = [
            pattern
            for pattern, modules in chosen.items()
            if modules and pattern.endswith(f".{projection}") and plan[pattern] == "column"
        ]
        if divided and isinstance(heads, int) and heads % tp:
            fits = max(size for size in range(1, min(tp, heads) + 1) if heads % size == 0)
            yield f"mesh.tp is {tp}, which does not divide the {heads} heads of {field}: set it to {fits}"


def _theirs(name: str) -> str:
    """Return the name of a module in transformers, without the number of the layer."""
    return name.partition(".net.")[2] or name
