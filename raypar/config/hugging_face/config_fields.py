"""Families of models of Hugging Face, as data: which setting of a config.json is which field of a model of raypar.

Reading a config.json and writing one go by the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from raypar.actors.hugging_face.conversions import TABLES
from raypar.actors.specs.model import GPT, Llama
from raypar.config.hugging_face.transformers_model import MOST_SEQ

REQUIRED = object()  # the default of a setting that must be there
_NO_BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}


@dataclass(frozen=True)
class ConfigField:
    """A setting of a config.json that is a field of a model of raypar.

    Attributes:
        ours: The field; one of its experts begins with "moe.".
        theirs: Names of the setting. The first that is there is read, and all are written.
        kind: The method of ``ConfigReader`` that reads it.
        default: The value where it is missing or null; REQUIRED if it must be there.
        older: Further names, which are only read.
        kept: Returns the field for what was read and the fields before it. It raises ValueError with a fault.
        write: The attribute of a model that is written, if it is not the field; or a function that returns it, of the
            model and of what the config.json had that the model came from.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: Literal["count", "number", "flag", "cap", "padding", "dropout", "real", "get"] = "count"
    default: Any = REQUIRED
    older: tuple[str, ...] = ()
    kept: Callable[[Any, Mapping[str, Any]], Any] | None = None
    write: str | Callable[[Any, Any], Any] = ""

    def written(self, model: GPT | Llama, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the setting of a model.

        Args:
            model: The model.
            before: The config.json that it came from.
        """
        if callable(self.write):
            value = self.write(model, before.get(self.theirs[0]))
        else:
            value = attrgetter(self.write or self.ours)(model)
        return dict.fromkeys(self.theirs, value)


@dataclass(frozen=True)
class Windows:
    """Which blocks have the window that ``sliding_window`` gives.

    Attributes:
        flagged: Whether no block has it unless ``use_sliding_window`` is true.
        uniform: Whether every block has it, whatever ``layer_types`` lists.
        begins: Whether ``max_window_layers`` says which block is the first, where ``layer_types`` is not there.
        skips: Every how many blocks one has none, then; None for no such block.
    """

    flagged: bool = False
    uniform: bool = False
    begins: bool = False
    skips: int | None = None


@dataclass(frozen=True)
class Family:
    """A type of model at Hugging Face.

    Attributes:
        architecture: Its class there.
        settings: What is read and written.
        model: What it is here.
        activations: Names of the activation, and the values that are the same. The first is written.
        fixed: Settings that must have this value, or be missing.
        fields: Fields of ours that all its models have.
        may: Those of them that a model may lack when it is written.
        windows: Which blocks have a window; None for none.
        defaults: Values of settings that a config.json leaves out, where they are not those of most families.
    """

    architecture: str
    settings: tuple[ConfigField, ...]
    model: type[GPT] | type[Llama] = Llama
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"hidden_act": ("silu", "swish")})
    fixed: Mapping[str, Any] = field(default_factory=lambda: _NO_BIASES)
    fields: Mapping[str, Any] = field(default_factory=dict)
    may: frozenset[str] = frozenset()
    windows: Windows | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def required_fields(self) -> frozenset[str]:
        """Fields that distinguish its models, and that all of them have."""
        own = [*self.fields, *(one.ours for one in self.settings if one.ours.startswith("moe."))]
        return frozenset(name.partition(".")[0] for name in own) - self.may

    @property
    def known_fields(self) -> frozenset[str]:
        """Fields that its models may have."""
        found = self.required_fields | self.may | {one.ours for one in self.settings}
        if self.windows is not None:
            found |= {"window"}
            if self.windows.begins or self.windows.skips is not None:
                found |= {"window_first", "window_skips"}
        return found


# --- what a field is for what was read, and what is written ---


def _most_seq(positions: int, fields: Mapping[str, Any]) -> int:
    return min(MOST_SEQ, positions)


def _positions(model: GPT | Llama, before: Any) -> int:
    """Return the most positions of a model, of which a shorter run trains only some.

    Dynamic scaling goes by them, so they are those of its training.
    """
    scaling = model.rope_scaling if isinstance(model, Llama) else None
    if scaling is not None and scaling.kind == "dynamic" and scaling.trained is not None:
        return scaling.trained
    return max(model.seq, int(before or 0))


def _head_width(width: int | None, fields: Mapping[str, Any]) -> int | None:
    return None if width is None or width * fields["heads"] == fields["hidden"] else width


def _kv_heads(count: int | None, fields: Mapping[str, Any]) -> int:
    return count or int(fields["heads"])


def _mlp(width: int | None, fields: Mapping[str, Any]) -> int:
    hidden: int = fields["hidden"]
    if width is not None and width % hidden:
        raise ValueError(f"n_inner is {width}, and raypar's GPT has a multiple of n_embd {hidden}")
    return 4 if width is None else width // hidden


def _gelu(activation: str, fields: Mapping[str, Any]) -> str:
    return "exact" if activation == "gelu" else "tanh"


def _activation(model: GPT, before: Any) -> str:
    return "gelu" if model.gelu == "exact" else "gelu_new"


def _query_scale(scale: float, fields: Mapping[str, Any]) -> float | None:
    width = fields["head_width"] or fields["hidden"] // fields["heads"]
    return None if scale == width else scale


def _scalar(model: Llama, before: Any) -> int:
    return model.head_size if model.query_scale is None else int(model.query_scale)


# --- the families ---


def _llama(
    *own: ConfigField, tied: bool = False, head_width: int | None = None, pad_id: int | None = None
) -> tuple[ConfigField, ...]:
    """Return the settings of a family that is built like Llama, with its own ones.

    Args:
        *own: Its own ones.
        tied: Whether embedding and head are tied if a config.json does not say it.
        head_width: The width of a head in that case; None if it follows from other fields.
        pad_id: The padding token in that case; None for none.
    """
    return (
        ConfigField("layers", ("num_hidden_layers",), older=("n_layer",)),
        ConfigField("hidden", ("hidden_size",)),
        ConfigField("heads", ("num_attention_heads",)),
        ConfigField("kv_heads", ("num_key_value_heads",), default=None, kept=_kv_heads, write="num_kv_heads"),
        ConfigField("head_width", ("head_dim",), default=head_width, kept=_head_width, write="head_size"),
        ConfigField("ffn", ("intermediate_size",), write="mlp_width"),
        ConfigField("vocab", ("vocab_size",)),
        ConfigField("seq", ("max_position_embeddings",), default=2048, kept=_most_seq, write=_positions),
        ConfigField("norm_eps", ("rms_norm_eps",), "number", 1e-6),
        ConfigField("dropout", ("attention_dropout",), "dropout", 0.0),
        ConfigField("tied", ("tie_word_embeddings",), "flag", tied),
        ConfigField("pad_id", ("pad_token_id",), "padding", pad_id),
        *own,
    )


def _experts(*names: str, top_k: int) -> tuple[ConfigField, ...]:
    """Return the settings of experts: how many there are, by these names, and what else all families with them have."""
    return (
        ConfigField("moe.experts", names),
        ConfigField("moe.top_k", ("num_experts_per_tok",), default=top_k),
        ConfigField("moe.alpha", ("router_aux_loss_coef",), "real", 0.001),
    )


_SOME = Windows(flagged=True, begins=True)
_WINDOW = {"sliding_window": 4096}
_TANH = ("gelu_pytorch_tanh", "gelu_new")
_GEMMA = {"gate": "gelu_tanh", "scaled_embedding": True}
_GEMMA_FIXED = {**_NO_BIASES, "use_bidirectional_attention": False}

# By the model_type of config.json; of two that a model could be, the first.
FIELDS_BY_MODEL_TYPE: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        (
            ConfigField("layers", ("n_layer",), older=("num_hidden_layers",)),
            ConfigField("hidden", ("n_embd",), older=("hidden_size",)),
            ConfigField("heads", ("n_head",), older=("num_attention_heads",)),
            ConfigField("vocab", ("vocab_size",)),
            ConfigField("seq", ("n_positions",), older=("max_position_embeddings",), kept=_most_seq, write=_positions),
            ConfigField("mlp", ("n_inner",), default=None, kept=_mlp, write="mlp_width"),
            ConfigField("gelu", ("activation_function",), "get", "gelu_new", kept=_gelu, write=_activation),
            ConfigField("norm_eps", ("layer_norm_epsilon",), "number", 1e-5),
            ConfigField("dropout", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "dropout", 0.0),
            ConfigField("tied", ("tie_word_embeddings",), "flag", True),
        ),
        GPT,
        activations={"activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh")},
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        fields={"qkv_bias": True},
        may=frozenset({"qkv_bias"}),  # those that a model of ours has not are zeros there
        defaults={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    ),
    "llama": Family("LlamaForCausalLM", _llama()),
    "mistral": Family("MistralForCausalLM", _llama(), windows=Windows(), defaults=_WINDOW | {"num_key_value_heads": 8}),
    "gemma": Family(
        "GemmaForCausalLM",
        _llama(tied=True, head_width=256, pad_id=0),
        # Here "gelu" is the approximation, too, as transformers reads it.
        activations=dict.fromkeys(("hidden_activation", "hidden_act"), (*_TANH, "gelu")),
        fixed=_GEMMA_FIXED,
        fields=_GEMMA,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _llama(
            ConfigField("query_scale", ("query_pre_attn_scalar",), "number", 256.0, kept=_query_scale, write=_scalar),
            ConfigField("attention_cap", ("attn_logit_softcapping",), "cap", 50.0),
            ConfigField("logit_cap", ("final_logit_softcapping",), "cap", 30.0),
            tied=True,
            head_width=256,
            pad_id=0,
        ),
        activations={"hidden_activation": _TANH},
        fixed=_GEMMA_FIXED,
        fields=_GEMMA | {"post_norms": True},
        windows=Windows(skips=2),
        defaults=_WINDOW | {"num_key_value_heads": 4},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _llama(), fields={"qkv_bias": True}, windows=_SOME, defaults=_WINDOW),
    "qwen3": Family(
        "Qwen3ForCausalLM", _llama(), fields={"qk_norm": True}, windows=_SOME, defaults=_WINDOW | {"head_dim": 128}
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _llama(*_experts("num_local_experts", top_k=2)),
        fixed={**_NO_BIASES, "router_jitter_noise": 0.0},
        fields={"moe.normalise": True},
        windows=Windows(uniform=True),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _llama(
            *_experts("num_experts", "num_local_experts", top_k=8),
            ConfigField("moe.normalise", ("norm_topk_prob",), "flag", False, write="moe.normalises"),
            ConfigField("moe.width", ("moe_intermediate_size",), write="expert_width"),
            ConfigField("moe.every", ("decoder_sparse_step",), default=1),
        ),
        fixed={**_NO_BIASES, "mlp_only_layers": []},  # experts are in every so many blocks
        fields={"qk_norm": True},
        windows=Windows(flagged=True, uniform=True),
        defaults=_WINDOW | {"num_key_value_heads": 4},
    ),
}
assert FIELDS_BY_MODEL_TYPE.keys() == TABLES.keys()
