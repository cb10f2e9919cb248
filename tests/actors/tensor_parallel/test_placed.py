"""Modules that are split along samples or tokens, and neighbours between which tensors are redistributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.models.own.plan_kinds import SHORT, kind_of, kind_text
from tests.actors.tensor_parallel.test_user_plans import failed, tokens, wrong
from tests.support.own_layers import cross_entropy, mse, team_of
from tests.support.tensor_teams import agrees

ROWS, FEATURES = 4 * 6, 8


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x_BSC = torch.randn(4, 6, 3, generator=generator)
    return x_BSC, x_BSC.sum(-1, keepdim=True).sin().expand(-1, -1, 4)


def stack():
    """A layer of its own each, so that the plan below can name any of them."""
    return [
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 12),
        nn.Dropout(0.0),
        nn.Linear(12, 8),
        nn.Linear(8, 4),
    ]


PLANS = {
    "samples, then features": {
        "layers.0": "split0 from R",
        "layers.2": "split0",
        "layers.3": "column from S0",
        "layers.5": "row to S0",
        "layers.7": "split0 to S-1",
        "layers.8": "row",
    },
    "tokens, then features": {
        "layers.0": "split1 from R to S0",
        "layers.2": "split1 from S0",
        "layers.3": "column from S1",
        "layers.5": "row to S1",
        "layers.6": "split1",
        "layers.7": "split1 to R",
        "layers.8": "split0 from R to R",
    },
    "rows in turn": {
        "layers.0": "column to S0",
        "layers.2": "replicated from S0",
        "layers.3": "row from R to S-1",
        "layers.5": "row to S-1",
        "layers.7": "row to S-1",
        "layers.8": "replicated from S-1",
    },
    "whole, and sent on as parts": {
        "layers.0": "replicated to S1",
        "layers.2": "split1 to S-1",
        "layers.3": "column from S-1 to S1",
        "layers.5": "row from S1",
        "layers.7": "column to S0",
        "layers.8": "split0 to R",
    },
}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("pp", "dp", "zero"), [(1, 1, 0), (3, 1, 0), (1, 2, 3)])
def test_every_plan_computes_what_one_process_does(plan, pp, dp, zero):
    agrees(team_of(stack, plan, 2, pp, dp, data=batch, zero=zero, steps=3))


def embedded():
    return [nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 12)]


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.0": "embedding to S0", "layers.1": "split0", "layers.2": "column from S0 to R"},
        {"layers.0": "split0 from R", "layers.1": "split0 to S-1", "layers.2": "row"},
        {"layers.0": "embedding to S-1", "layers.1": "replicated from S-1", "layers.2": "row from R"},
    ],
)
def test_embeddings_give_and_take_parts(plan):
    agrees(team_of(embedded, plan, loss=cross_entropy, data=tokens))


def dropping():
    return [nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 4)]


def test_dropout_of_samples_is_a_part_of_dropout():
    """Every member draws the whole mask. Threads share torch's generator, so one of them is asked."""
    plan = {"layers.0": "split0 from R", "layers.1": "split0", "layers.2": "split0 to R"}
    team = team_of(dropping, plan, data=batch)
    layer = team.all[1].stages[0].modules[1]
    torch.manual_seed(3)
    part = layer(torch.ones(2, 6, 8))
    torch.manual_seed(3)
    assert torch.equal(part, nn.functional.dropout(torch.ones(4, 6, 8), 0.4)[2:])


def test_bytes_are_those_of_the_redistributions():
    """Of a plan's first entry to its last: nothing; an all_gather forward, whose gradient is a sum that stays split;
    a sum that stays split, whose gradient is gathered; an all_to_all each way; and the last sum, whole."""
    team = team_of(stack, PLANS["samples, then features"], m=1, data=batch)
    team.step(0)
    sent, half = team.ledger("tp")[0], ROWS * 4 // 2  # bytes of a member's rows of one feature
    assert sent["all_gather"] == (2, half * (8 + 12))
    assert sent["reduce_scatter"] == (2, half * (12 + 8))
    assert sent["all_to_all"] == (2, half // 2 * (8 + 8))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.2": "split0"}, "layers.2 is 'split0' in the plan, but its input is whole on every actor of tp: use"),
        ({"layers.0": "split0 from R", "layers.3": "column from S0 to R"}, "the gradient of layers.2."),
        ({"layers.8": "split0 from R"}, "the loss is computed from outputs that are divided over tp"),
    ],
)
def test_a_part_where_a_whole_is_needed_is_noticed(plan, says):
    assert says in failed(stack, plan, data=batch, loss=lambda out, t: mse(out, t[: len(out)]))


def test_parts_of_samples_must_be_equal():
    told = "can't go from R to S0 over [3] actors: parts must be equal"
    assert told in failed(stack, {"layers.0": "split0 from R to R"}, tp=3, data=batch)


@pytest.mark.parametrize("text", ["column to R", "row from R", "split0 to S-1", "embedding to S1", "replicated"])
def test_a_kind_is_taken_apart_and_put_together(text):
    kind = kind_of(text)
    short = kind_text(kind.name, kind.given, kind.made)
    assert kind_of(short) == kind
    assert short == next((word for word, whole in SHORT.items() if whole == text), text)


@pytest.mark.parametrize(
    "text", ["split", "column to", "column to X", "column by R", "row from R from R", "dropout to R"]
)
def test_what_is_no_kind_is_told(text):
    assert kind_of(text) is None
    (fault,) = wrong({"layers.1.q": text})
    assert "which is no kind: use" in fault


def test_sizes_that_do_not_divide_are_told():
    def fn():
        return [nn.Linear(3, 7), nn.Linear(7, 5)]

    assert "out_features 7, and its outputs are gathered: use 6 or 8" in wrong({"layers.0": "column to S0"}, fn=fn)[0]
    assert "in_features 7, and its input is split into equal" in wrong({"layers.1": "row from S0"}, fn=fn)[0]
    found = wrong({"layers.0": "column", "layers.1": "row to S-1"}, fn=fn)
    assert any("out_features 5, and its outputs are split into equal parts: use 4 or 6" in one for one in found)
