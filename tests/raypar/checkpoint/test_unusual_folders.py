"""Folders of Hugging Face that are legal and unusual: what transformers makes of them is what a run makes."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch.nn.functional import cross_entropy

import raypar as rp
from raypar.actors.data.examples.example_batches import example_faults
from raypar.actors.data.text.token_batches import text_faults
from raypar.actors.layers.positions import speeds
from raypar.checkpoint.hugging_face import export
from raypar.config.finetuning import shortened_positions
from raypar.config.hugging_face.config_reader import model_of_config
from raypar.config.hugging_face.config_writer import config_of, type_of
from tests.support.beside_transformers import LAYOUTS, compared
from tests.support.examples import made_jsonl
from tests.support.hugging_face import VOCAB, checkpoint_of, logits_of, saved, some_ids
from tests.support.team import Team
from tests.support.tiny_models import native

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 29,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


GPT_2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "vocab_size": 29, "n_positions": 64}
SIZES = {
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "use_sliding_window": True,
    "num_local_experts": 16,
    "num_experts": 16,
    "moe_intermediate_size": 8,
}
LEFT_OUT = {  # by type: what transformers takes where config.json has no such key, and another value
    "llama": {
        "max_position_embeddings": (2048, 32),
        "rms_norm_eps": (1e-6, 1e-3),
        "rope_theta": (1e4, 500.0),
        "tie_word_embeddings": (False, True),
        "attention_dropout": (0.0, 0.5),
    },
    "gemma": {"head_dim": (256, 8), "tie_word_embeddings": (True, False), "pad_token_id": (0, 3)},
    "gemma2": {
        "num_key_value_heads": (4, 2),
        "query_pre_attn_scalar": (256, 8),
        "attn_logit_softcapping": (50.0, 20.0),
        "final_logit_softcapping": (30.0, 20.0),
        "sliding_window": (4096, 32),
    },
    "gpt2": {"layer_norm_epsilon": (1e-5, 1e-3), "tie_word_embeddings": (True, False)},
    "mistral": {"num_key_value_heads": (8, 4), "sliding_window": (4096, 32)},
    "mixtral": {
        "num_key_value_heads": (8, 4),
        "rms_norm_eps": (1e-5, 1e-3),
        "rope_theta": (1e6, 500.0),
        "num_experts_per_tok": (2, 3),
        "router_aux_loss_coef": (0.001, 0.5),
    },
    "qwen2": {"max_window_layers": (28, 3), "sliding_window": (4096, 32)},
    "qwen3": {"head_dim": (128, 8), "max_window_layers": (28, 3), "sliding_window": (4096, 32)},
    "qwen3_moe": {
        "num_key_value_heads": (4, 2),
        "num_experts_per_tok": (8, 3),
        "norm_topk_prob": (False, True),
        "decoder_sparse_step": (1, 2),
        "router_aux_loss_coef": (0.001, 0.5),
        "sliding_window": (4096, 32),
    },
}


def batch(step, microbatch, dp):
    ids = some_ids(step + 10 * dp)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def team_of(folder, mesh=None, data=batch, **changes):
    fields = {"data": rp.Batches(data, data), "microbatches": 2, "optim": rp.AdamW(lr=1e-2), "timeout": 20.0}
    return Team.of(rp.Run(model=rp.HF(folder, seq=12), mesh=mesh or rp.Mesh(), **fields | changes))


def of_config(**changes):
    """What is read of a config.json, and what is wrong with it."""
    return model_of_config(LLAMA | changes, {})


def scaled(kind, **fields):
    return of_config(rope_scaling={"rope_type": kind, **fields})


def test_dynamic_angles_go_by_the_positions_of_the_model_alone():
    model, faults = scaled("dynamic", factor=3.0, original_max_position_embeddings=16)
    assert (faults, model.rope_scaling.trained) == ([], 64)


def test_an_export_keeps_what_dynamic_angles_go_by():
    scaling = rp.RopeScaling("dynamic", factor=3.0, trained=16)
    config = config_of(rp.Llama(seq=24, rope_scaling=scaling), "llama", {}, "float32")
    assert config["max_position_embeddings"] == 16
    assert config["rope_scaling"] == config["rope_parameters"]
    assert config["rope_scaling"] == {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    assert config_of(rp.Llama(seq=24), "llama", {}, "float32")["rope_scaling"] is None


def test_yarn_without_a_factor_has_that_of_the_positions():
    model, faults = scaled("yarn", factor=None, original_max_position_embeddings=16)
    assert (faults, model.rope_scaling.factor) == ([], 4.0)


def test_yarn_has_the_angles_of_transformers_where_no_pair_turns_often_enough():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 77.5, "factor": 1.5, "truncate": False}
    rope["original_max_position_embeddings"] = 6
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, head_dim=10, rope_parameters=rope)
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found = speeds(10, 77.5, rp.RopeScaling("yarn", factor=1.5, trained=6, truncate=False))
    torch.testing.assert_close(found.float(), wanted)


@pytest.mark.parametrize(
    ("kind", "fields", "missing"),
    [
        ("linear", {}, "factor"),
        ("dynamic", {"original_max_position_embeddings": 16}, "factor"),
        ("yarn", {"original_max_position_embeddings": 16}, "factor"),
        ("llama3", {"factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_a_type_without_what_it_needs_is_refused(kind, fields, missing):
    _, faults = scaled(kind, **fields)
    assert f"rope_scaling of type {kind!r} has no {missing}: copy it again" in faults


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_windows_of_experts_are_in_every_block(kind):
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_experts": 4}
    model, faults = of_config(model_type=kind, moe_intermediate_size=8, **fields)
    assert not faults
    assert [model.window_of(block) for block in range(2)] == [5 if kind == "qwen3_moe" else None, 5]


def test_experts_with_windows_in_some_blocks_are_no_type_of_theirs():
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "qk_norm": True, "moe": rp.MoE(experts=4)}
    assert type_of(rp.Llama(**sizes, window=4))[0] == "qwen3_moe"
    kind, (fault,) = type_of(rp.Llama(**sizes, window=4, window_first=1))
    assert kind is None
    assert "model.window_first" in fault


def test_a_gemma_2_without_windows_has_one_that_no_block_uses():
    model = rp.Llama(
        layers=2, hidden=16, heads=4, gate="gelu_tanh", scaled_embedding=True, post_norms=True, attention="materialised"
    )
    config = config_of(model, "gemma2", {}, "float32")
    assert config["sliding_window"] == 4096
    assert config["layer_types"] == ["full_attention"] * 2


def test_settings_without_an_effect_stay_as_they_were():
    model, _ = of_config(model_type="qwen2", use_sliding_window=False, max_window_layers=28)
    begun = {"model_type": "qwen2", "max_window_layers": 28}
    assert config_of(model, "qwen2", begun, "float32")["max_window_layers"] == 28
    model, _ = of_config(
        model_type="qwen3_moe", use_sliding_window=True, sliding_window=5, moe_intermediate_size=8, num_experts=4
    )
    begun = {"model_type": "qwen3_moe", "max_window_layers": 28}
    assert config_of(model, "qwen3_moe", begun, "float32")["max_window_layers"] == 28


@pytest.mark.parametrize(("number", "layout"), [(3, "cp 2"), (8, "ep 2")])
def test_unusual_configs_have_the_numbers_of_transformers(number, layout, tmp_path):
    pytest.importorskip("transformers")
    found = compared(native(0, number), tmp_path, {layout: LAYOUTS[layout]})
    assert (found.wrong, found.refused) == ([], {})


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in LEFT_OUT.items() for key in keys])
def test_a_key_that_a_file_leaves_out_has_the_value_of_transformers(kind, key):
    default, other = LEFT_OUT[kind][key]
    given = (GPT_2 if kind == "gpt2" else LLAMA | SIZES) | {"model_type": kind}
    changes = {"dropout": 0.1} if kind == "gpt2" else {}
    given.pop(key, None)
    without, with_default, with_other = (
        model_of_config(given | more, changes) for more in ({}, {key: default}, {key: other})
    )
    assert without == with_default
    assert without[1] == with_other[1] == []
    assert without[0] != with_other[0], "the key says something"


def test_the_defaults_of_files_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    wrong = []
    for kind, keys in LEFT_OUT.items():
        slides = {"use_sliding_window": True} if kind.startswith("qwen") else {}
        theirs = transformers.CONFIG_MAPPING[kind](**slides).to_dict()
        theirs |= theirs.get("rope_parameters") or {}
        wrong += [(kind, key, theirs[key]) for key, (default, _) in keys.items() if theirs[key] != default]
    assert wrong == []


LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
INSIDE = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "config", [{"rope_scaling": LLAMA_3}, {"rope_scaling": LLAMA_3 | INSIDE}, {"rope_parameters": LLAMA_3 | INSIDE}]
)
def test_positions_of_an_earlier_training_beside_the_table_of_angles_go_before_those_inside(config):
    model, faults = of_config(**config, original_max_position_embeddings=8)
    assert (faults, model.rope_scaling.trained) == ([], 8)


def test_an_empty_table_of_angles_is_none():
    model, _ = of_config(rope_scaling={}, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0})
    assert (model.rope_scaling.factor, model.rope_base) == (3.0, 7.0)


def test_a_mixtral_has_its_window_in_every_block():
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    windows = {}
    for kind in ("mistral", "mixtral"):
        model, _ = of_config(model_type=kind, num_local_experts=4, num_key_value_heads=2, **kinds)
        windows[kind] = [model.window_of(block) for block in range(2)]
    assert windows == {"mistral": [None, 5], "mixtral": [5, 5]}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"is_causal": False}, "is_causal is False"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(config, fault):
    model, faults = of_config(**config)
    assert model is None
    assert faults[0].startswith(fault)


def test_a_gpt_2_drops_a_tenth_where_its_file_does_not_say():
    assert model_of_config(GPT_2, {})[0].dropout == 0.1


def test_the_token_of_padding_is_read_and_written():
    assert of_config(pad_token_id=3)[0].pad_id == 3
    assert of_config(pad_token_id=-1)[0].pad_id == 28
    assert of_config()[0].pad_id is None
    gemma = {"model_type": "gemma", "head_dim": 4}
    assert of_config(**gemma)[0].pad_id == 0
    assert of_config(**gemma, pad_token_id=None)[0].pad_id is None
    assert config_of(rp.Llama(pad_id=2), "llama", {}, "float32")["pad_token_id"] == 2
    (fault,) = rp.faults(rp.Run(model=rp.Llama(vocab=256, pad_id=256)))
    assert fault.startswith("model.pad_id is 256, and the model's ids are 0 to 255")


@pytest.mark.parametrize("mesh", [rp.Mesh(), rp.Mesh(pp=2), rp.Mesh(tp=2)], ids=str)
@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_padding_gives_its_vector_no_gradient(family, mesh, tmp_path):
    """Inputs of 0, the token of padding, are a third of all; a tied head still moves its vector."""
    pytest.importorskip("transformers")
    theirs = saved(family, tmp_path, pad_token_id=0)

    def padded(step, microbatch, dp):
        ids, labels = batch(step, microbatch, dp)
        ids[:, ::3] = 0
        return ids, labels

    team = team_of(tmp_path, mesh, padded, clip=None)
    team.step(0)
    for microbatch in range(2):
        ids, labels = padded(0, microbatch, 0)
        (cross_entropy(theirs(ids).logits[0], labels[0]) / 2).backward()
    wanted = theirs.model.embed_tokens.weight.grad
    found = team.gradients()["embed.tokens.weight"]
    assert (wanted[0].abs().max() > 0) == (family == "gemma"), "of the tied head alone"
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", ["smollm2", "gemma"])
def test_a_head_of_its_own_beside_a_tied_one_is_kept(family, tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    saved(family, tmp_path, shard="1GB")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_tied in ((embedding.clone(), True), (embedding * 0.5 + 0.1, False)):
        metadata = {"format": "pt"}
        safetensors.save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata=metadata)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "raypar"):
            assert rp.HF(tmp_path).tied == is_tied
        assert bool(caplog.messages) != is_tied
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        with torch.no_grad():
            torch.testing.assert_close(logits_of(team_of(tmp_path), some_ids()), theirs(some_ids()).logits, **CLOSE)


def test_one_whole_file_counts_and_not_an_index_beside_it(tmp_path):
    pytest.importorskip("transformers")
    saved("llama", tmp_path, shard="1GB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gone": "gone.safetensors"}}))
    assert rp.HF(tmp_path).layers == 3


def test_positions_that_a_shorter_run_did_not_train_stay(tmp_path):
    transformers = pytest.importorskip("transformers")
    begun = saved("gpt2", tmp_path / "from")
    team = team_of(tmp_path / "from")
    team.step(0)
    folder = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "to", shard=2000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before, after = (model.transformer.wpe.weight for model in (begun, theirs))
    assert theirs.config.n_positions == 16
    assert torch.equal(before[12:], after[12:])
    assert not torch.equal(before[:12], after[:12])
    with torch.no_grad():
        torch.testing.assert_close(logits_of(team, some_ids()), theirs(some_ids()).logits, **CLOSE)
    assert theirs.config.vocab_size == VOCAB


def test_fine_tuning_says_which_positions_it_leaves_as_they_are(tmp_path):
    model = rp.GPT(layers=1, hidden=16, heads=4, seq=16, vocab=VOCAB, tied=True, qkv_bias=True)
    team = Team.of(rp.Run(model=model, data=rp.Batches(batch), microbatches=2))
    folder = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "to")
    told = shortened_positions(rp.Run(model=rp.HF(folder, seq=12), data=rp.Batches(batch)))
    assert told.startswith("the model has 16 positions, and sequences of 12 tokens train the first alone")
    assert shortened_positions(rp.Run(model=rp.HF(folder), data=rp.Batches(batch))) is None
    assert shortened_positions(rp.Run(model=rp.Llama())) is None


# --- what an export says of its data, and what is said of a tokenizer that does not fit ------------------------------


def card_of(tmp_path, step):
    model = rp.Llama(layers=1, hidden=16, heads=2, seq=12, vocab=VOCAB)
    team = Team.of(rp.Run(model=model, data=rp.Batches(batch), microbatches=1, timeout=20.0))
    return (export(checkpoint_of(team, tmp_path / "from", step), tmp_path / "to") / "README.md").read_text()


def test_the_card_names_no_data_that_were_not_used(tmp_path):
    assert "| data | batches of a function |" in card_of(tmp_path / "one", 1)
    assert "| data | none, as no step was taken |" in card_of(tmp_path / "none", 0)


@pytest.mark.parametrize("examples", [True, False], ids=["examples", "text"])
def test_a_tokenizer_that_is_larger_than_the_embedding_of_a_folder(tmp_path, examples):
    """To set another vocabulary, which is the folder's, would fail."""
    folder = str(tmp_path / "model")
    text = tmp_path / "data.txt"
    text.write_text("z" * 4000)
    path = made_jsonl(tmp_path / "data.jsonl", [{"text": "zzzz"}] * 5)
    cache = str(tmp_path / "cache")
    if examples:
        (fault,) = example_faults(rp.Examples(str(path), cache=cache), 8, 100, folder)
    else:
        (fault,) = text_faults(rp.Text(str(text)), 8, 100, folder)
    fix = (
        f"use the tokenizer in {folder!r}, or resize the embedding in transformers first (model.resize_token_embeddings"
    )
    assert f"is 122, but model.vocab is 100: {fix}(256), and save_pretrained)" in fault
