"""Tiny models of transformers with unusual but legal configs, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

SEQ = 12  # tokens of a sample; windows, and what angles were trained for, are shorter
NATIVE = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral", "qwen3_moe")
ROPES = ("default", "linear", "dynamic", "yarn", "llama3")


class Tiny(NamedTuple):
    """A tiny model.

    Attributes:
        kind: Its model_type.
        config: Name of the class of its config.
        fields: What differs from the defaults of that class.
        seed: Of its weights.
    """

    kind: str
    config: str
    fields: dict[str, Any]
    seed: int

    @property
    def rope(self) -> str:
        """How its angles are scaled."""
        return self.fields.get("rope_parameters", {}).get("rope_type", "default")

    @property
    def is_renamed(self) -> bool:
        """Whether transformers' files have other names of tensors than its modules, unless it is asked for these."""
        return self.kind in ("exaone", "olmo_hybrid")


def drawn(seed: int, count: int = 60) -> list[Tiny]:
    """Return tiny models: 37 of 60 of the types that raypar has, the others of other types, another one each."""
    others = round(count * 23 / 60)
    kinds = random.Random(f"others {seed}").sample(sorted(_OTHERS), others)
    return [native(seed, number) for number in range(count - others)] + [
        other(kind, seed, number) for number, kind in enumerate(kinds)
    ]


def native(seed: int, number: int) -> Tiny:
    """Return a model of a type that raypar has; the types and the kinds of angles take turns."""
    draw = random.Random(f"native {seed} {number}")
    kind = NATIVE[(number + seed) % len(NATIVE)]
    if kind == "gpt2":
        return Tiny(kind, "GPT2Config", _gpt2(draw), number)
    fields = _sizes(draw)
    fields |= _rope(draw, ROPES[(number + seed) % len(ROPES)], fields)
    return Tiny(kind, _CLASSES[kind], fields | _OF_KIND[kind](draw, fields), number)


def other(kind: str, seed: int, number: int) -> Tiny:
    """Return a model of another type, which transformers' modules compute."""
    draw = random.Random(f"other {seed} {kind}")
    name, ropes, own = _OTHERS[kind]
    fields = _sizes(draw)
    if draw.random() < 0.6:  # tensor ranks have whole heads
        fields["num_key_value_heads"] = draw.choice((2, fields["num_attention_heads"]))
    if ropes:
        fields |= _rope(draw, draw.choice(ropes), fields)
    return Tiny(kind, name, fields | own(draw, fields), 100 + number)


def _sizes(draw: random.Random) -> dict[str, Any]:
    """Return sizes of a Llama or one of its relatives: heads of any width, one kv head, odd widths and vocabularies."""
    heads = draw.choice((2, 4, 6))
    vocab = draw.choice((23, 29, 37, 50, 61, 64))
    fields = {
        "vocab_size": vocab,
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "intermediate_size": draw.choice((13, 20, 26, 34, 40)),
        "num_hidden_layers": draw.choice((2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, *(size for size in range(1, heads + 1) if heads % size == 0)]),
        "max_position_embeddings": draw.choice((13, 16, 64)),
        "attention_dropout": 0.0,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": draw.choice((None, 0, vocab - 1)),
    }
    return fields | ({"head_dim": width} if (width := draw.choice((None, 2, 4, 6, 10))) else {})


