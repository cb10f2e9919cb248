"""A checkpoint of any layout becomes a folder of Hugging Face, and that a model of ours again."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.checkpoint.hugging_face import export
from tests.support.hugging_face import CONFIGS, VOCAB, checkpoint_of, logits_of, saved, some_ids
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq": 12, "vocab": VOCAB}
OWN = [
    rp.GPT(**SIZES, mlp=3),
    rp.GPT(**SIZES, qkv_bias=True, gelu="tanh", tied=True),
    rp.Llama(**SIZES, kv_heads=2, norm_eps=1e-3, rope_base=77.0),
    rp.Llama(**SIZES, kv_heads=1, window=4, head_width=6),
    rp.Llama(**SIZES, qkv_bias=True, window=4, window_first=1),
    rp.Llama(**SIZES, qk_norm=True, head_width=6, tied=True),
    rp.Llama(**SIZES, gate="gelu_tanh", scaled_embedding=True, head_width=6),
    rp.Llama(
        **SIZES,
        kv_heads=2,
        gate="gelu_tanh",
        scaled_embedding=True,
        post_norms=True,
        query_scale=3.0,
        window=4,
        window_first=1,
        attention="materialised",
        attention_cap=2.0,
    ),
    rp.Llama(**SIZES, moe=rp.MoE(experts=4, normalise=True)),
    rp.Llama(**SIZES, qk_norm=True, moe=rp.MoE(experts=4, top_k=1, width=12, every=2)),
]
LAYOUTS = [
    (rp.Mesh(pp=2), {}),
    (rp.Mesh(tp=2), {}),
    (rp.Mesh(pp=2, tp=2), {"sequence_parallel": True}),
    (rp.Mesh(dp=2), {"zero": 3}),
]


def batch(step, microbatch, dp):
    ids = some_ids(step + 10 * dp)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def trained(model, mesh=None, **changes):
    """A team that has taken a step."""
    fields = {"data": rp.Batches(batch, batch), "microbatches": 2, "optim": rp.AdamW(lr=1e-2), "timeout": 20.0}
    team = Team.of(rp.Run(model=model, mesh=mesh or rp.Mesh(), **fields | changes))
    team.step(0)
    return team


def loss_of(model):
    """The loss of a model of transformers on what a team evaluates in step 5."""
    ids = [batch(5, microbatch, 0) for microbatch in range(2)]
    with torch.no_grad():
        losses = [cross_entropy(model(one).logits[0], labels[0]).item() for one, labels in ids]
    return sum(losses) / 2


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("mesh", "changes"), LAYOUTS[2:], ids=["pp2 tp2", "zero 3"])
def test_what_was_trained_is_theirs_again(family, mesh, changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    saved(family, tmp_path / "from")
    team = trained(rp.HF(tmp_path / "from", seq=12), mesh, **changes)
    folder = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "to", shard=2000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert theirs.config.model_type == json.loads((tmp_path / "from" / "config.json").read_text())["model_type"]
    found = mean_loss(*losses_of(team.step(5, "evaluate"))) if mesh.dp == 1 else None
    if mesh.dp == 1:
        assert found == pytest.approx(loss_of(theirs), rel=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(logits_of(team, some_ids()), theirs(some_ids()).logits, atol=1e-5, rtol=1e-5)
    else:  # two microbatches of two replicas
        found = losses_of(team.step(5, "evaluate"))[0][::2]
        assert sum(found) / 2 == pytest.approx(loss_of(theirs), rel=1e-5)


@pytest.mark.parametrize("model", OWN, ids=str)
def test_a_model_of_ours_is_theirs(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    team = trained(model)
    folder = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "to")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(team, some_ids()), theirs(some_ids()).logits, atol=1e-5, rtol=1e-5)
    assert mean_loss(*losses_of(team.step(5, "evaluate"))) == pytest.approx(loss_of(theirs), rel=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("model", OWN, ids=str)
def test_what_was_exported_is_read_again_bit_by_bit(model, tmp_path):
    team = trained(model, rp.Mesh(pp=2))
    found = checkpoint_of(team, tmp_path / "checkpoints", 3)
    folder = export(found, tmp_path / "to", loss=1.5, shard=3000)
    again = rp.HF(folder, attention=model.attention, moe=model.moe)
    if model.kind == "gpt":
        model = replace(model, qkv_bias=True)
    full = None if model.kind == "gpt" or model.ffn else model.mlp_width
    kv = {} if model.kind == "gpt" else {"kv_heads": model.num_kv_heads, "ffn": full or model.ffn}
    assert again == replace(model, hf=str(folder), **kv)
    built, weights = build_model(again, 0), team.weights()
    layers = built.materialize(range(len(built.names)), 0)
    compared = 0
    for name, layer in zip(built.names, layers, strict=True):
        for inner, parameter in layer.named_parameters():
            home = dict(map(reversed, built.ties)).get(f"{name}.{inner}", f"{name}.{inner}")
            wanted = weights.get(home)
            wanted_here = torch.zeros_like(parameter) if wanted is None else wanted
            rounded = 2e-7 if "norm" in inner and getattr(model, "gate", None) == "gelu_tanh" else 0.0  # 1 + w
            torch.testing.assert_close(parameter, wanted_here, rtol=0, atol=rounded)
            compared += wanted is not None
    assert compared >= len(weights)
    card = (folder / "README.md").read_text()
    assert "| steps | 3 of 100" in card
    assert "1.5000 nats" in card


@pytest.mark.parametrize(("dtype", "spelled"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_weights_have_the_dtype_that_was_asked_for(dtype, spelled, tmp_path):
    team = trained(OWN[2], precision=rp.Precision("bf16"))
    found = checkpoint_of(team, tmp_path / "checkpoints")
    folder = export(found, tmp_path / "to", dtype)
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {spelled}
    built = build_model(rp.HF(folder), 0)
    (block,) = built.materialize([1], 0)
    wanted = team.weights()["blocks.0.attn.q.weight"]
    torch.testing.assert_close(block.attn.q.weight, wanted.float(), atol=1e-2, rtol=1e-2)


def test_files_of_the_folder_it_came_from_go_along(tmp_path):
    first = export(checkpoint_of(trained(OWN[2]), tmp_path / "one"), tmp_path / "first")
    (first / "generation_config.json").write_text('{"max_length": 7}')
    (first / "tokenizer.json").write_text("{}")
    (first / "run_me.py").write_text("raise SystemExit")
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"eos_token_id": 3, "max_position_embeddings": 4096}))
    second = export(checkpoint_of(trained(rp.HF(first, seq=12)), tmp_path / "two"), tmp_path / "second", "bf16")
    assert {path.name for path in second.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    config = json.loads((second / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"], config["dtype"]) == (3, 4096, "bfloat16")


@pytest.mark.parametrize("named", ["tokenizer", "tokenizer/tokenizer.json"])
def test_of_a_model_from_nothing_the_tokenizer_of_its_data_goes_along(named, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    texts = {
        "tokenizer.json": json.dumps({"added_tokens": [{"id": 5, "content": "<s>"}, {"id": 7, "content": "<end>"}]}),
        "tokenizer_config.json": json.dumps({"eos_token": {"content": "<end>"}}),
        "chat_template.jinja": "its own",
    }
    for name, text in {**texts, "notes.txt": "of the user"}.items():
        (tmp_path / "tokenizer" / name).write_text(text)
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer" / "additional_chat_templates" / "rag.jinja").write_text("named")
    os.mkfifo(tmp_path / "tokenizer" / "additional_chat_templates" / "nobody_writes.jinja")
    (tmp_path / "other.jinja").write_text("other")
    found = checkpoint_of(trained(OWN[2]), tmp_path / "checkpoints")
    for kind, template in (("text", {}), ("examples", {"template": str(tmp_path / "other.jinja")})):
        data = {"kind": kind, "path": "texts", "tokenizer": str(tmp_path / named)} | template
        changed = replace(found, manifest=replace(found.manifest, run={**found.manifest.run, "data": data}))
        folder = export(changed, tmp_path / kind)
        wanted = {"README.md", "config.json", "generation_config.json", "model.safetensors", *texts}
        wanted |= set() if template else {"additional_chat_templates"}
        assert {path.name for path in folder.iterdir()} == wanted
        assert (folder / "tokenizer.json").read_text() == texts["tokenizer.json"]
        assert template or (folder / "additional_chat_templates" / "rag.jinja").read_text() == "named"
        assert (folder / "chat_template.jinja").read_text() == ("other" if template else "its own")
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 7}


@pytest.mark.parametrize(("files", "share"), [(1, 2.0), (2, 0.6)])
def test_two_files_have_an_index_and_one_has_none(files, share, tmp_path):
    found = checkpoint_of(trained(OWN[2]), tmp_path / "checkpoints")
    whole = export(found, tmp_path / "whole")
    size = (whole / "model.safetensors").stat().st_size
    folder = export(found, tmp_path / "to", shard=int(size * share))
    assert len([*folder.glob("*.safetensors")]) == files
    assert (folder / "model.safetensors.index.json").exists() == (files > 1)
    if files > 1:
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(names.values()) == {path.name for path in folder.glob("*.safetensors")}


def test_all_that_can_not_be_exported_is_told_at_once_and_nothing_is_left(tmp_path):
    moe = rp.MoE(experts=4, gate="sigmoid", shared=1, normalise=True)
    found = checkpoint_of(trained(rp.Llama(**SIZES, positions="alibi", moe=moe)), tmp_path / "checkpoints")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "file").touch()
    with pytest.raises(rp.ConfigError) as error:
        export(found, tmp_path / "to")
    assert error.value.faults == [
        f"export: {str(tmp_path / 'to')!r} is there already: give another folder, or remove it first",
        "export: model.positions is 'alibi', and their models of this kind have 'rope'",
        "export: model.moe.gate is 'sigmoid', and their models with experts have 'softmax'",
        "export: model.moe.shared is 1, and their models with experts have 0",
    ]
    found = checkpoint_of(trained(rp.Llama(**SIZES, qkv_bias=True, qk_norm=True)), tmp_path / "others")
    with pytest.raises(rp.ConfigError, match=r"no type of model has model.qk_norm and model.qkv_bias: llama, "):
        export(found, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "others", "to"]


def test_a_checkpoint_that_can_not_be_read_leaves_nothing_behind(tmp_path):
    found = checkpoint_of(trained(OWN[2]), tmp_path / "checkpoints")
    (shard,) = found.path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(rp.CheckpointError):
        export(found, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.sampled
@pytest.mark.parametrize("like", [OWN[1], OWN[2]], ids=["gpt", "llama"])
@pytest.mark.parametrize("mesh", [rp.Mesh(), rp.Mesh(pp=2, tp=2)], ids=["alone", "pp2 tp2"])
def test_adapters_are_merged_into_the_weights_that_they_adapt(like, mesh, tmp_path):
    base = export(checkpoint_of(trained(like), tmp_path / "one"), tmp_path / "base")
    model = rp.HF(base, seq=12, lora=rp.Lora(rank=2))
    team = trained(model, mesh)
    found = checkpoint_of(team, tmp_path / "checkpoints")
    weights = [name for name in found.manifest.tensors if not name.startswith(("optim.", "buffers."))]
    assert weights and all("_lora." in name for name in weights), "checkpoints have only what learns"
    merged = export(found, tmp_path / "merged", shard=3000)
    names = "q, k, v, out, gate, up, down"
    assert f"| learned | low-rank adapters of {names}, rank 2, alpha 16" in (merged / "README.md").read_text()
    again = trained(rp.HF(merged, seq=12), optim=rp.SGD(lr=1e-30))
    torch.testing.assert_close(logits_of(team, some_ids()), logits_of(again, some_ids()), atol=1e-5, rtol=1e-5)
    plain = trained(rp.HF(base, seq=12), optim=rp.SGD(lr=1e-30))
    assert (logits_of(plain, some_ids()) - logits_of(again, some_ids())).abs().max() > 1e-3
    with pytest.raises(rp.ConfigError, match="the adapters are of random weights"):
        export(checkpoint_of(trained(replace(like, lora=rp.Lora())), tmp_path / "random"), tmp_path / "other")
