"""The formulas of parameters, against the modules that actors build."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from heapq import nlargest
from types import MappingProxyType

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.build import build_model
from raypar.actors.models.tiles.tiled import tiled_model
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.actors.worker.build.parallelize import Parallelizer, axis_styles
from raypar.actors.worker.build.weight_owners import sizes_of
from raypar.planner.sizes.parameters import (
    active_parameters,
    adapter_parameters,
    held_by_stage,
    num_parameters,
    stage_parameters,
)
from raypar.planner.sizes.tensors import held_count, held_tensors, tensors_by_stage
from raypar.planner.sizes.units import Units
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


def counted(model, schedule, mesh, tile=MappingProxyType({})):
    """The tensors of an actor of each pipeline rank, and the units of each stage."""
    ties = schedule.placement[0] == schedule.placement[-1]
    stages = tensors_by_stage(model, "even", schedule.num_stages, mesh, ties=ties)
    named = [[one for weight in held for one in weight.each()] for held in held_tensors(stages, schedule)]
    return named, [Units.of(stage, tile) for stage in stages]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 1, None), ("1f1b", 3, None), ("interleaved", 2, 2)])
def test_every_rank_holds_what_the_formula_says(model, name, ranks, chunks):
    built, schedule = build_model(model, 0), lower(build(name, ranks, 4, chunks))
    sizes = sizes_of(built, "even", schedule)
    found = [sum(sizes[rank].values()) // 4 for rank in range(ranks)]  # bytes of float32
    named, units = counted(model, schedule, Mesh())
    assert [*map(held_count, named)] == found
    assert [{one.name: 4 * one.whole for one in of_rank} for of_rank in named] == [sizes[rank] for rank in range(ranks)]
    tensors = [sum(len(units[stage].sizes) for stage in schedule.stages_of(rank)) for rank in range(ranks)]
    assert tensors == [len(sizes[rank]) for rank in range(ranks)]
    copied = model.tied and ranks > 1 and schedule.placement[-1] != schedule.placement[0]
    assert num_parameters(model) == sum(found) - copied * model.vocab * model.hidden
    assert sum(stage_parameters(model, "even", schedule.num_stages)) == num_parameters(model)


ADAPTED = [
    GPT(**SIZES, lora=Lora(rank=3)),
    Llama(**SIZES, kv_heads=2, qkv_bias=True, lora=Lora(rank=2, targets=("q", "v", "gate", "down"))),
    Llama(**SIZES, kv_heads=1, moe=MoE(experts=4), lora=Lora(rank=4, targets="attn")),
]


@pytest.mark.parametrize("model", ADAPTED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_adapters_it_holds_these_alone(model, ranks):
    schedule = lower(build("1f1b", ranks, 4))
    sizes = sizes_of(build_model(model, 0), "even", schedule)
    named, units = counted(model, schedule, Mesh())
    assert [{one.name: 4 * one.whole for one in of_rank} for of_rank in named] == [sizes[rank] for rank in range(ranks)]
    assert [4 * one.whole for one in units] == [sum(sizes[rank].values()) for rank in range(ranks)]
    assert adapter_parameters(model) == sum(one.whole for one in units)
    assert num_parameters(model) == num_parameters(replace(model, lora=None))


@pytest.mark.parametrize("tile", [{"blocks.*.mlp.*": 4}, {"blocks.*.attn.q": 6, "head.*": 37}, {"blocks.1.mlp.up": 2}])
@pytest.mark.parametrize("model", [GPT(**SIZES), Llama(**SIZES, kv_heads=2, qk_norm=True)])
def test_units_have_the_tensors_that_are_cut_into_tiles(model, tile):
    cut = tiled_model(build_model(model, 0), tile)
    sizes = sizes_of(cut, "even", lower(build("1f1b", 2, 4)))
    for stage, units in enumerate(counted(model, lower(build("1f1b", 2, 4)), Mesh(), tile)[1]):
        found = {name: size // 4 for name, size in sizes[stage].items()}
        assert (units.whole, len(units.sizes)) == (sum(found.values()), len(found))
        together = defaultdict(int)
        for name, size in found.items():
            together[name.rpartition(".")[0] if "tile" in name else name] += size  # weight and bias of a tile
        assert [*units.largest] == nlargest(16, together.values())


UNEVEN = [model(**SIZES, moe=MoE(experts=3, width=30, shared=1)) for model in (GPT, Llama)]  # for four tensor ranks


def held_by(model, groups, tp):
    run = Run(model=model, mesh=Mesh(tp=tp))
    built = build_model(model, 0)
    parallelizer = Parallelizer(built, axis_styles(run, groups))
    made = built.materialize(range(len(built.names)), 0, parallelizer.parallelize)
    return len(made) and sum(p.numel() for module in made for p in module.parameters() if p.requires_grad)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("model", [*(model for model in MODELS if not model.tied), *ADAPTED, *UNEVEN])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_tensor_rank_holds_what_the_formula_says(model, tp):
    found = in_threads(local_groups("tp", tp), lambda group: held_by(model, {"tp": group}, tp))
    (named,), (units,) = counted(model, lower(build("1f1b", 1, 1)), Mesh(tp=tp))
    assert held_count(named) == units.whole == max(found)
    if model.lora is None:
        (stage,) = held_by_stage(model, [range(model.layers)], Mesh(tp=tp))
        assert stage.all == max(found)


@pytest.mark.sampled
@pytest.mark.parametrize("tp", ["2d:2x2", "2.5d:2x2x2", "3d:2x2x2"])
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_on_a_grid_it_is_an_estimate(kind, tp):
    model = kind(layers=2, hidden=48, heads=4, seq=8, vocab=64)
    found = in_threads(groups_on(tp), lambda groups: held_by(model, groups, tp))
    (named,), _ = counted(model, lower(build("1f1b", 1, 1)), Mesh(tp=tp))
    assert held_count(named) == pytest.approx(max(found), rel=0.15)


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
