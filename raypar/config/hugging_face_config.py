"""A model of raypar as a config.json of Hugging Face: the type of model that it is there, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raypar.actors.specs.model import GPT, Llama


class _Type(NamedTuple):
    """A type of model at Hugging Face.

    Attributes:
        architecture: Its class.
        must: Settings that it always has; see ``_settings``.
        may: Further settings that it may have.
    """

    architecture: str
    must: frozenset[str]
    may: frozenset[str]


def _type(architecture: str, must: str = "", may: str = "") -> _Type:
    return _Type(architecture, frozenset(must.split()), frozenset(may.split()))


_TYPES: Mapping[str, _Type] = {  # of two that a model could be, the first
    "gpt2": _type("GPT2LMHeadModel", may="qkv_bias"),
    "llama": _type("LlamaForCausalLM", may="head_width"),
    "mistral": _type("MistralForCausalLM", may="window head_width"),
    "gemma": _type("GemmaForCausalLM", "gelu_tanh scaled_embedding", "head_width"),
    "gemma2": _type(
        "Gemma2ForCausalLM",
        "gelu_tanh scaled_embedding post_norms",
        "query_scale attention_cap logit_cap window window_first window_skips head_width",
    ),
    "qwen2": _type("Qwen2ForCausalLM", "qkv_bias", "window window_first window_skips head_width"),
    "qwen3": _type("Qwen3ForCausalLM", "qk_norm", "window window_first window_skips head_width"),
    "mixtral": _type("MixtralForCausalLM", "moe", "window head_width"),
    "qwen3_moe": _type("Qwen3MoeForCausalLM", "qk_norm moe", "window head_width"),
}

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
REQUIRED: Mapping[str, tuple[str, ...]] = {  # names without which transformers refuses a type
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
    kinds = [name for name in _TYPES if (name == "gpt2") == isinstance(model, GPT)]
    fitting = [name for name in kinds if _TYPES[name].must <= has <= _TYPES[name].must | _TYPES[name].may]
    if preferred in fitting:
        fitting = [preferred]
    if not fitting:
        told = " and ".join(f"model.{name}" for name in sorted(has))
        faults.append(f"no type of model has {told}: {', '.join(kinds)} were tried")
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
    common = {
        "architectures": [_TYPES[model_type].architecture],
        "model_type": model_type,
        "dtype": dtype,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab,
    }
    own = _of_gpt(model, kept) if isinstance(model, GPT) else _of_llama(model, model_type, kept)
    return dict(sorted((kept | common | own).items()))


def _settings(model: GPT | Llama) -> frozenset[str]:
    """Return which settings a model has that only some types have."""
    has = {
        "qkv_bias": model.qkv_bias,
        "window": model.window is not None,
        "window_first": model.window is not None and model.window_first > 0,
        "window_skips": model.window_skips is not None,
        "moe": model.moe is not None,
        "head_width": model.head_size * model.heads != model.hidden,
    }
    if isinstance(model, Llama):
        has |= {
            "qk_norm": model.qk_norm,
            "gelu_tanh": model.gate == "gelu_tanh",
            "scaled_embedding": model.scaled_embedding,
            "post_norms": model.post_norms,
            "query_scale": model.query_scale is not None,
            "attention_cap": model.attention_cap is not None,
            "logit_cap": model.logit_cap is not None,
        }
    return frozenset(name for name, is_set in has.items() if is_set)


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


def _of_gpt(model: GPT, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a GPT-2, which keeps the positions that a shorter run did not train."""
    return {
        "activation_function": "gelu" if model.gelu == "exact" else "gelu_new",
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "layer_norm_epsilon": model.norm_eps,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.mlp_width,
        "n_layer": model.layers,
        "n_positions": max(model.seq, int(kept.get("n_positions") or 0)),
    }


def _of_llama(model: Llama, model_type: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a Llama or of one of its relatives."""
    found: dict[str, Any] = {
        "attention_dropout": model.dropout,
        "head_dim": model.head_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": _positions(model, int(kept.get("max_position_embeddings") or 0)),
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.num_kv_heads,
        "pad_token_id": model.pad_id,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_parameters": _rope(model),  # where transformers 5 looks
        "rope_scaling": None if model.rope_scaling is None else _rope(model),  # where transformers 4 does
    }
    if model_type != "gemma2":
        found["hidden_act"] = "gelu_pytorch_tanh" if model_type == "gemma" else "silu"
    if model_type.startswith("gemma"):
        found["hidden_activation"] = "gelu_pytorch_tanh"
    elif model_type != "llama":
        found["sliding_window"] = model.window
    if model_type == "gemma2":
        found |= {
            "attn_logit_softcapping": model.attention_cap,
            "final_logit_softcapping": model.logit_cap,
            "query_pre_attn_scalar": model.head_size if model.query_scale is None else int(model.query_scale),
            "sliding_window": model.window or kept.get("sliding_window") or 4096,  # it has one also if no block uses it
        }
    if model_type == "gemma2" or model.window_skips is not None:
        slides = [model.window_of(block) is not None for block in range(model.layers)]
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        found["use_sliding_window"] = model.window is not None
        if model.window is not None and model_type != "qwen3_moe":  # which has windows in every block, whatever it is
            found["max_window_layers"] = model.window_first
    if (moe := model.moe) is not None:
        found |= {
            "num_experts_per_tok": moe.top_k,
            "num_local_experts": moe.experts,
            "router_aux_loss_coef": moe.alpha,
        }
        if model_type == "qwen3_moe":
            found |= {
                "num_experts": moe.experts,
                "moe_intermediate_size": model.expert_width,
                "norm_topk_prob": moe.normalises,
                "decoder_sparse_step": moe.every,
            }
    return found


def _positions(model: Llama, before: int) -> int:
    """Return the most positions of the model; dynamic scaling goes by them, so they are those of its training."""
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and scaling.trained is not None:
        return scaling.trained
    return max(model.seq, before)


def _rope(model: Llama) -> dict[str, Any]:
    """Return the settings of a model's angles."""
    found: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    if (scaling := model.rope_scaling) is None:
        return found
    own = ("factor", *_OF_KIND[scaling.kind])
    named = {theirs: getattr(scaling, ours) for theirs, ours in SCALING.items() if ours in own}
    return found | {"rope_type": scaling.kind} | {name: value for name, value in named.items() if value is not None}
