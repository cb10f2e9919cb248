"""Folders whose config.json is changed key by key: raypar computes what transformers does, or refuses them.

    python -m tests.long.config_keys [TYPE ...]

Of a tiny model of each of the nine types, the config.json that transformers has written is changed in some 80 ways:
each key left out, rope's tables as older and newer versions write them, activations, windows, types of layers, and
flags that few folders have. Weights are three times as large as usual, so that what is read otherwise is seen.
Prints what differs and what is refused though transformers computes it, with the reason. Exit code 1 if logits differ,
or if anything else than a ConfigError is raised.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

import raypar as rp
from raypar.actors.models.build import build_model
from tests.support.quiet_transformers import is_there

SEQ = 12
_SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "pad_token_id": None,
}
_QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", _SIZES),
    "mixtral": ("MixtralConfig", _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", _SIZES | _QWEN),
    "qwen3": ("Qwen3Config", _SIZES | _QWEN),
    "qwen3_moe": ("Qwen3MoeConfig", _SIZES | _EXPERTS),
    "gemma": ("GemmaConfig", _SIZES),
    "gemma2": ("Gemma2Config", _SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 4}),
    "gpt2": ("GPT2Config", {"vocab_size": 29, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16}),
}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 77.0}
_POSITIONS = "original_max_position_embeddings"
ROPES = {  # in place of rope_parameters
    "nothing": {},
    "a base": {"rope_theta": 333.0},
    "older linear": {"rope_theta": 333.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear without a base": {"rope_scaling": _LINEAR},
    "yarn, positions beside": {"rope_scaling": _YARN, _POSITIONS: 8},
    "yarn, positions in both": {"rope_scaling": _YARN | {_POSITIONS: 32}, _POSITIONS: 8},
    "llama3, positions inside": {"rope_scaling": _LLAMA3 | {_POSITIONS: 8}},
    "llama3, positions beside": {"rope_scaling": _LLAMA3, _POSITIONS: 8},
    "llama3, positions in both": {"rope_scaling": _LLAMA3 | {_POSITIONS: 32}, _POSITIONS: 8},
    "a part of each head": {"partial_rotary_factor": 0.5, "rope_scaling": _LINEAR},
    "by type of layer": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "both tables": {"rope_theta": 50.0, "rope_scaling": _LINEAR, "rope_parameters": _PLAIN},
    "a null table": {"rope_theta": 50.0, "rope_scaling": None, "rope_parameters": _PLAIN},
    "an empty table": {"rope_theta": 50.0, "rope_scaling": {}, "rope_parameters": _LINEAR | {"rope_theta": 77.0}},
    "two names": {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
    "dynamic": {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0, _POSITIONS: 4}},
    "dynamic, beside": {
        "max_position_embeddings": 8,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        _POSITIONS: 4,
    },
}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]
_WINDOW = {"sliding_window": 5, "use_sliding_window": True}
FLAGS = {
    "a window": {"sliding_window": 5},
    "an unused window": {"sliding_window": 5, "use_sliding_window": False},
    "a used window": {**_WINDOW, "max_window_layers": 1, "layer_types": ...},
    "a window of one": {"sliding_window": 1},
    "no window": {"sliding_window": None},
    "windows by layer": {**_WINDOW, "layer_types": _KINDS},
    "unused windows by layer": {"sliding_window": 5, "use_sliding_window": False, "layer_types": _KINDS},
    "tied": {"tie_word_embeddings": True},
    "padding from the end": {"pad_token_id": -1},
    "padding": {"pad_token_id": 28},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "no width of heads": {"head_dim": None},
    "pretraining_tp": {"pretraining_tp": 2},
    "caps": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "no caps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "a cap of 0": {"final_logit_softcapping": 0.0},
    "a scale": {"query_pre_attn_scalar": 7.5},
    "eps": {"rms_norm_eps": 0.1, "layer_norm_epsilon": 0.1},
    "normalised gates": {"norm_topk_prob": True},
    "one expert": {"num_experts_per_tok": 1},
    "both directions": {"use_bidirectional_attention": True},
    "a scale by layer": {"scale_attn_by_inverse_layer_idx": True},
    "no decoder": {"is_decoder": False},
    "not causal": {"is_causal": False},
}
_ACTIVATIONS = "gelu", "gelu_new", "silu", "swish", "gelu_pytorch_tanh", "relu", "gelu_fast", "quick_gelu", None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all if none is given")
    asked = parser.parse_args()
    if not is_there():
        return 0
    wrong = [differing(kind) for kind in CONFIGS if not asked.types or kind in asked.types]
    return int(any(wrong))


def differing(kind: str) -> int:
    """Print what differs between a type's changed configs here and in transformers; return how many do."""
    from tests.support.hugging_face import random_model

    name, fields = CONFIGS[kind]
    computed = refused = differ = 0
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(name, fields, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        for what, change in changes(written):
            changed = {key: value for key, value in {**written, **change}.items() if value is not ...}
            (Path(folder) / "config.json").write_text(json.dumps(changed))
            theirs, ours = theirs_of(folder), ours_of(folder)
            if isinstance(theirs, str):
                continue  # transformers refuses it, too
            computed += 1
            if isinstance(ours, str):
                refused += 1
                differ += ours.startswith("RAISED")
                print(f"{kind}, {what}: {ours}")
            elif (far := float((ours - theirs).abs().max())) > 1e-5 * float(theirs.abs().max()):
                differ += 1
                print(f"{kind}, {what}: DIFFERS by {far:.1e} of {float(theirs.abs().max()):.1f}")
    print(f"{kind}: {computed} configs that transformers computes, {refused} refused, {differ} differ", flush=True)
    return differ


def changes(written):
    """Yield the changes of a config, each with a name; ``...`` leaves a key out."""
    yield "as it is", {}
    for key in written:
        yield f"without {key}", {key: ...}
    if "rope_parameters" in written:
        yield from ((f"rope: {name}", {"rope_parameters": ...} | change) for name, change in ROPES.items())
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        yield from ((f"{key} {value}", {key: value}) for value in _ACTIVATIONS)
    yield from FLAGS.items()


def some_ids():
    return torch.randint(29, (2, SEQ), generator=torch.Generator().manual_seed(0))


def theirs_of(folder):
    """Transformers' logits, or why there are none."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            return model.eval()(some_ids(), use_cache=False).logits
    except Exception as error:  # of many kinds
        return repr(error)


def ours_of(folder):
    """raypar's logits, or why there are none."""
    try:
        built = build_model(rp.HF(folder, seq=SEQ), 0)
        values = some_ids()
        with torch.no_grad():
            for layer in built.materialize(range(len(built.names)), 0):
                values = layer.eval()(values)
    except rp.ConfigError as error:
        return f"refused: {error}".replace(f"{folder}", "FOLDER")
    except Exception as error:  # which a config must not cause
        return f"RAISED {error!r}"
    return values


if __name__ == "__main__":
    sys.exit(main())
