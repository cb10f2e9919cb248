"""A model of raypar as a config.json of Hugging Face: the type of model that it is there, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raypar.actors.specs.model import GPT, Llama
from raypar.config.hugging_face.config_fields import FIELDS_BY_MODEL_TYPE, Family

_KNOWN = [family.known_fields for family in FIELDS_BY_MODEL_TYPE.values() if family.model is Llama]
_OF_SOME = frozenset.union(*_KNOWN) - frozenset.intersection(*_KNOWN) - {"gate", "window_first"}  # see ``_settings``

SCALING: Mapping[str, str] = {  # names at Hugging Face of the fields of RopeScaling
    "factor": "factor",
    "original_max_position_embeddings": "trained",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "attention_factor": "attention",
    "truncate": "truncate",
}
REQUIRED_NAMES: Mapping[str, tuple[str, ...]] = {  # names without which transformers refuses a type
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OF_KIND = {"linear": (), "dynamic": (), "llama3": ("trained", "low", "high")}
_OF_KIND["yarn"] = ("trained", "fast", "slow", "attention", "truncate")


def type_of(model: GPT | Llama, preferred: str | None = None) -> tuple[str | None, list[str]]:
    """Return which type of model at Hugging Face a model of raypar is.

    Args:
        model: The model.
        preferred: The type to choose if the model can be that.

    Returns:
        The type, or None if there is none; and why there is none.
    """
    faults, has = [*_misfits(model)], _settings(model)
    kinds = {name: family for name, family in FIELDS_BY_MODEL_TYPE.items() if isinstance(model, family.model)}
    fitting = [name for name, one in kinds.items() if one.required_fields <= has <= one.known_fields]
    if preferred in fitting:
        fitting = [preferred]
    if not fitting:
        fields = " and ".join(f"model.{name}" for name in sorted(has))
        faults.append(f"no type of model has {fields}: {', '.join(kinds)} were tried")
    if not faults and fitting[0] == "mixtral" and isinstance(model, Llama):
        faults = [*_unlike_mixtral(model)]
    return (None if faults else fitting[0]), faults


def config_of(model: GPT | Llama, model_type: str, begun: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the content of a config.json.

    Args:
        model: The model.
        model_type: Its type at Hugging Face.
        begun: The config.json that the model came from, whose other settings stay; empty if it came from none.
        dtype: Name of the dtype of the weights, such as "float32".
    """
    kept = dict(begun) if begun.get("model_type") == model_type else {}
    for old in ("torch_dtype", "transformers_version", "layer_types", "rope_scaling", "auto_map", "_name_or_path"):
        kept.pop(old, None)
    family = FIELDS_BY_MODEL_TYPE[model_type]
    own: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type, "dtype": dtype}
    own |= {name: values[0] for name, values in family.activations.items()}
    for setting in family.settings:
        own |= setting.written(model, kept)
    if isinstance(model, Llama):
        own |= _rope(model) | _windows(model, family, kept)
    return dict(sorted((kept | own).items()))


def _settings(model: GPT | Llama) -> frozenset[str]:
    """Return which settings a model has that only some types have."""
    has = {name for name in _OF_SOME if getattr(model, name, None)}
    has |= {"window_first"} if model.window is not None and model.window_first else set()
    has |= {"head_width"} if model.head_size * model.heads != model.hidden else set()
    return frozenset(has | ({"gate"} if isinstance(model, Llama) and model.gate == "gelu_tanh" else set()))


def _misfits(model: GPT | Llama) -> Iterator[str]:
    """Yield what no type of model at Hugging Face that raypar knows has."""
    positions = "learned" if isinstance(model, GPT) else "rope"
    if model.positions != positions:
        yield f"model.positions is {model.positions!r}, and their models of this kind have {positions!r}"
    if isinstance(model, Llama) and model.gate == "gelu":
        yield "model.gate is 'gelu', and their models of this kind have 'silu' or 'gelu_tanh'"
    if isinstance(model, Llama) and model.query_scale is not None and not float(model.query_scale).is_integer():
        yield f"model.query_scale is {model.query_scale}, and their models of this kind have a whole number"
    if (moe := model.moe) is None:
        return
    for name, value, wanted in (
        ("gate", moe.gate, "softmax"),
        ("shared", moe.shared, 0),
        ("residual", moe.residual, False),
        ("capacity", moe.capacity, None),
        ("bias_rate", moe.bias_rate, 0.0),
        ("first", moe.first, None),
    ):
        if value != wanted:
            yield f"model.moe.{name} is {value!r}, and their models with experts have {wanted!r}"
    if not isinstance(moe.experts, int):
        yield f"model.moe.experts is {moe.experts!r}, and their models have one number for all blocks"


def _unlike_mixtral(model: Llama) -> Iterator[str]:
    """Yield the settings of experts that a Mixtral does not have; models with model.qk_norm may have them."""
    assert model.moe is not None
    if not model.moe.normalises:
        yield "model.moe.normalise is false, and a Mixtral's gates add up to 1"
    if model.moe.every > 1:
        yield f"model.moe.every is {model.moe.every}, and a Mixtral has experts in every block"
    if model.expert_width != model.mlp_width:
        yield f"model.moe.width is {model.expert_width}, and a Mixtral's experts have model.ffn, {model.mlp_width}"


def _windows(model: Llama, family: Family, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return which blocks have a window."""
    windows, found = family.windows, dict[str, Any]()
    if windows is None:
        return found
    found["sliding_window"] = model.window
    if windows.skips is not None:  # it has one also if no block uses it
        found["sliding_window"] = model.window or kept.get("sliding_window") or family.defaults["sliding_window"]
    if windows.skips is not None or model.window_skips is not None:
        slides = [model.window_of(block) is not None for block in range(model.layers)]
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if windows.flagged:
        found["use_sliding_window"] = model.window is not None
    if windows.begins and model.window is not None:
        found["max_window_layers"] = model.window_first
    return found


def _rope(model: Llama) -> dict[str, Any]:
    """Return the settings of a model's angles, where transformers 5 looks for them, and where transformers 4 does."""
    table: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    scaling = model.rope_scaling
    if scaling is not None:
        own = ("factor", *_OF_KIND[scaling.kind])
        named = {theirs: getattr(scaling, ours) for theirs, ours in SCALING.items() if ours in own}
        table |= {"rope_type": scaling.kind} | {name: value for name, value in named.items() if value is not None}
    return {
        "rope_theta": model.rope_base,
        "rope_parameters": table,
        "rope_scaling": None if scaling is None else dict(table),
    }
