"""Experts in a run's description: faults, TOML files and flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cli.words.parsing import read_tables
from raypar.config.toml import load_run, parse_toml, plain_of, run_of, toml_of
from raypar.errors import ConfigError


def run_with(**settings):
    return rp.Run(model=rp.GPT(layers=4, hidden=16, heads=2, seq=16, moe=rp.MoE(**settings)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"experts": 4, "top_k": 5}, ["top_k 5 is more than the 4 experts: set it to 4 at most"]),
        ({"experts": (4, 8)}, ["experts has 2 numbers, and 4 blocks have experts: give one number, or 4"]),
        (
            {"experts": 128, "capacity": 0.5, "gate": "switch", "top_k": 1},
            ["capacity 0.5 leaves 0.062 tokens of a sequence for an expert (of 16 tokens", "to 8 at least"],
        ),
        ({"experts": 9, "gate": "sigmoid", "groups": 2}, ["divide 9 experts: set model.moe.experts to 8 or 10"]),
        (
            {"experts": 8, "gate": "sigmoid", "groups": 4, "top_groups": 1, "top_k": 3},
            ["top_groups 1 leaves 2 experts for top_k 3"],
        ),
        ({"gate": "sigmoid", "groups": 4, "top_groups": 5}, ["top_groups 5 is more than groups 4"]),
        ({"groups": 2}, ["groups is 2, but gate 'softmax' knows none: leave it out, or set gate to 'sigmoid'"]),
        ({"top_groups": 2}, ["top_groups is 2, but groups is 1"]),
        ({"gate": "switch"}, ["top_k is 2, but gate 'switch' chooses 1"]),
        ({"gate": "gshard", "top_k": 1}, ["gate 'gshard' chooses 2: set it to 2, or set gate to 'switch'"]),
        (
            {"gate": "shazeer", "noise": 0.5, "bias_rate": 0.1, "normalise": False},
            ["noise is 0.5", "bias_rate is 0.1", "normalise is false"],
        ),
        ({"every": 5}, ["every 5 leaves no block of 4 with experts: set it to 4 at most"]),
        ({"experts": 9, "capacity": 0.01}, ["set it to 0.29 at least"]),
        ({"gate": "sigmoid", "noise": 0.1}, ["noise is 0.1, but gate 'sigmoid' has none"]),
        ({"first": 4}, ["first 4 leaves no block of 4 with experts: set it to 3 at most"]),
        ({"loss": "none", "alpha": 0.5}, ["alpha is 0.5, but loss is 'none'"]),
        ({"experts": 0, "top_k": True}, ["model.moe.experts is 0: it must be at least 1", "model.moe.top_k is True"]),
        ({"experts": ()}, ["model.moe.experts is ()"]),
        ({"gate": "top"}, ["model.moe.gate is 'top': it must be 'softmax', 'shazeer'"]),
    ],
)  # fmt: skip
def test_faults_are_told_all_at_once(settings, says):
    found = "\n".join(rp.faults(run_with(**settings)))
    assert all(one in found for one in says), found


def test_numbers_of_experts_that_do_not_fit_the_blocks_are_told_beside_those_that_ep_does_not_divide():
    model = rp.GPT(layers=4, hidden=8, heads=2, seq=8, moe=rp.MoE(experts=(4, 9)))
    told = rp.faults(rp.Run(model=model, mesh=rp.Mesh(dp=2, ep=2)))
    assert ["experts has 2 numbers" in told[0], "does not divide the 9 experts" in told[1]] == [True, True]


def test_the_fixes_are_right():
    assert not rp.faults(run_with(every=4))
    assert not rp.faults(run_with(experts=9, capacity=0.29))


def test_a_field_that_a_layout_sets_is_not_given_too():
    with pytest.raises(ConfigError, match="layout 'ep2_dp2' sets mesh, which is given too: leave one of them out"):
        rp.recipe("moe-tiny", layout="ep2_dp2", mesh=rp.Mesh(dp=2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.experts[2].weight = self.experts[0].weight


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"expert_actors": 2}])
def test_experts_that_actors_divide_share_no_weights(mesh):
    model = rp.Layers(lambda: [Tied()], nn.functional.mse_loss, plan={"layers.0.experts": "expert"})
    run = rp.Run(model=model, mesh=rp.Mesh(dp=2, **mesh), data=rp.Batches(lambda *_: (torch.ones(2, 4),) * 2))
    assert any("but experts of layers.0.experts share a weight: give each one its own" in one for one in rp.faults(run))


def test_a_grid_does_not_divide_experts():
    (fault,) = rp.faults(replace(run_with(), mesh=rp.Mesh(tp="2d:2x2")))
    assert (
        fault == "mesh.tp is '2d:2x2', a grid, over which experts can't be divided: set it to 4, or model.moe to None"
    )


@pytest.mark.parametrize("settings", [{}, {"experts": (2, 4, 4, 8), "capacity": 1.25, "first": 0, "residual": True}])
def test_a_file_says_the_same(settings, tmp_path):
    run = run_with(**settings)
    assert rp.faults(run) == []
    text = toml_of(plain_of(run))
    assert "[model.moe]" in text
    assert run_of(parse_toml(text.encode())).model == run.model
    path = tmp_path / "run.toml"
    path.write_text('recipe = "gpt-tiny"\n[model.moe]\nexperts = [4, 8]\nevery = 4\ntop_k = 1\ngate = "switch"\n')
    assert load_run(path).model.moe == rp.MoE(experts=(4, 8), every=4, top_k=1, gate="switch")
    path.write_text('recipe = "moe-tiny"\n[model]\nmoe = "none"\n')
    assert load_run(path).model == rp.recipe("gpt-tiny").model
    path.write_text('recipe = "gpt-tiny"\n[model.moe]\nexpert = 4\n')
    with pytest.raises(ConfigError, match=r"model.moe.expert is not a field: did you mean 'experts'"):
        load_run(path)


def test_flags_give_a_model_experts_and_take_them_away():
    dense, experts = rp.recipe("gpt-tiny").model, rp.recipe("moe-tiny").model
    assert read_tables(dense, ["--steps", "2"]) == (dense, ["--steps", "2"])
    assert read_tables(dense, ["--model.moe.experts", "4"])[0].moe == rp.MoE()
    assert read_tables(experts, ["--model.moe.experts", "4"])[0] == experts
    for words in (["--model.moe", "none"], ["--model.moe=None"]):
        assert read_tables(experts, ["--steps", "2", *words, "--seed", "1"]) == (
            dense,
            ["--steps", "2", "--seed", "1"],
        )


def test_another_kind_of_model_keeps_the_experts():
    run = run_of({"recipe": "moe-tiny", "model": {"kind": "llama", "moe": {"top_k": 1}}})
    assert run.model == rp.Llama(layers=8, hidden=32, heads=4, seq=32, dropout=0.1, moe=run.model.moe)
    assert run.model.moe == rp.MoE(experts=4, top_k=1, normalise=True)


def test_an_unknown_field_is_answered():
    with pytest.raises(TypeError, match="MoE has no field 'capacity_factor': it has capacity"):
        rp.MoE(capacity_factor=1.25)


def test_servers_sum_no_loads_for_a_bias():
    run = replace(run_with(gate="sigmoid", bias_rate=0.1), data_parallel="parameter_server", mesh=rp.Mesh(dp=2))
    says = (
        "model.moe.bias_rate is 0.1, but with servers replicas do not sum their loads: "
        "set model.moe.bias_rate to 0 and give alpha, or set data_parallel to 'all_reduce'"
    )
    assert any(fault.startswith(says) for fault in rp.faults(run))
    assert not rp.faults(replace(run, model=run_with(gate="sigmoid").model))
