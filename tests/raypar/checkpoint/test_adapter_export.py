"""Adapters as a folder of PEFT: what its formula makes of them is what the export merges."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import raypar as rp
from raypar.checkpoint.adapter_export import export_adapter
from raypar.checkpoint.hugging_face import export
from raypar.cli.checkpoints import ExportArgs
from raypar.cli.checkpoints import run_export as export_words
from tests.support.hugging_face import VOCAB, checkpoint_of, some_ids
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq": 12, "vocab": VOCAB}
LLAMA = rp.Llama(**SIZES, kv_heads=2, ffn=24)


def batch(step, microbatch, dp):
    ids = some_ids(step)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def team_of(model, mesh=None, **changes):
    fields = {"data": rp.Batches(batch, batch), "microbatches": 2, "timeout": 20.0, "optim": rp.AdamW(lr=1e-2)}
    return Team.of(rp.Run(model=model, mesh=mesh or rp.Mesh(), **fields | changes))


def base(model, home):
    return export(checkpoint_of(team_of(model), home / "base saved"), home / "base")


@pytest.mark.each_value
@pytest.mark.parametrize("targets", ["all", "attn"])
@pytest.mark.parametrize("mesh, changes", [(rp.Mesh(pp=2, tp=2), {}), (rp.Mesh(dp=2), {"zero": 3})], ids=["tp", "zero"])
def test_the_formula_of_peft_gives_what_is_merged(mesh, changes, targets, tmp_path):
    folder = base(LLAMA, tmp_path)
    team = team_of(rp.HF(folder, seq=12, lora=rp.Lora(rank=3, alpha=6.0, targets=targets)), mesh, **changes)
    team.step(0)
    team.step(1)
    found = checkpoint_of(team, tmp_path / "saved")
    adapter, merged = export_adapter(found, tmp_path / "adapter"), export(found, tmp_path / "merged")
    told = json.loads((adapter / "adapter_config.json").read_text())
    own, whole = load_file(folder / "model.safetensors"), load_file(merged / "model.safetensors")
    kept = load_file(adapter / "adapter_model.safetensors")
    of_attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    wanted = of_attention | ({"gate_proj", "up_proj", "down_proj"} if targets == "all" else set())
    assert {*told["target_modules"]} == wanted and (told["r"], told["lora_alpha"]) == (3, 6.0)
    assert len(kept) == 2 * 2 * len(wanted) and told["base_model_name_or_path"] == str(folder)
    for name, weight in own.items():
        module = name.removesuffix(".weight")
        at = f"base_model.model.{module}"
        if f"{at}.lora_A.weight" in kept:
            assert module.rpartition(".")[2] in wanted
            a, b = kept.pop(f"{at}.lora_A.weight"), kept.pop(f"{at}.lora_B.weight")
            assert a.shape[0] == b.shape[1] == 3
            weight = weight + told["lora_alpha"] / told["r"] * (b @ a)
            assert (weight - own[name]).abs().max() > 1e-4
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-6)
    assert not kept
    told = export_words(ExportArgs((found.path, tmp_path / "again"), adapter=True)).text
    assert told == f"{tmp_path / 'again'}: the adapters after 1 steps; PEFT loads them"
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    first = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(again[name], first[name]) for name in first)
    lora = rp.Lora(rank=3, alpha=6.0, targets=targets, hf=str(adapter))
    other = rp.Mesh(tp=2) if changes else rp.Mesh(dp=2)
    begun = team_of(rp.HF(folder, seq=12, lora=lora), other, zero=0 if changes else 3)
    home = export_adapter(checkpoint_of(begun, tmp_path / "begun"), tmp_path / "home")
    back = load_file(home / "adapter_model.safetensors")
    assert back.keys() == first.keys() and all(torch.equal(back[name], first[name]) for name in first)


def test_what_is_no_adapter_of_peft_is_refused(tmp_path):
    found = checkpoint_of(team_of(LLAMA), tmp_path / "whole")
    with pytest.raises(rp.ConfigError, match="has no adapters: leave adapter out, which exports all weights"):
        export_adapter(found, tmp_path / "a")
    folder = base(rp.GPT(**SIZES, qkv_bias=True), tmp_path)
    team = team_of(rp.HF(folder, seq=12, lora=rp.Lora(rank=2)))
    team.step(0)
    found = checkpoint_of(team, tmp_path / "parts")
    with pytest.raises(rp.ConfigError, match=r"a gpt2 has .*c_attn.weight in one, of which blocks.0.attn.k.weight is"):
        export_adapter(found, tmp_path / "b")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    other = replace(LLAMA, lora=rp.Lora())
    with pytest.raises(rp.ConfigError) as raised:
        export_adapter(checkpoint_of(team_of(other), tmp_path / "random"), tmp_path / "taken")
    assert len(raised.value.faults) == 2, raised.value.faults
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def adapter(home, config, **changes):
    """A folder as PEFT writes it of a Llama of SIZES, with changed tensors; those that are None are left out."""
    home.mkdir()
    inside, widths = {}, {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16)}
    for block in range(2):
        for name, (wide, out) in widths.items():
            at = f"base_model.model.model.layers.{block}.self_attn.{name}_proj"
            inside |= {f"{at}.lora_A.weight": torch.ones(2, wide), f"{at}.lora_B.weight": torch.ones(out, 2)}
    inside = {name: tensor for name, tensor in (inside | changes).items() if tensor is not None}
    save_file(inside, home / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_dora": False, "modules_to_save": None}
    (home / "adapter_config.json").write_text(json.dumps(peft | config))
    return home


def test_an_adapter_that_does_not_fit_is_refused_with_all_that_differs(tmp_path):
    folder = base(LLAMA, tmp_path)
    fits = rp.Lora(rank=2, alpha=4.0, targets="attn")

    def faults(home, lora=fits, folder=folder):
        model = replace(rp.HF(folder, seq=12) if folder else LLAMA, lora=replace(lora, hf=str(home)))
        return rp.faults(rp.Run(model=model, data=rp.Batches(batch)))

    assert not faults(adapter(tmp_path / "right", {}))
    assert not faults(adapter(tmp_path / "stabilised", {"use_rslora": True, "lora_alpha": 8**0.5}))
    for number, (setting, value) in enumerate(
        {"init_lora_weights": "pissa", "alora_invocation_tokens": [5], "of_a_later_peft": {"a": 1}}.items()
    ):
        (told,) = faults(adapter(tmp_path / f"unlike{number}", {setting: value}))
        assert f"{setting} is " in told and told.endswith("merge it into its model with peft")
    unused = {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "layers_to_transform": None, "kasa_config": None}
    assert not faults(adapter(tmp_path / "unused", unused))
    right = tmp_path / "right"
    assert faults(right, rp.Lora(rank=3, alpha=3.0, targets="all")) == [
        f"model.lora.hf {str(right)!r}: {fault}"
        for fault in (
            "its rank is 2, and model.lora.rank is 3: set model.lora.rank to 2",
            "it adds its product times 2, and model.lora.alpha / rank is 1.5: set model.lora.alpha to 4",
            "it has the adapters of 'attn', and model.lora.targets is 'all': set it to 'attn'",
        )
    ]
    at = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    others = {at.format(block, part, half): None for block in range(2) for part in "ko" for half in "AB"}
    some = adapter(tmp_path / "some", {}, **others)
    assert not faults(some, replace(fits, targets=("q", "v")))
    (told,) = faults(some)
    assert told.endswith("it has the adapters of ('q', 'v'), and model.lora.targets is 'attn': set it to ('q', 'v')")
    (alone,) = faults(right, folder=None)
    assert alone.startswith("model.lora.hf is given, and adapters belong to the weights of a model: give model.hf")
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    other = {q: torch.ones(2, 15), q.replace("_A", "_B"): None, "more": torch.ones(1)}
    told = faults(adapter(tmp_path / "other", {"use_dora": True, "bias": "all"}, **other))
    says = ["bias is 'all'", "use_dora is True", "tensors are missing", "it has tensors", "tensors are of another"]
    assert [fault.split(": ", 1)[1].startswith(says[at]) for at, fault in enumerate(told)] == [True] * 5, told
    (tmp_path / "empty").mkdir()
    (told,) = faults(tmp_path / "empty")
    assert (
        "empty' is an empty folder: an adapter's folder has adapter_config.json and adapter_model.safetensors" in told
    )
    pickled = adapter(tmp_path / "pickle", {})
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "a pickle, which can run code and is not read: load it with peft, and write it with" in faults(pickled)[0]
    torn = adapter(tmp_path / "torn", {"r": "8"}) / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-8])
    assert "ends early, 8 bytes are missing: copy it again" in faults(torn.parent)[0]
    assert "adapter_config.json has r '8' and lora_alpha 4" in faults(torn.parent)[1]
    team = team_of(rp.HF(folder, seq=12, lora=fits))
    team.step(0)
    made = export_adapter(checkpoint_of(team, tmp_path / "trained"), tmp_path / "made")
    assert not faults(made)
    save_file(
        {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors",
    )
    assert "it was trained on other weights than those of model.hf" in faults(made)[0]
