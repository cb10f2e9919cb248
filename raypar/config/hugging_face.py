"""Models of Hugging Face: the config.json of a folder as a model of raypar, and a model of raypar as a config.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import TABLES
from raypar.actors.hugging_face.folder import CONFIG, FileTensor, read_config, same_bytes, tensors_in
from raypar.actors.known_fields import unknown_faults
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.rope_scaling import RopeScaling, ScalingKind
from raypar.config.arguments import checked_arguments
from raypar.config.hugging_face_config import REQUIRED, SCALING
from raypar.config.transformers_model import MOST_SEQ, their_model
from raypar.errors import ConfigError
from raypar.paths import absolute

log = logging.getLogger(__name__)

_REQUIRED = object()
_EXACT, _TANH = ("gelu",), ("gelu_new", "gelu_pytorch_tanh")
_SILU = ("silu", "swish")


@checked_arguments
def HF(folder: str | PathLike[str], **changes: Any) -> GPT | Llama | Layers:  # noqa: N802  (it stands where a class would)
    """Return the model in a folder of Hugging Face, whose weights a run with it begins with.

    A type of model that raypar has not is one of Layers, made of the modules of transformers, which must be installed.

    Only config.json and the headers of safetensors files are read; nothing of the folder is run. When the run starts,
    every actor reads its own slices of the weights.

    Args:
        folder: A folder that ``save_pretrained`` has written, or that was downloaded whole.
        **changes: Fields of the model to change, such as ``seq``, which is at most 1024 unless it is given.

    Raises:
        ConfigError: The folder holds no model that raypar has, or its files are not sound. Lists all faults.
    """
    path, faults = absolute(folder), list[str]()
    model: GPT | Llama | Layers | None = None
    try:
        config = read_config(path)
        kind = config.get("model_type")
        read = model_of_config if kind in TABLES or not isinstance(kind, str) else their_model
        model, faults = read(config, changes)
        if model is not None:
            kept = tensors_in(path, config["model_type"])
            model = _with_own_head(model, path, kept)
    except CheckpointError as error:
        faults = [*faults, *error.faults]
    if faults:
        raise ConfigError([f"model.hf {str(folder)!r}: {fault}" for fault in faults])
    assert model is not None
    return replace(model, hf=str(path))


def _with_own_head(model: GPT | Llama | Layers, folder: Path, kept: Mapping[str, FileTensor]) -> GPT | Llama | Layers:
    """Return the model untied, as transformers loads it, where the folder has another head than its embedding."""
    head = kept.get("lm_head.weight")
    if isinstance(model, Layers) or not model.tied or head is None:
        return model
    embedding = kept.get("transformer.wte.weight" if isinstance(model, GPT) else "model.embed_tokens.weight")
    if embedding is None or same_bytes(folder, head, embedding):
        return model
    log.warning(
        "%s has a head of its own beside tie_word_embeddings: it is kept, and the model is untied, as in transformers",
        folder,
    )
    return replace(model, tied=False)


def model_of_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[GPT | Llama | None, list[str]]:
    """Return the model that a config.json describes.

    Args:
        config: The content of the file.
        changes: Fields of the model to change. What the file says of these is not looked at.

    Returns:
        The model, or None if there is none like it; and what in the file no model of raypar can do.
    """
    kind = config.get("model_type")
    make = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if make is None:
        return None, [f"{CONFIG} has no model_type: give a model's folder"]
    reader = _Reader({**_DEFAULTS.get(str(kind), {}), **config}, changes)
    reader.same("is_causal", True)
    if "quantization_config" in config:
        reader.faults.append("its weights are quantized: save it in float32 or bfloat16 first, with transformers")
    fields = make(reader) | {"layers": reader.count("num_hidden_layers", "n_layer")}
    kind_of = GPT if make is _gpt2 else Llama
    if unknown := [*unknown_faults(kind_of.__name__, changes)]:
        return None, unknown
    if reader.faults:
        return None, list(dict.fromkeys(reader.faults))
    return kind_of(**fields | dict(changes)), []


class _Reader:
    """Reads the values of a config.json, and notes what no model of raypar can do.

    Attributes:
        faults: What was noted.
    """

    def __init__(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        self._config, self._changes = config, changes
        self.faults: list[str] = []

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Return the first of these values that is there and not null, else the default."""
        for name in names:
            if (value := self._config.get(name)) is not None:
                return value
        if default is _REQUIRED:
            self.faults.append(f"{CONFIG} has no {names[0]}: copy it again")
            return 1
        return default

    def count(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Return a whole number of at least 1, or the default."""
        value = self.get(*names, default=default)
        if value is default or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        self.faults.append(f"{names[0]} is {value!r}, and must be a whole number above 0")
        return 1

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        return bool(self.demand(name, self.get(name, default=default), (True, False)))

    def number(self, *names: str, default: float) -> float:
        """Return a number above 0."""
        value = self.get(*names, default=default)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.faults.append(f"{names[0]} is {value!r}, and must be a number above 0")
        return default

    def cap(self, name: str, *, default: float) -> float | None:
        """Return a number above 0, or None if the file says null, and not just nothing."""
        return None if name in self._config and self._config[name] is None else self.number(name, default=default)

    def padding(self, *, default: int | None) -> int | None:
        """Return the token of padding; negative ones count from the end, and null is none."""
        found, vocab = self._config.get("pad_token_id", default), self._config.get("vocab_size")
        return found + vocab if isinstance(found, int) and isinstance(vocab, int) and found < 0 else found

    def demand(self, name: str, value: Any, wanted: tuple[Any, ...]) -> Any:
        """Note it if a value is none of those that raypar's models have."""
        if value not in wanted:
            self.faults.append(f"{name} is {value!r}, and raypar's models have {' or '.join(map(repr, wanted))}")
        return value

    def same(self, name: str, wanted: Any) -> None:
        """Note it if the file has another value than this one."""
        self.demand(name, self.get(name, default=wanted), (wanted,))

    def dropout(self, *names: str) -> float:
        """Return the one dropout probability that these values have."""
        found = {name: self.get(name, default=0.0) for name in names}
        if "dropout" in self._changes or len(set(found.values())) == 1:
            value = next(iter(found.values()))
            return float(value) if isinstance(value, int | float) else 0.0
        told = ", ".join(f"{name} {value!r}" for name, value in found.items())
        self.faults.append(f"dropout differs between places ({told}): give one for all, as dropout=0.0")
        return 0.0

    def rope(self) -> dict[str, Any]:
        """Return the base of the angles, and how they are scaled."""
        given = self._config.get("rope_scaling") or self._config.get("rope_parameters")
        table = dict(given) if isinstance(given, dict) else {}
        if "original_max_position_embeddings" in self._config:  # as Phi has it, goes before what is in the table
            table["original_max_position_embeddings"] = self._config["original_max_position_embeddings"]
        self.demand("partial_rotary_factor", table.get("partial_rotary_factor", 1.0), (1.0,))
        inside = table.get("rope_theta")
        base = float(inside) if isinstance(inside, int | float) else self.number("rope_theta", default=10_000.0)
        return {"rope_base": base, "rope_scaling": self._scaling(table)}

    def _scaling(self, table: Mapping[str, Any]) -> RopeScaling | None:
        """Return how the angles are scaled; None for not at all."""
        kind = self.demand(
            "the type of rope",
            table.get("rope_type", table.get("type", "default")),
            ("default", *get_args(ScalingKind)),
        )
        if kind not in get_args(ScalingKind):
            return None
        for name in ("mscale", "mscale_all_dim"):
            self.demand(name, table.get(name), (None,))
        if missing := [name for name in REQUIRED[kind] if name not in table]:
            self.faults.append(f"rope_scaling of type {kind!r} has no {' and no '.join(missing)}: copy it again")
            return None
        fields = {ours: table[theirs] for theirs, ours in SCALING.items() if table.get(theirs) is not None}
        fields["kind"] = kind
        if kind == "dynamic":  # theirs goes by the model's positions, whatever else is given
            fields["trained"] = self.count("max_position_embeddings")
        elif kind != "linear":
            fields.setdefault("trained", self.count("max_position_embeddings"))
        if kind == "yarn" and table.get("factor") is None:
            fields["factor"] = self.count("max_position_embeddings") / fields["trained"]
        return RopeScaling(**fields)

    def window(self, layers: int, *, first: int = 0, skips: int | None = None) -> dict[str, int | None]:
        """Return the window of blocks, and which of them have it.

        Args:
            layers: Number of blocks.
            first: The first block with a window if the file does not list the kind of every block.
            skips: Which of those behind have none, then.
        """
        window, kinds = self.count("sliding_window", default=None), self.get("layer_types", default=None)
        if window is None:
            return {}
        if isinstance(kinds, list):
            slides = [kind == "sliding_attention" for kind in kinds]
            first = slides.index(True) if True in slides else layers
            fitting = [every for every in (None, *range(2, layers + 1)) if slides == _slides(layers, first, every)]
            if not fitting:
                told = "windows begin at one block, and leave out every n-th"
                self.faults.append(f"layer_types do not change regularly: raypar's {told}")
            skips = fitting[0] if fitting else None
        if first >= layers:
            return {}
        return {"window": window, "window_first": first} | ({} if skips is None else {"window_skips": skips})


def _slides(layers: int, first: int, skips: int | None) -> list[bool]:
    """Return which blocks have a window."""
    return [block >= first and not (skips and (block + 1) % skips == 0) for block in range(layers)]


def _gpt2(read: _Reader) -> dict[str, Any]:
    """Return the fields of a GPT-2."""
    hidden, activation = read.count("n_embd", "hidden_size"), read.get("activation_function", default="gelu_new")
    width = read.count("n_inner", default=4 * hidden)
    if width % hidden:
        read.faults.append(f"n_inner is {width}, and raypar's GPT has a multiple of n_embd {hidden}")
    read.demand("activation_function", activation, (*_EXACT, *_TANH))
    for name, wanted in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }.items():
        read.same(name, wanted)
    return {
        "hidden": hidden,
        "heads": read.count("n_head", "num_attention_heads"),
        "vocab": read.count("vocab_size"),
        "seq": min(MOST_SEQ, read.count("n_positions", "max_position_embeddings")),
        "mlp": width // hidden,
        "gelu": "exact" if activation in _EXACT else "tanh",
        "qkv_bias": True,
        "norm_eps": read.number("layer_norm_epsilon", default=1e-5),
        "dropout": read.dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "tied": read.flag("tie_word_embeddings", default=True),
    }


