"""Sequences divided over the context-parallel axis compute what one plain process computes: on threads, without Ray.

Without dropout: threads share torch's generator. Of real actors each has its own: see tests/raypar.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from raypar.actors.context import Context
from raypar.actors.specs import GPT, AdamW, Llama, Positions
from tests.actors.team import Team
from tests.actors.test_tensor_parallel import agrees

MODES = get_args(Context)
MODEL = GPT(layers=2, hidden=16, heads=4, seq=16, vocab=11)


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(11, (2, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : 5 * microbatch] = -100  # all that a member has, too
    return ids[:, :-1], labels


def team_of(cp, pp=1, dp=1, tp=1, m=2, model=MODEL, **changes):
    fields = {"data": tokens, "optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 3}
    return Team(None, pp, m, dp=dp, tp=tp, cp=cp, model=model, **fields | changes)


@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize("cp", [2, 4])
def test_every_mode_computes_what_one_process_does(cp, context):
    agrees(team_of(cp, context=context))


@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize(("kv_heads", "cp"), [(1, 2), (2, 4), (2, 2)])
def test_a_llama_with_few_heads_of_keys_and_values(context, kv_heads, cp):
    model = Llama(layers=2, hidden=16, heads=4, kv_heads=kv_heads, ffn=24, seq=16, vocab=11)
    agrees(team_of(cp, model=model, context=context, steps=2))


@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize("positions", get_args(Positions))
def test_any_positions(positions, context):
    attention = "materialised" if positions == "rope" else "fused"
    agrees(team_of(2, model=replace(MODEL, positions=positions, attention=attention), context=context, steps=2))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"dp": 2},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "dp": 2, "zero": 1},
        {"data_parallel": "parameter_server"},
    ],
    ids=str,
)
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_with_other_axes(layout, context):
    agrees(team_of(2, model=replace(MODEL, tied=True), context=context, **layout))