def _rope(draw: random.Random, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return how angles are scaled: for sequences longer than those of an earlier training."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((10_000.0, 500.0, 77.5))}
    trained = {"original_max_position_embeddings": draw.choice((6, 16))}
    if kind == "default":
        return {"rope_parameters": rope}
    rope["factor"] = draw.choice((1.5, 2.0, 4.0))
    if kind == "dynamic":
        width = {"head_dim": 4} if fields.get("head_dim") == 2 else {}  # of one pair theirs divides by 0
        return {"rope_parameters": rope, "max_position_embeddings": draw.choice((6, 8, 16))} | width
    if kind == "llama3":
        rope |= trained | {"low_freq_factor": 1.0, "high_freq_factor": draw.choice((2.0, 4.0))}
    if kind == "yarn":
        rope |= trained
        rope |= draw.choice(({}, {"beta_fast": 8.0, "beta_slow": 0.5}, {"attention_factor": 1.3}, {"truncate": False}))
        rope |= draw.choice(({}, {"factor": None}))
    return {"rope_parameters": rope}


def _gpt2(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((2, 3, 4))
    hidden = heads * draw.choice((4, 5, 6))
    return {
        "vocab_size": draw.choice((23, 29, 37, 50, 61)),
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": draw.choice((2, 3, 4)),
        "n_inner": draw.choice((None, hidden, 3 * hidden)),
        "n_positions": draw.choice((12, 13, 16)),
        "activation_function": draw.choice(("gelu", "gelu_new", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": draw.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _window(draw: random.Random) -> dict[str, Any]:
    return {"sliding_window": draw.choice((None, 3, 5, 11, 40))}


def _qwen(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return windows in no block, from a block on, or in every second one."""
    layers = fields["num_hidden_layers"]
    if draw.random() < 0.3:
        return {}
    found = {"use_sliding_window": True, "sliding_window": draw.choice((3, 5)), "max_window_layers": 1}
    if draw.random() < 0.3:
        return found | {"layer_types": [("sliding_attention", "full_attention")[block % 2] for block in range(layers)]}
    return found | {"max_window_layers": draw.randrange(layers + 1)}


def _gemma(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    act = draw.choice(("gelu_pytorch_tanh", "gelu"))
    return {"head_dim": draw.choice((4, 6, 10)), "hidden_act": act, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    kinds = ["full_attention"] * layers
    if draw.random() < 0.3:
        kinds = ["sliding_attention"] * layers
    own = {"layer_types": kinds} if draw.random() < 0.5 else {}
    return own | {
        "head_dim": draw.choice((4, 6, 10)),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": draw.choice((3, 5, 40)),
        "query_pre_attn_scalar": draw.choice((6, 11, 256)),
        "attn_logit_softcapping": draw.choice((None, 1.5, 50.0)),
        "final_logit_softcapping": draw.choice((None, 4.0, 30.0)),
    }


def _mixtral(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    own = {"num_local_experts": draw.choice((3, 4, 4)), "num_experts_per_tok": draw.choice((1, 2, 3))}
    return own | {"router_aux_loss_coef": 0.0} | _window(draw)


def _qwen3_moe(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    own = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if draw.random() < 0.5 else {}
    return own | {
        "num_experts": draw.choice((3, 4, 6)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "moe_intermediate_size": draw.choice((8, 11, 14)),
        "norm_topk_prob": draw.random() < 0.5,
        "decoder_sparse_step": draw.choice((1, 2)),
        "router_aux_loss_coef": 0.0,
    }


_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}
_OF_KIND = {
    "llama": lambda draw, fields: {},
    "mistral": lambda draw, fields: _window(draw),
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


def _nothing(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {}


def _biased(*names: str) -> Any:
    """Return what draws whether modules have biases."""
    return lambda draw, fields: {name: draw.random() < 0.5 for name in names}


def _longrope(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return angles of the kind of Phi-3, whose factors change where a text is longer than before."""
    heads = fields["num_attention_heads"]
    pairs = (fields.get("head_dim") or fields["hidden_size"] // heads) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 6,
        "factor": 4.0,
    }
    return {"rope_parameters": rope, "max_position_embeddings": 24, "original_max_position_embeddings": 6}


def _phi3(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("head_dim", None)
    return _window(draw) | _longrope(draw, fields)


def _granite(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    own = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
    return own | _biased("attention_bias", "mlp_bias")(draw, fields)


def _cohere(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("head_dim", None)
    return {"logit_scale": 0.5, "use_qk_norm": draw.random() < 0.3} | _biased("attention_bias")(draw, fields)


def _alternating(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return windows in some blocks, without an order."""
    kinds = ("sliding_attention", "full_attention")
    types = [draw.choice(kinds) for _ in range(fields["num_hidden_layers"])]
    return {"sliding_window": draw.choice((3, 5)), "layer_types": types}


def _gpt_oss(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return experts of sizes that the kernel for groups of matrices takes: rows of 16 bytes."""
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _alternating(draw, fields) | sizes | {"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2}


def _ministral3(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 6}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return {"rope_parameters": rope, "sliding_window": draw.choice((None, 5))}


def _linear_blocks(fields: dict[str, Any]) -> dict[str, Any]:
    """Return kinds of blocks of which the last one alone has attention."""
    layers = fields["num_hidden_layers"]
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
    types = [*["linear_attention"] * (layers - 1), "full_attention"]
    return sizes | {"linear_value_head_dim": 6, "layer_types": types}


def _olmo_hybrid(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("head_dim", None)
    return _linear_blocks(fields)


def _qwen3_5(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    return _linear_blocks(fields) | {"head_dim": 8, "rope_parameters": rope}


def _seed_oss(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    biases = _biased("attention_bias", "mlp_bias", "attention_out_bias")(draw, fields)
    return {"residual_dropout": 0.0, **biases}


def _youtu(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of attention with few latent features; transformers' reading sets a vector of padding to 0."""
    fields.pop("head_dim", None)
    fields["pad_token_id"] = None
    sizes = {"kv_lora_rank": 8, "q_lora_rank": draw.choice((None, 10)), "qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
    return sizes | {"v_head_dim": 6, "num_key_value_heads": fields["num_attention_heads"]}


_OTHERS: dict[str, Any] = {  # the class of a type's config, the kinds of its angles, and what else it has
    "arcee": ("ArceeConfig", ROPES, _biased("attention_bias", "mlp_bias")),
    "cohere": ("CohereConfig", ROPES, _cohere),
    "cohere2": ("Cohere2Config", ("default", "linear"), _alternating),
    "cwm": ("CwmConfig", ("llama3",), _alternating),
    "doge": ("DogeConfig", ("default",), _nothing),
    "ernie4_5": ("Ernie4_5Config", ("default",), _biased("use_bias")),
    "exaone": ("ExaoneConfig", ROPES, _biased("attention_bias", "mlp_bias")),
    "exaone4": ("Exaone4Config", ROPES, _alternating),
    "gemma3_text": ("Gemma3TextConfig", (), _alternating),
    "glm": ("GlmConfig", ("default",), _biased("attention_bias")),
    "glm4": ("Glm4Config", ("default",), _biased("attention_bias")),
    "gpt_oss": ("GptOssConfig", ("yarn",), _gpt_oss),
    "granite": ("GraniteConfig", ROPES, _granite),
    "helium": ("HeliumConfig", ROPES, _biased("attention_bias", "mlp_bias")),
    "hyperclovax": ("HyperCLOVAXConfig", ROPES, _granite),
    "internlm3": ("InternLM3Config", ROPES, _biased("attention_bias", "mlp_bias")),
    "iquestcoder": ("IQuestCoderConfig", ROPES, _biased("attention_bias", "mlp_bias")),
    "jais2": ("Jais2Config", ROPES, _biased("attention_bias", "mlp_bias")),
    "ministral": ("MinistralConfig", ROPES, _alternating),
    "ministral3": ("Ministral3Config", (), _ministral3),
    "olmo": ("OlmoConfig", ROPES, _biased("attention_bias")),
    "olmo2": ("Olmo2Config", ROPES, _biased("attention_bias")),
    "olmo3": ("Olmo3Config", (), _alternating),
    "olmo_hybrid": ("OlmoHybridConfig", (), _olmo_hybrid),
    "phi3": ("Phi3Config", (), _phi3),
    "qwen3_5_text": ("Qwen3_5TextConfig", (), _qwen3_5),
    "seed_oss": ("SeedOssConfig", ROPES, _seed_oss),
    "smollm3": ("SmolLM3Config", ROPES, _biased("attention_bias", "mlp_bias")),
    "starcoder2": ("Starcoder2Config", ROPES, _biased("use_bias")),
    "vaultgemma": ("VaultGemmaConfig", ROPES, _alternating),
    "youtu": ("YoutuConfig", (), _youtu),
}