def _llama(read: _Reader, *, silu: bool = True) -> dict[str, Any]:
    """Return the fields of a Llama, which those of its relatives change; whether gates pass a silu is theirs to say."""
    if silu:
        read.demand("hidden_act", read.get("hidden_act", default="silu"), _SILU)
    for name in ("attention_bias", "mlp_bias"):
        read.same(name, False)
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    width = read.count("head_dim", default=None)
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": read.count("num_key_value_heads", default=heads),
        "head_width": None if width is None or width * heads == hidden else width,
        "ffn": read.count("intermediate_size"),
        "vocab": read.count("vocab_size"),
        "seq": min(MOST_SEQ, read.count("max_position_embeddings", default=2048)),
        "norm_eps": read.number("rms_norm_eps", default=1e-6),
        **read.rope(),
        "dropout": read.dropout("attention_dropout"),
        "tied": read.flag("tie_word_embeddings", default=False),
        "pad_id": read.padding(default=None),
    }


def _gemma(read: _Reader, *, gelu_is_tanh: bool = True) -> dict[str, Any]:
    """Return the fields of a Gemma or Gemma 2.

    Args:
        read: The config.
        gelu_is_tanh: Whether "gelu" means the approximation, as transformers reads it for the first Gemma.
    """
    if gelu_is_tanh:
        for name in ("hidden_activation", "hidden_act"):
            read.demand(name, read.get(name, default="gelu"), ("gelu", *_TANH))
    else:
        read.demand("hidden_activation", read.get("hidden_activation", default="gelu_pytorch_tanh"), _TANH)
    read.same("use_bidirectional_attention", False)
    width = read.count("head_dim", default=256)
    tied, padding = read.flag("tie_word_embeddings", default=True), read.padding(default=0)
    fields = _llama(read, silu=False) | {"tied": tied, "pad_id": padding}
    fields["head_width"] = None if width * fields["heads"] == fields["hidden"] else width
    return fields | {"gate": "gelu_tanh", "scaled_embedding": True}


