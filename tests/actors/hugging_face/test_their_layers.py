"""Types of models that raypar has not compute with the modules of transformers, alone and divided, on threads."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import raypar as rp
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.checkpoint.hugging_face import export
from raypar.config.conflicts.generation import generation_faults
from raypar.config.toml import plain_of, run_of
from raypar.job.text.scoring import scores
from tests.support.beside_transformers import LAYOUTS, compared
from tests.support.generation import TeamGeneration
from tests.support.hugging_face import _LLAMA, CONFIGS, checkpoint_of, logits_of, random_model, saved, some_ids
from tests.support.team import Team
from tests.support.tiny_models import Tiny, other

pytest.importorskip("transformers")

OTHERS = {  # plans that gather and split, that fuse projections, that scale what goes in and out, other norms
    "olmo2": ("Olmo2Config", _LLAMA),
    "phi3": ("Phi3Config", _LLAMA | {"pad_token_id": None, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", _LLAMA | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "cohere": (
        "CohereConfig",
        _LLAMA | {"logit_scale": 0.5, "pad_token_id": None, "vocab_size": 64, "tie_word_embeddings": False},
    ),
}


@pytest.fixture(scope="module", params=OTHERS)
def given(request, tmp_path_factory):
    """A folder, and the model in it."""
    CONFIGS[request.param] = OTHERS[request.param]
    try:
        folder = tmp_path_factory.mktemp("hf")
        return folder, saved(request.param, folder)
    finally:
        del CONFIGS[request.param]


def batch(step, microbatch, dp):
    ids = some_ids(step + 10 * dp)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def team_of(folder, mesh, **changes):
    fields = {"model": rp.HF(folder, seq=12), "data": rp.Batches(batch, batch), "microbatches": 2, "timeout": 20.0}
    return Team.of(rp.Run(mesh=mesh, **{"optim": rp.AdamW(lr=1e-2)} | fields | changes))


@pytest.mark.parametrize("mesh", [rp.Mesh(), rp.Mesh(pp=2), rp.Mesh(tp=2), rp.Mesh(pp=2, tp=2)], ids=str)
def test_the_logits_are_theirs_and_so_is_what_was_trained(given, mesh, tmp_path):
    import transformers

    folder, theirs = given
    team = team_of(folder, mesh)
    with torch.no_grad():
        wanted = theirs(some_ids()).logits
    found = logits_of(team, some_ids())[..., : wanted.shape[-1]]  # every tensor rank has all of them
    assert wanted.std() > 0.05
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    team.step(0)
    out = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "to", shard=2000)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        trained = [again(batch(5, number, 0)[0]).logits for number in range(2)]
        assert (again(some_ids()).logits - wanted).abs().max() > 1e-3
    losses = [cross_entropy(one[0], batch(5, number, 0)[1][0]).item() for number, one in enumerate(trained)]
    assert mean_loss(*losses_of(team.step(5, "evaluate"))) == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_layouts_learn_the_same(given):
    folder, _ = given

    def weights(mesh=None, **changes):
        team = team_of(folder, mesh or rp.Mesh(), **changes)
        team.step(0)
        return dict(team.weights())

    plain = weights(optim=rp.SGD(lr=0.5))
    divided = weights(rp.Mesh(pp=2, tp=2), optim=rp.SGD(lr=0.5))
    for name, weight in plain.items():
        torch.testing.assert_close(divided[name], weight, atol=1e-5, rtol=1e-4)


def test_what_transformers_can_not_give_is_told_with_what_would_work(given, tmp_path):
    folder, _ = given
    config = json.loads((folder / "config.json").read_text())

    def faults(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(rp.ConfigError) as error:
            rp.HF(tmp_path)
        return "\n".join(error.value.faults)

    assert "its base_model_pp_plan has not an embedding, blocks and a norm. Give one of" in faults(
        model_type="stablelm"
    )
    assert "transformers has no model of this type; 'mixtral' is the nearest" in faults(model_type="mixtral8")
    assert "it has attention_dropout, which actors would draw apart: give dropout=0.0" in faults(attention_dropout=0.1)
    assert "Validation error for field 'hidden_size'" in faults(hidden_size="a")
    with pytest.raises(rp.ConfigError, match="seq is 99, and the model has 64 positions: give 64 at most"):
        rp.HF(folder, seq=99)
    assert rp.HF(folder, dropout=0.0).hf == str(folder)
    with pytest.raises(
        rp.ConfigError, match="modules of transformers have no adapters here: leave it out, all weights"
    ):
        rp.HF(folder, lora=rp.Lora())


def test_replicas_share_their_weights(given):
    folder, theirs = given
    losses, _ = losses_of(team_of(folder, rp.Mesh(dp=2), zero=3).step(0, "evaluate"))
    with torch.no_grad():
        wanted = []
        for number in range(2):
            for dp in range(2):
                ids, labels = batch(0, number, dp)
                wanted.append(cross_entropy(theirs(ids).logits[0], labels[0]).item())
    assert sorted(losses) == pytest.approx(sorted(wanted), rel=1e-5)


PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8, 6]]


@pytest.mark.parametrize(
    "mesh", [rp.Mesh(), rp.Mesh(pp=2), rp.Mesh(pp=2, tp=2), rp.Mesh(dp=2)], ids=["one", "pp2", "pp2 tp2", "dp2"]
)
def test_they_generate_what_transformers_generates(given, mesh):
    folder, theirs = given
    run = rp.Run(
        model=rp.HF(folder, seq=12),
        mesh=mesh,
        data=rp.Batches(batch, batch),
        microbatches=2,
        timeout=20.0,
        zero=3 if mesh.dp > 1 else None,
    )
    with closing(TeamGeneration(run)) as generation:
        made = generation.tokens(PROMPTS, 6)
        for prompt, tokens in zip(PROMPTS, made, strict=True):
            ids = torch.tensor([prompt])
            with torch.no_grad():
                whole = theirs.generate(
                    ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
                )
            assert tuple(whole[0, len(prompt) :].tolist()) == tokens
        assert generation.start(PROMPTS, 6).cache_bytes(generation.loaded) == [0] * mesh.pp


def test_they_score_and_prompts_beyond_their_positions_are_refused(given):
    folder, theirs = given
    run = rp.Run(model=rp.HF(folder, seq=12), mesh=rp.Mesh(pp=2), data=rp.Batches(batch, batch), microbatches=2)
    with closing(TeamGeneration(run)) as generation:
        (one,) = scores(lambda: generation.loaded, lambda call: call(), [[3, 1, 4, 1, 5]], 4)
        with torch.no_grad():
            wanted = theirs(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].log_softmax(-1)
        assert one.logs == pytest.approx([wanted[i, t].item() for i, t in enumerate([1, 4, 1, 5])], abs=1e-5)
        with pytest.raises(rp.ConfigError, match="has 9 tokens, and with 6 more it is longer than the 12 positions"):
            generation.start([[1] * 9], 6)


def test_own_layers_still_do_not_generate():
    own = rp.Layers(list, torch.nn.functional.mse_loss, seq=8)
    (fault,) = generation_faults(rp.Run(model=own))
    assert fault.startswith("model is your own layers, which keep no keys and values: only GPT, Llama and what rp.HF")


def test_a_run_of_them_is_read_again_as_it_was_written(given):
    folder, _ = given
    run = rp.Run(model=rp.HF(folder, seq=12), mesh=rp.Mesh(pp=2))
    again = run_of(plain_of(run))
    assert again == replace(run, folder=None) and again.model.plan == run.model.plan
    assert plain_of(again) == plain_of(run)
    other = plain_of(run)
    other["model"]["loss"] = "mine.cross"
    with pytest.raises(rp.ConfigError, match="a run with your own functions starts from Python"):
        run_of(other)
    other = plain_of(run)
    other["model"]["plans"] = 3
    with pytest.raises(rp.ConfigError, match=r"model: it can't be read again .*'plans': did you mean plan"):
        run_of(other)


_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}}
TINY = [  # angles that depend on the length of a text; other names of tensors in files
    (other("phi3", 0, 0), "pp 2"),
    (Tiny("arcee", "ArceeConfig", _LLAMA | _DYNAMIC | {"max_position_embeddings": 6}, 1), "one"),
    (other("exaone", 0, 1), "one"),
]


@pytest.mark.parametrize(("tiny", "layout"), TINY, ids=[tiny.kind for tiny, _ in TINY])
def test_unusual_configs_have_the_numbers_of_transformers(tiny, layout, tmp_path):
    found = compared(tiny, tmp_path, {layout: LAYOUTS[layout]})
    assert (found.wrong, found.refused) == ([], {})


def faults_of(folder, name, mesh=None, **changes):
    """What is wrong with a run of a tiny model of this class of configs, on tensor ranks."""
    random_model(name, _LLAMA | {"pad_token_id": None} | changes).save_pretrained(folder)
    run = rp.Run(model=rp.HF(folder, seq=12), data=rp.Batches(batch), microbatches=2, device="cpu")
    found = [*rp.faults(replace(run, mesh=rp.Mesh(tp=2)))]
    return found, [*rp.faults(replace(run, mesh=rp.Mesh(pp=2)))]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("CohereConfig", {"use_qk_norm": True}, "leaves out weights that only fit them whole: model.layers.*"),
        ("DogeConfig", {}, "names modules that this model has not: model.layers.*.mlp.router_gate"),
        ("SmolLM3Config", {"num_key_value_heads": 1}, "which does not divide the 1 heads of num_key_value_heads"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_cause_and_only_on_tensor_ranks(name, changes, why, tmp_path):
    divided, apart = faults_of(tmp_path, name, **changes)
    (fault,) = divided
    assert why.rstrip("*") in fault
    assert "set mesh.tp to 1" in fault or "set it to 1" in fault
    assert apart == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ApertusConfig", "a 'apertus' keeps buffers in its files (model.layers.0.mlp.act_fn.beta"),
        ("ExaoneConfig", "transformers renames the tensors of a 'exaone' when it reads them"),
    ],
)
def test_tensors_that_modules_do_not_have_are_refused_with_their_cause(name, why, tmp_path):
    _, (fault,) = faults_of(tmp_path, name)
    assert why in fault
