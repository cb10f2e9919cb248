"""Every layer goes to one stage, in order; "balanced" is as good as any split."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from raypar.actors.models.build import build_model
from raypar.actors.models.partition import split_faults, split_layers, transformer_costs
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE

COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


@given(COSTS, st.sampled_from(["even", "balanced"]), st.data())
def test_every_layer_is_on_exactly_one_stage_in_order(costs, split, data):
    stages = data.draw(st.integers(1, len(costs)))
    assert split_faults(split, len(costs), stages) == []
    parts = split_layers(split, costs, stages)
    assert len(parts) == stages
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert all(len(part) >= 1 for part in parts)


@given(COSTS, st.data())
def test_balanced_is_as_good_as_the_best_of_all_splits(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = max(sum(costs[i] for i in part) for part in split_layers("balanced", costs, stages))
    cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert found == best


def test_many_layers_are_balanced_at_once():
    start = time.perf_counter()
    counts = [len(part) for part in split_layers("balanced", [1.0] * 4000, 16)]
    assert (min(counts), max(counts)) == (250, 250)
    assert time.perf_counter() - start < 2, "by trying every start of every stage it takes 20 s"


@given(st.integers(1, 40), st.data())
def test_even_counts_differ_by_one_at_most(layers, data):
    stages = data.draw(st.integers(1, layers))
    counts = [len(part) for part in split_layers("even", [1.0] * layers, stages)]
    assert max(counts) - min(counts) <= 1


def test_counts_of_the_user_are_taken_as_they_are():
    assert split_layers((3, 1, 2), [1.0] * 6, 3) == (range(3), range(3, 4), range(4, 6))


def test_experts_cost_what_a_token_chooses():
    """The FLOPs that torch counts of a block's matrices; with balanced stages the blocks with experts are spread."""
    model = GPT(layers=4, hidden=16, heads=2, seq=8, vocab=20, moe=MoE(experts=4, top_k=2, every=2, width=64))
    built = build_model(model, 0)
    blocks, x = built.materialize([2, 3], 0), torch.randn(2, 8, 16)
    for index, block in enumerate(blocks, 1):
        with FlopCounterMode(display=False) as counter:
            block.mlp(x)
        attention = 2 * 4 * 16**2 + 4 * 8 * 16
        assert counter.get_total_flops() / 16 == transformer_costs(model)[index] - attention
    split = split_layers("balanced", transformer_costs(replace(model, moe=MoE(experts=8, top_k=4, first=3))), 2)
    assert split == (range(3), range(3, 4))


@pytest.mark.parametrize(
    ("split", "layers", "stages", "says"),
    [
        ("even", 3, 4, ["4 stages for 3 layers: use 4 layers or more, or set mesh.pp x chunks to 3 at most"]),
        ("evne", 4, 2, ["split is 'evne'"]),
        ((2, 2), 4, 3, ["split names 2 stages, the schedule has 3"]),
        ((1, 2), 4, 2, ["split adds up to 3 layers, the model has 4"]),
        ((0, 5, 1), 4, 2, ["names 3 stages", "adds up to 6", "leaves a stage without layers"]),
        ((), 4, 2, ["names 0 stages", "adds up to 0"]),
        ("balanced", 100_000, 8, []),
        ("balanced", 100_000, 100, ["split is 'balanced' for 100000 layers on 100 stages: use 'even' for so many"]),
    ],
)
def test_every_fault_of_a_split_is_found(split, layers, stages, says):
    faults = split_faults(split, layers, stages)
    assert len(faults) == len(says)
    assert all(text in fault for text, fault in zip(says, faults, strict=True))


def test_the_costs_of_a_gpt_count_the_products_of_its_layers():
    gpt = GPT(layers=3, hidden=64, seq=32, vocab=1000)
    h, s, v = gpt.hidden, gpt.seq, gpt.vocab
    block = 24 * h**2 + 4 * s * h
    assert transformer_costs(gpt) == (block + 2 * h, block, block + 2 * h * v)
    lopsided = transformer_costs(GPT(layers=8, hidden=64, seq=32, vocab=4000))  # the head costs as much as five blocks
    assert [len(part) for part in split_layers("balanced", lopsided, 2)] == [6, 2]