def _gemma2(read: _Reader) -> dict[str, Any]:
    fields, scale = _gemma(read, gelu_is_tanh=False), read.number("query_pre_attn_scalar", default=256.0)
    width = fields["head_width"] or fields["hidden"] // fields["heads"]
    cap = read.cap("attn_logit_softcapping", default=50.0)
    return (
        fields
        | {"post_norms": True, "query_scale": None if scale == width else scale}
        | {"attention_cap": cap, "logit_cap": read.cap("final_logit_softcapping", default=30.0)}
        | ({} if cap is None else {"attention": "materialised"})
        | read.window(read.count("num_hidden_layers"), skips=2)
    )


def _mistral(read: _Reader) -> dict[str, Any]:
    return _llama(read) | read.window(read.count("num_hidden_layers"))


def _qwen2(read: _Reader) -> dict[str, Any]:
    layers, fields = read.count("num_hidden_layers"), _llama(read) | {"qkv_bias": True}
    slides = read.get("use_sliding_window", default=False)
    return fields | (read.window(layers, first=read.get("max_window_layers", default=28)) if slides else {})


def _qwen3(read: _Reader) -> dict[str, Any]:
    return _qwen2(read) | {"qkv_bias": False, "qk_norm": True}


def _mixtral(read: _Reader) -> dict[str, Any]:
    read.same("router_jitter_noise", 0.0)
    moe = MoE(
        experts=read.count("num_local_experts"),
        top_k=read.count("num_experts_per_tok", default=2),
        normalise=True,
        alpha=float(read.get("router_aux_loss_coef", default=0.001)),
    )
    window = read.count("sliding_window", default=None)  # of every block, whatever layer_types says
    return _llama(read) | {"moe": moe, "window": window}


def _qwen3_moe(read: _Reader) -> dict[str, Any]:
    if read.get("mlp_only_layers", default=[]):
        read.faults.append("mlp_only_layers names blocks, and raypar's MoE has experts in every so many blocks")
    moe = MoE(
        experts=read.count("num_experts", "num_local_experts"),
        top_k=read.count("num_experts_per_tok", default=8),
        normalise=read.flag("norm_topk_prob", default=False),
        width=read.count("moe_intermediate_size"),
        every=read.count("decoder_sparse_step", default=1),
        alpha=float(read.get("router_aux_loss_coef", default=0.001)),
    )
    fields = _llama(read) | {"qk_norm": True, "moe": moe}
    if read.get("use_sliding_window", default=False):  # of every block, whatever max_window_layers says
        fields["window"] = read.count("sliding_window", default=None)
    return fields


_FAMILIES: Mapping[str, Callable[[_Reader], dict[str, Any]]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
assert _FAMILIES.keys() == TABLES.keys()

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
}
"""Values of keys that a config.json leaves out, where they are transformers' own and not those of most families."""
