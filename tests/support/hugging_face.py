"""Tiny models of transformers with random weights, in folders as save_pretrained writes them."""

from __future__ import annotations

import torch

from raypar.actors.checkpoint.reports import written_of
from raypar.checkpoint import Save, manifest_of, verified
from raypar.checkpoint.base import base_weights_fingerprint
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.config.toml import plain_of
from tests.support.threads import in_threads

VOCAB, LAYERS = 29, 3
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
_SCALED = {"rope_theta": 500.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 6}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": LAYERS, "n_head": 4, "n_positions": 16}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GEMMA = _LLAMA | {"head_dim": 6, "pad_token_id": None}
CONFIGS = {  # of every family: the class of its config and what differs from the defaults
    "gpt2": ("GPT2Config", _GPT2),
    "llama": ("LlamaConfig", _LLAMA | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
    "llama 3": ("LlamaConfig", _LLAMA | {"rope_parameters": _SCALED | {"rope_type": "llama3", "factor": 8.0}}),
    "yarn": ("Qwen2Config", _LLAMA | {"rope_parameters": _SCALED | {"rope_type": "yarn", "factor": 4.0}}),
    "dynamic": (
        "LlamaConfig",
        _LLAMA
        | {"max_position_embeddings": 8}
        | {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "yarn without factor": (
        "LlamaConfig",
        _LLAMA | {"rope_parameters": _SCALED | {"rope_type": "yarn", "factor": None}},
    ),
    "smollm2": ("LlamaConfig", _LLAMA | {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", _GEMMA | {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        _GEMMA
        | {"sliding_window": 5, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 1.5}
        | {"final_logit_softcapping": 4.0},
    ),
    "gemma2 without windows": ("Gemma2Config", _GEMMA | {"layer_types": ["full_attention"] * LAYERS}),
    "mistral": ("MistralConfig", _LLAMA | {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2Config", _LLAMA | {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "Qwen2Config",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", _LLAMA | {"head_dim": 6, "num_attention_heads": 6, "rms_norm_eps": 1e-3}),
    "mixtral": ("MixtralConfig", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", _LLAMA | _MOE),
    "qwen3_moe with windows": (
        "Qwen3MoeConfig",
        _LLAMA | _MOE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
}


def their_model(family, **changes):
    """A model of transformers with random weights that are large enough for a mistake to be seen, biases too."""
    name, fields = CONFIGS[family]
    return random_model(name, fields | changes)


def random_model(name, fields, seed=7):
    """Such a model, of a config of this class with these settings."""
    import transformers

    config = getattr(transformers, name)(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    model.tie_weights()
    return model


def saved(family, folder, shard="1KB", **changes):
    """A folder with such a model; and the model."""
    model = their_model(family, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def checkpoint_of(team, folder, step=1):
    """The checkpoint that a team saves."""
    with Save(folder, step) as save:
        team.each(lambda actor: actor.stage())
        written = team.each(lambda actor: actor.write(str(save.path)))
        assert not [one for one in written if isinstance(one, Exception)]
        reports = [one for one in written if one is not None]
        about = step, team.run.seed, plain_of(team.run)
        path = save.commit(manifest_of(*about, written_of(reports), base_weights_fingerprint(team.run)))
    return VerifiedCheckpoint(path, verified(path))


def some_ids(seed=0, samples=4, tokens=12):
    return torch.randint(VOCAB, (samples, tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(team, ids):
    """The whole logits that the layers of a team compute; it has one replica."""
    groups = {team.world.pp(rank): team.world.tensor_group(rank) for rank in range(team.world.size)}

    def part(index):
        x = ids
        for pp in sorted(groups):
            for stage in team.all[groups[pp][index]].stages.values():
                for module in stage.modules:
                    x = module.eval()(x)
        return x

    return torch.cat(in_threads(range(len(groups[0])), torch.no_grad()(part)), -1)
