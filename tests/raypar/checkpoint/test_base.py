"""Adapters go on only with the model that they were trained on, and that is told before any actor starts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.hugging_face.fingerprint import fingerprint
from raypar.checkpoint.hugging_face import export
from raypar.job.start.resume import prepared
from tests.support.hugging_face import VOCAB, checkpoint_of, some_ids
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 12, "vocab": VOCAB}


def batch(step, microbatch, dp):
    ids = some_ids(step)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def run_of(model, **changes):
    return rp.Run(model=model, data=rp.Batches(batch, batch), microbatches=2, timeout=20.0, **{"steps": 3} | changes)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of models: two of the same shapes, others of other shapes, and one of them in several files and bf16."""
    home = tmp_path_factory.mktemp("bases")
    kinds = {"own": ({}, 0), "other weights": ({}, 1), "wide": ({"hidden": 32}, 0), "deep": ({"layers": 3}, 0)}
    for name, (changes, seed) in kinds.items():
        team = Team.of(run_of(rp.Llama(**SIZES | changes), seed=seed))
        found = checkpoint_of(team, home / f"saved {name}")
        export(found, home / name)
        if name == "own":
            export(found, home / "in bf16", "bf16", shard=2000)
    shutil.copytree(home / "own", home / "moved")
    return home


@pytest.fixture(scope="module")
def adapters(bases, tmp_path_factory):
    team = Team.of(run_of(rp.HF(bases / "own", lora=rp.Lora(rank=2))))
    team.step(0)
    return checkpoint_of(team, tmp_path_factory.mktemp("adapters"))


def faults(run, found):
    with pytest.raises(rp.ConfigError) as raised:
        prepared(run, found)
    at = f"resume {str(found.path)!r}: "
    assert all(fault.startswith(at) for fault in raised.value.faults)
    return [fault.removeprefix(at) for fault in raised.value.faults]


def test_a_copy_has_the_same_fingerprint_and_another_model_has_not(bases):
    names = ["own", "moved", "in bf16", "other weights", "wide", "deep"]
    made = [fingerprint(bases / name) for name in names]
    assert made[0] == made[1] == made[2] and len({*made[2:]}) == 4


@pytest.mark.parametrize("name", ["own", "moved", "in bf16"])
def test_adapters_go_on_with_their_model_wherever_it_is(name, bases, adapters):
    prepared(run_of(rp.HF(bases / name, lora=rp.Lora(rank=2))), adapters)


def test_weights_of_another_model_of_the_same_shapes_are_refused(bases, adapters):
    folder = str(bases / "other weights")
    told = f"model.hf {folder!r} has other weights than those that the adapters were trained on"
    run = run_of(rp.HF(folder, lora=rp.Lora(rank=2)))
    assert faults(run, adapters) == [f"{told}: give the folder of that model, or a copy of it"]


@pytest.mark.parametrize(
    "name, lora, changes, told",
    [
        ("wide", rp.Lora(rank=2), {}, ["model.hidden is 32, but 16 in the checkpoint: give the same"]),
        ("deep", rp.Lora(rank=2), {}, ["model.layers is 3, but 2 in the checkpoint: give the same"]),
        ("own", rp.Lora(rank=3), {}, ["model.lora.rank is 3, but 2 in the checkpoint: give the same"]),
        (
            "own",
            rp.Lora(rank=2, targets="attn"),
            {},
            ["model.lora.targets is 'attn', but 'all' in the checkpoint: give the same"],
        ),
        (
            "wide",
            rp.Lora(rank=3, alpha=1.0),
            {"seed": 4},
            [
                "model.hidden is 32, but 16 in the checkpoint: give the same",
                "model.lora.rank is 3, but 2 in the checkpoint: give the same",
                "model.lora.alpha is 1.0, but 16.0 in the checkpoint: give the same",
                "seed is 4, but 0 in the checkpoint: give the same",
            ],
        ),
        (
            "own",
            None,
            {},
            [
                "model.lora is None, but the checkpoint has adapters alone: give model.lora as it was (rank 2), or "
                "train what raypar ckpt export has merged"
            ],
        ),
    ],
)
def test_what_does_not_fit_is_listed(name, lora, changes, told, bases, adapters):
    assert faults(run_of(rp.HF(bases / name, lora=lora), **changes), adapters) == told


def test_a_checkpoint_without_adapters_is_told_once(bases, tmp_path):
    model = rp.HF(bases / "own")
    found = checkpoint_of(Team.of(run_of(model)), tmp_path)
    assert faults(run_of(replace(model, lora=rp.Lora())), found) == [
        "model.lora is given, but the checkpoint has all weights and no adapters: leave model.lora out, or train "
        "adapters of the folder that raypar ckpt export writes of it"
    ]


def test_an_export_merges_adapters_with_no_other_weights(bases, adapters, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bases / "own", folder)
    team = Team.of(run_of(rp.HF(folder, lora=rp.Lora(rank=2))))
    team.step(0)
    found = checkpoint_of(team, tmp_path / "saved")
    shutil.rmtree(folder)
    shutil.copytree(bases / "other weights", folder)
    with pytest.raises(rp.ConfigError, match="has other weights than those that the adapters were trained on"):
        export(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_an_adapter_of_peft_is_no_model(bases, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    shutil.copy(bases / "own" / "config.json", tmp_path)
    with pytest.raises(
        rp.ConfigError,
        match=r"holds an adapter, and not the model: give the model's folder, and this one as model.lora.hf",
    ):
        rp.HF(tmp_path)
