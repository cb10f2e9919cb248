"""Padding is routed to no expert: it counts in no load, no capacity, no auxiliary loss and no bias. By the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import raypar as rp
from tests.support.examples import made_jsonl
from tests.support.oracle_runs import differences
from tests.support.team import Team
from tests.support.uneven_runs import gpt, llama, run_of, uneven

MODELS = {
    "switch": {"moe": rp.MoE(experts=4, alpha=0.3, z_loss=0.02, capacity=1.1)},
    "gshard": {"moe": rp.MoE(experts=4, gate="switch", top_k=1, loss="gshard", alpha=0.4, residual=True)},
    "bias": {"moe": rp.MoE(experts=4, gate="sigmoid", bias_rate=0.05, loss="none", shared=1)},
}
LAYOUTS = {
    "one actor": {},
    "pp, dp": {"mesh": rp.Mesh(pp=2, dp=2), "recompute": "full"},
    "tp": {"mesh": rp.Mesh(tp=2)},
    "sp": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "ring": {"mesh": rp.Mesh(cp=2), "context": "ring"},
    "ep": {"mesh": rp.Mesh(dp=2, ep=2)},
    "ep, tp": {"mesh": rp.Mesh(tp=2, dp=2, ep=2), "sequence_parallel": True},
}


def padded(step, microbatch, dp, token=0):
    """Sequences that end with padding of one token; of one nothing is left but its first token."""
    x, y = uneven(step, microbatch, dp)
    x = x.clamp(min=1, max=27)
    for row, length in enumerate(((3, 8), (1, 5), (7, 2))[(step + microbatch + dp) % 3]):
        x[row, length:], y[row, length:] = token, -100
    return x, y


def lengths(inputs, targets, token=0):
    return (inputs != token).sum(1)


def of_model(name, **settings):
    return run_of(gpt(**MODELS[name]), data=rp.Batches(padded, lengths=lengths), **settings)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_leave_the_padding_of_batches_out(name, layout):
    run = of_model(name, **LAYOUTS[layout])
    assert not rp.faults(run)
    assert not differences(run, padding=0)


@pytest.mark.long
def test_the_oracle_notices_padding_that_is_routed():
    run = of_model("switch")
    run = replace(run, data=rp.Batches(padded))
    assert differences(run, padding=0)
    assert not differences(run)


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("mesh", [rp.Mesh(dp=2), rp.Mesh(cp=2)], ids=["dp", "cp"])
def test_experts_leave_the_padding_of_examples_out(tmp_path, packing, mesh):
    sizes = [3, 5, 2, 9, 4, 7, 1, 6, 8, 2, 5, 3] * 3
    records = [{"prompt": "abcdefgh"[: n % 4 + 1], "completion": "zyxwvutsrq"[:n]} for n in sizes]
    path, cache = made_jsonl(tmp_path / "examples.jsonl", records), tmp_path / "cache"
    data = rp.Examples(str(path), cache=str(cache), packing=packing)
    model = llama(vocab=256, seq=16, ffn=24, **MODELS["switch"])
    assert not differences(run_of(model, data=data, mesh=mesh), padding=0)


def test_loads_are_those_of_real_tokens():
    """Loads of a step, and those over the capacity, add up to the choices of the tokens that are no padding."""
    team = Team.of(of_model("switch"))
    report = team.each(lambda actor: actor.train(0))[0]
    real = sum(int(lengths(*padded(0, microbatch, 0)).sum()) for microbatch in range(2))
    assert [sum(load.asked) for load in report.loads] == [2 * real, 2 * real]


def test_validation_leaves_padding_out_too():
    run = of_model("switch")
    run = replace(run, data=replace(run.data, validate=padded))
    batch, counted = (partial(function, token=28) for function in (padded, lengths))
    other = replace(run, data=rp.Batches(batch, validate=batch, lengths=counted))
    assert evaluated(run) == evaluated(other)
    assert evaluated(run) != evaluated(replace(other, data=replace(other.data, lengths=None)))


def evaluated(run):
    team = Team.of(run)
    return team.each(lambda actor: actor.run("evaluate", 0))[0].losses


BAD = {
    "float": (lambda x, y: x.sum(1).float(), r"data.lengths returned \[2\] torch.float32: return a tensor \[2\] int64"),
    "a list": (lambda x, y: [1, 2], "data.lengths returned list: return a tensor"),
    "too long": (lambda x, y: torch.tensor([9, 8]), r"data.lengths returned \[9, 8\]: a length is 0 to 8"),
    "raises": (lambda x, y: x.nothing, "data.lengths fails at .*test_padding.py:.*AttributeError"),
    "takes one": (lambda x: x, r"data.lengths can't be called with \(inputs, targets\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_lengths_that_are_none_are_refused_before_the_launch(name):
    fn, message = BAD[name]
    (fault,) = rp.faults(run_of(gpt(), data=rp.Batches(padded, lengths=fn)))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(fault)


def test_own_layers_refuse_lengths():
    model = rp.Layers(lambda: [torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss)
    data = rp.Batches(lambda *at: (torch.zeros(2, 4), torch.zeros(2, 4)), lengths=lambda x, y: torch.tensor([4, 4]))
    assert any("only experts of GPT and Llama read it" in fault for fault in rp.faults(run_of(model, data=data)))
