"""Models of Hugging Face of types that raypar does not implement, as Layers of the modules of transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from raypar.actors.hugging_face.conversions import TABLES, THEIRS
from raypar.actors.known_fields import unknown_faults
from raypar.actors.specs.model import Layers
from raypar.schedules.nearest_name import nearest

MOST_SEQ = 1024  # tokens of a sequence, unless the user says another number
_LOSS = "their_layers.cross_entropy"
_DIVIDED = 64  # a head is divided over tp if its vocabulary is a multiple of this


def their_model(config: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[Layers | None, list[str]]:
    """Return the model that a config.json describes, of the modules of transformers.

    Args:
        config: The content of the file.
        changes: Fields of Layers to change; and ``dropout=0.0``, which sets all probabilities of the config to 0.

    Returns:
        The model, or None; and why there is none.
    """
    kind = config["model_type"]
    if importlib.util.find_spec("transformers") is None:
        return None, [
            f"its model_type is {_type(config)}, and raypar has {', '.join(TABLES)}{_near(kind)}: to train it through "
            "the modules of transformers, pip install 'raypar[transformers]'"
        ]
    from raypar.actors.models.own.their_layers import (
        TheirLayers,
        config_object,
        cross_entropy,
        parts_of,
        plan_of,
        rope_types,
    )

    plain, faults = {**config}, list[str]()
    if "quantization_config" in config:
        faults.append("its weights are quantized: save it in float32 or bfloat16 first, with transformers")
    drops = {name for name, value in config.items() if _is_dropout(name) and isinstance(value, int | float) and value}
    if "dropout" in changes:
        plain |= dict.fromkeys(drops, 0.0)
        if changes["dropout"]:
            faults.append(f"dropout is {changes['dropout']!r}, and modules of transformers take 0.0 here")
    elif drops:
        faults.append(f"it has {', '.join(sorted(drops))}, which actors would draw apart: give dropout=0.0")
    rest = {name: value for name, value in changes.items() if name not in ("dropout", "lora")}
    if changes.get("lora") is not None:
        faults.append(
            "lora is given, and modules of transformers have no adapters here: leave it out, all weights learn"
        )
    if faults := [*faults, *unknown_faults("Layers", rest)]:
        return None, faults
    try:
        theirs = config_object(plain)
        parts_of(theirs.base_model_pp_plan or {})
        plan = plan_of(theirs)
    except Exception as error:  # transformers', of whatever type
        return None, [_refused(config, kind, error)]
    if not theirs.tie_word_embeddings and theirs.vocab_size % _DIVIDED == 0:
        plan[f"layers.{theirs.num_hidden_layers}{THEIRS}lm_head"] = "column_gather_output"
    most = int(getattr(theirs, "max_position_embeddings", None) or MOST_SEQ)
    seq = min(MOST_SEQ, most)
    longer = "dynamic" in rope_types(plain)  # is for texts of more tokens than these
    if (asked := rest.get("seq", seq)) is None or (asked > most and not longer):
        return None, [f"seq is {asked}, and the model has {most} positions: give {most} at most"]
    fields: dict[str, Any] = {"seq": seq, "vocab": theirs.vocab_size, "plan": plan}
    fn = TheirLayers(json.dumps(plain, sort_keys=True))
    return Layers(fn=fn, loss=cross_entropy, **fields | rest), []


def is_theirs(model: Mapping[str, Any]) -> bool:
    """Return whether a model as plain data, as a run was written, is one of the modules of transformers."""
    fn = model.get("fn")
    return isinstance(fn, Mapping) and isinstance(fn.get("config"), str) and str(model.get("loss")).endswith(_LOSS)


def their_model_again(model: Mapping[str, Any]) -> Layers:
    """Return a model of the modules of transformers from plain data, for which ``is_theirs`` is true.

    Raises:
        ValueError: A field is not one that such a model was written with.
    """
    from raypar.actors.models.own.their_layers import TheirLayers, cross_entropy  # imports torch

    fields = {name: value for name, value in model.items() if name not in ("fn", "loss")}
    if faults := [*unknown_faults("Layers", fields)]:
        raise ValueError("; ".join(faults))
    fields = {name: None if value == "none" else value for name, value in fields.items()}
    fields |= {"plan": dict(fields.get("plan") or ()), "skips": tuple(map(tuple, fields.get("skips") or ()))}
    fields.pop("metrics", None)  # the names of functions, which can't be read again
    return Layers(fn=TheirLayers(model["fn"]["config"]), loss=cross_entropy, **fields)


def _type(config: Mapping[str, Any]) -> str:
    """Return the type of a model, with the name of its class if the file has one."""
    kind, named = config.get("model_type"), config.get("architectures") or []
    return f"{kind!r} ({named[0]})" if isinstance(named, list) and named else repr(kind)


def _near(kind: object) -> str:
    """Return the nearest of raypar's types, if one is near."""
    close = nearest(str(kind), list(TABLES))
    return f"; {close!r} is the nearest" if close else ""


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _refused(config: Mapping[str, Any], kind: str, error: Exception) -> str:
    why = f"transformers has no model of this type{_near(kind)}" if isinstance(error, KeyError) else str(error)
    return (
        f"its model_type is {_type(config)}, which raypar has not, and which it can't take from transformers as it is: "
        f"{' '.join(why.split())}. Give one of {', '.join(TABLES)}, one whose config declares base_model_tp_plan and "
        "base_model_pp_plan, or build it from its modules as rp.Layers with a plan of yours (docs/hugging-face.md)"
    )
