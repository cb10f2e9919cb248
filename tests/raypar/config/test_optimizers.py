"""Faults of optimizers and of their groups of weights, and how files spell them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.config.toml import parse_toml, plain_of, run_of, toml_of

TIED = rp.GPT(layers=2, hidden=16, heads=2, tied=True)
OWN = {
    "model": rp.Layers(lambda: [nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss),
    "data": rp.Batches(lambda *_: (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 4))),
}


def faults_of(optim, **changes):
    return rp.faults(rp.Run(optim=optim, **{"model": rp.GPT(layers=2, hidden=16, heads=2, seq=32)} | changes))


@pytest.mark.parametrize(
    "optim",
    [
        rp.Muon(),
        rp.Muon(no_decay=("*.norm.*", "*.bias"), rates={"embed.*": 0.1, "blocks.[0-1].mlp.*": 0.5}),
        rp.AdamW(no_decay=("embed.*",), decay="wsd", decay_steps=1000, decay_form="sqrt"),
        rp.SGD(rates={"*": 0}),
    ],
)
def test_right_ones_have_no_faults(optim):
    assert faults_of(optim) == []
    assert faults_of(optim, model=TIED) == [] or optim.no_decay == ("embed.*",) or len(optim.rates) == 2


def test_patterns_that_name_no_weight_are_told_with_the_nearest():
    optim = rp.Muon(no_decay=("*.bais", "*.norm.*"), rates={"embd.*": 0.1, "blocks.7.*": 1.0}, adamw=("head.*", "tail"))
    assert faults_of(optim) == [
        "optim.no_decay: '*.bais' names no weight that is trained: leave it out, or use '*.bias'",
        "optim.rates: 'embd.*' names no weight that is trained: leave it out, or use 'embed.*' or 'blocks.*' or "
        "'head.*'",
        "optim.rates: 'blocks.7.*' names no weight that is trained: leave it out, or use 'embed.*' or 'blocks.*' or "
        "'head.*'",
        "optim.adamw: 'tail' names no weight that is trained: leave it out, or use 'embed.*' or 'blocks.*' or 'head.*'",
    ]


@pytest.mark.parametrize(
    ("optim", "differ"),
    [
        (rp.AdamW(rates={"embed.*": 0.1}), "have rates of 0.1 and 1.0"),
        (rp.SGD(no_decay=("head.out.*",), weight_decay=0.5), "have weight decays of 0.5 and 0.0"),
        (rp.Muon(adamw=("embed.*",)), "are updated by adamw and muon"),
    ],
)
def test_both_names_of_a_tied_weight_must_be_in_one_group(optim, differ):
    what = "embed.tokens.weight and head.out.weight are one tied weight"
    assert faults_of(optim, model=TIED) == [f"optim: {what}, but {differ}: name both, or none"]


def test_muon_takes_floating_matrices():
    (fault,) = faults_of(rp.Muon(adamw=("*",)))
    assert fault == "optim is a Muon, but no weight of two dims is left to it by optim.adamw: use AdamW, or name fewer"
    model = rp.Layers(lambda: [nn.Linear(4, 4, dtype=torch.complex64)], nn.functional.mse_loss)
    (fault,) = faults_of(rp.Muon(adamw=()), **OWN | {"model": model})
    assert fault == "optim is a Muon, but layers.0.weight is complex64: name it in optim.adamw"


def test_own_layers_say_which_weights_are_the_embedding_and_the_head():
    (fault,) = faults_of(rp.Muon(), **OWN)
    assert fault.endswith("give optim.adamw ('layers.0.*', 'layers.2.*'), say, or () if Muon is to update all matrices")
    for adamw in (("layers.0.*", "layers.2.*"), ()):
        assert faults_of(rp.Muon(adamw=adamw), **OWN) == []


def test_a_model_that_cannot_be_built_is_told_alone():
    model = rp.Layers(lambda: [][1], nn.functional.mse_loss)
    assert faults_of(rp.Muon(), **OWN | {"model": model}) == [
        f"model.fn fails at {__file__}:{model.fn.__code__.co_firstlineno}, IndexError: list index out of range"
    ]
    (fault,) = faults_of(rp.Muon(), model=rp.GPT(hidden=17, heads=2))
    assert "model.hidden 17" in fault


def test_fields_out_of_range_and_without_effect_come_at_once():
    optim = rp.Muon(
        lr=-1.0, scale="big", precision="fp16", iterations=0, adamw_lr=0.0, rates={"*": -1.0, "x": "y"}, no_decay="*"
    )
    assert faults_of(optim) == [
        "optim.lr is -1.0: it must be above 0",
        "optim.no_decay is '*': it must be a tuple (in TOML a list)",
        "optim.rates['*'] is -1.0: it must be at least 0",
        "optim.scale is 'big': it must be 'original' or 'match_rms_adamw'",
        "optim.iterations is 0: it must be at least 1",
        "optim.precision is 'fp16': it must be 'fp32' or 'bf16'",
        "optim.adamw_lr is 0.0: it must be above 0",
    ]
    assert faults_of(rp.SGD(decay="cosine", decay_steps=3, decay_form="sqrt")) == [
        "optim.decay_steps is 3, but optim.decay is 'cosine': leave it out, or let decay be 'wsd'",
        "optim.decay_form is 'sqrt', but optim.decay is 'cosine': leave it out, or let decay be 'wsd'",
    ]


def test_files_spell_groups_as_a_table_or_as_pairs():
    wanted = rp.SGD(lr=0.5, no_decay=("*.bias",), rates={"embed.*": 0.1, "head.*": 2})
    head = '[optim]\nkind = "sgd"\nlr = 0.5\nno_decay = ["*.bias"]\n'
    for rates in ('[optim.rates]\n"embed.*" = 0.1\n"head.*" = 2', 'rates = [["embed.*", 0.1], ["head.*", 2]]'):
        run = run_of(parse_toml((head + rates).encode()))
        assert run.optim == wanted
        assert run_of(parse_toml(toml_of(plain_of(run)).encode())) == run
    with pytest.raises(rp.ConfigError, match=r"optim\.rates is \(3,\): it must be a dictionary"):
        run_of({"optim": {"rates": [3]}})


def test_another_kind_keeps_groups_and_the_schedule_of_the_rate():
    run = rp.Run(optim=rp.AdamW(betas=(0.5, 0.5), decay="wsd", decay_steps=3, no_decay=("*.bias",), rates={"*": 2.0}))
    other = run_of({"optim": {"kind": "muon"}}, run).optim
    assert other == rp.Muon(decay="wsd", decay_steps=3, no_decay=("*.bias",), rates={"*": 2.0})


def test_half_masters_need_gradients_of_their_dtype():
    """The optimizer's kernels take weights and gradients of one dtype."""
    for optim in (rp.AdamW(eps=1e-4), rp.Muon(adamw_eps=1e-4), rp.SGD()):
        run = rp.recipe("gpt-tiny", optim=optim, precision=rp.Precision("bf16", master="bf16"))
        assert rp.faults(run) == [
            "precision.master is 'bf16', but gradients are added up in fp32: set precision.reduce to 'bf16' too, or "
            "precision.master to 'fp32'"
        ]


def test_every_eps_that_fp16_rounds_to_zero_is_refused():
    half = rp.Precision("fp16", "fp16", "fp16")
    for optim, field in ((rp.AdamW(), "eps"), (rp.Muon(), "adamw_eps")):
        (fault,) = rp.faults(rp.recipe("gpt-tiny", optim=optim, precision=half))
        assert fault.startswith(f"optim.{field} 1e-08 is 0 in fp16")
