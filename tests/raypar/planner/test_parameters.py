"""The formulas of parameters, against the modules that actors build."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.build import build_model
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.actors.worker.build.parallelize import Parallelizer, axis_styles
from raypar.actors.worker.build.weight_owners import sizes_of
from raypar.planner.sizes.parameters import (
    active_parameters,
    held_parameters,
    num_parameters,
    stage_parameters,
    unit_parameters,
)
from raypar.planner.sizes.tensors import held_tensors
from raypar.schedules.catalog import build
from raypar.schedules.formatting import short_count
from raypar.schedules.passes.lower import lower
from tests.support.local_groups import local_groups
from tests.support.on_grid import groups_on
from tests.support.threads import in_threads

SIZES = {"layers": 5, "hidden": 24, "heads": 4, "seq": 10, "vocab": 37}
MODELS = [
    GPT(**SIZES),
    GPT(**SIZES, mlp=3, tied=True, positions="hierarchical"),
    GPT(**SIZES, positions="sinusoidal"),
    Llama(**SIZES),
    Llama(**SIZES, kv_heads=2, ffn=40, tied=True),
    Llama(**SIZES, kv_heads=1, positions="alibi"),
    GPT(**SIZES, moe=MoE(experts=4, every=2)),
    GPT(**SIZES, moe=MoE(experts=(1, 2, 4, 4, 8), top_k=1, residual=True, width=32)),
    Llama(**SIZES, moe=MoE(experts=3, gate="shazeer", shared=2)),
    Llama(**SIZES, kv_heads=2, head_width=10, qk_norm=True),
    Llama(**SIZES, post_norms=True),
    GPT(**SIZES, qkv_bias=True),
    Llama(**SIZES, kv_heads=2, qkv_bias=True, window=4),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 1, None), ("1f1b", 3, None), ("interleaved", 2, 2)])
def test_every_rank_holds_what_the_formula_says(model, name, ranks, chunks):
    built, schedule = build_model(model, 0), lower(build(name, ranks, 4, chunks))
    sizes = sizes_of(built, "even", schedule)
    found = [sum(sizes[rank].values()) // 4 for rank in range(ranks)]  # bytes of float32
    assert held_parameters(model, "even", schedule, Mesh()) == found
    named = held_tensors(model, "even", schedule, Mesh())
    assert [{one.name: 4 * one.whole for one in of_rank} for of_rank in named] == [sizes[rank] for rank in range(ranks)]
    units = unit_parameters(model, "even", schedule.num_stages, Mesh(), 1, {})
    tensors = [sum(units[stage].tensors for stage in schedule.stages_of(rank)) for rank in range(ranks)]
    assert tensors == [len(sizes[rank]) for rank in range(ranks)]
    copied = model.tied and ranks > 1 and schedule.placement[-1] != schedule.placement[0]
    assert num_parameters(model) == sum(found) - copied * model.vocab * model.hidden
    assert sum(stage_parameters(model, "even", schedule.num_stages)) == num_parameters(model)


def held_by(model, groups, tp):
    run = Run(model=model, mesh=Mesh(tp=tp))
    built = build_model(model, 0)
    parallelizer = Parallelizer(built, axis_styles(run, groups))
    made = built.materialize(range(len(built.names)), 0, parallelizer.parallelize)
    return len(made) and sum(p.numel() for module in made for p in module.parameters())


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("model", [model for model in MODELS if not model.tied])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_tensor_rank_holds_what_the_formula_says(model, tp):
    found = in_threads(local_groups("tp", tp), lambda group: held_by(model, {"tp": group}, tp))
    assert held_parameters(model, "even", lower(build("1f1b", 1, 1)), Mesh(tp=tp)) == [max(found)]
    (named,) = held_tensors(model, "even", lower(build("1f1b", 1, 1)), Mesh(tp=tp))
    assert sum(one.held for one in named) == max(found)


@pytest.mark.sampled
@pytest.mark.parametrize("tp", ["2d:2x2", "2.5d:2x2x2", "3d:2x2x2"])
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_on_a_grid_it_is_an_estimate(kind, tp):
    model = kind(layers=2, hidden=48, heads=4, seq=8, vocab=64)
    found = in_threads(groups_on(tp), lambda groups: held_by(model, groups, tp))
    (told,) = held_parameters(model, "even", lower(build("1f1b", 1, 1)), Mesh(tp=tp))
    assert told == pytest.approx(max(found), rel=0.15)


def test_a_token_uses_the_experts_that_it_chooses():
    dense = GPT(**SIZES)
    model = replace(dense, moe=MoE(experts=6, top_k=1))
    routers = 5 * 6 * 24
    assert active_parameters(model) == num_parameters(dense) + routers
    assert active_parameters(dense) == num_parameters(dense)


def test_counts_are_short():
    counts = [0, 999, 6_500, 6_533_120, 999_999_999, 124_439_808, 7_000_000_000, 3 * 10**12, 10**17]
    assert [short_count(count) for count in counts] == [
        "0", "999", "6.5 k", "6.5 M", "1,000.0 M", "124.4 M", "7.0 B", "3.0 T", "100,000.0 T",
    ]  # fmt: skip
