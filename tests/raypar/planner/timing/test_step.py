"""The closed form of a step, held against the simulation of its schedule."""

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.data_sheets import DEVICES, LINKS
from raypar.planner.timing.layer import embedding_parts, head_parts, layer_parts
from raypar.planner.timing.roofline import Product
from raypar.planner.timing.step import StepModel, predicted, simulated

CLUSTER = Cluster(DEVICES["a100"], 8, 8, LINKS["nvlink3"], LINKS["ib-hdr"], 8)
RUN = Run(
    model=GPT(layers=48, hidden=4096, heads=32, seq=2048, vocab=51200),
    precision=Precision(compute="bf16"),
    bucket_mb=128,
    micro_batch_size=1,
    microbatches=16,
    zero=1,
)
PIPELINE, REPLICAS = Mesh(pp=8, dp=4, tp=2), Mesh(dp=64)
SLOW, SLOWEST = ({"mesh": PIPELINE, "between": f"ethernet-{speed}"} for speed in (25, 10))


def paper(between="ib-hdr", **changes):
    run = replace(RUN, **changes)
    return StepModel(run, run.model, replace(CLUSTER, between=LINKS[between]))


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"mesh": PIPELINE}, 0.03),
        ({"mesh": PIPELINE, "microbatches": 4}, 0.03),
        ({"mesh": PIPELINE, "zero": 2}, 0.05),
        ({"mesh": PIPELINE, "schedule": "gpipe"}, 0.03),
        ({"mesh": PIPELINE, "schedule": "interleaved", "chunks": 3}, 0.04),
        ({"mesh": PIPELINE, "schedule": "interleaved", "chunks": 3, "microbatches": 4}, 0.1),
        ({"mesh": PIPELINE, "schedule": "zb-v", "chunks": 2}, 0.04),
        ({"mesh": PIPELINE, "schedule": "zb-h1"}, 0.06),
        ({"mesh": PIPELINE, "between": "ethernet-10"}, 0.14),
        (
            {**SLOW, "schedule": "interleaved", "chunks": 3, "microbatches": 64},
            0.11,
        ),
        (
            {**SLOWEST, "schedule": "interleaved", "chunks": 3, "microbatches": 64},
            0.03,
        ),
        (
            {**SLOWEST, "schedule": "interleaved", "chunks": 2, "microbatches": 64},
            0.04,
        ),
        ({**SLOWEST, "schedule": "zb-v", "chunks": 2, "microbatches": 64}, 0.11),
        ({"mesh": REPLICAS, "microbatches": 2, "zero": 0}, 0.01),
        ({"mesh": REPLICAS, "microbatches": 2}, 0.01),
        ({"mesh": REPLICAS, "microbatches": 2, "zero": 2}, 0.01),
        ({"mesh": REPLICAS, "microbatches": 2, "zero": 3}, 0.13),
    ],
)
def test_the_closed_form_is_near_the_simulation(changes, bound):
    found = paper(**changes)
    assert predicted(found).seconds == pytest.approx(simulated(found), rel=bound)


def test_a_long_step_is_told_from_two_shorter_ones():
    """The steady state repeats, so that 67 microbatches simulated in whole take what is told from 27 and 35."""
    from raypar.planner.timing import step as module

    found = paper(mesh=PIPELINE, microbatches=67)
    assert simulated(found) == pytest.approx(module._makespan(found, 67), rel=1e-3)


@pytest.mark.parametrize(
    "model",
    [
        GPT(layers=4, hidden=256, heads=4, seq=128, vocab=1000, attention="materialised"),
        Llama(layers=4, hidden=256, heads=4, kv_heads=2, seq=128, vocab=1000, attention="materialised"),
        Llama(layers=4, hidden=256, heads=4, seq=128, moe=MoE(experts=4, top_k=2), attention="materialised"),
    ],
    ids=["gpt", "llama", "experts"],
)
def test_operations_have_the_flops_of_the_cost_model(model):
    run = replace(RUN, model=model, micro_batch_size=3)
    layers = [layer_parts(run, model, model.num_experts(block)) for block in range(model.layers)]
    parts = [*embedding_parts(run, model), *head_parts(run, model), *(part for layer in layers for part in layer)]
    flops = sum(part.work.flops for part in parts)
    of_tables = sum(transformer_costs(model)) - 2 * model.hidden  # looking up an embedding has no products
    assert flops == pytest.approx(3 * model.seq * of_tables)


def test_tensor_ranks_divide_the_products():
    model = RUN.model
    alone, divided = (layer_parts(replace(RUN, mesh=Mesh(tp=tp)), model) for tp in (1, 4))
    for one, quarter in zip(alone, divided, strict=True):
        if one.work.flops:
            assert quarter.work.flops == pytest.approx(one.work.flops / 4)
        if one.name in ("norms", "residuals"):
            assert quarter.work.bytes == one.work.bytes
    sequence = layer_parts(replace(RUN, mesh=Mesh(tp=4), sequence_parallel=True), model)
    assert sum(part.work.bytes for part in sequence) < sum(part.work.bytes for part in divided)


@pytest.mark.parametrize(
    ("rows", "columns", "units", "longer"),
    [
        (256 * 108, 128, 108, 1.0),  # one full round
        (256 * 109, 128, 108, 216 / 109),  # and one tile in a second round
        (128, 256 * 108, 108, 1.0),  # tiles lie the other way
        (256, 128 * 27, 108, 1.0),  # each sum in four parts
        (256, 128 * 50, 108, 108 / 100),  # each sum in two parts
        (255, 128 * 108, 108, 256 / 255),  # a row short of a tile
        (1, 1, 0, 1.0),  # no tiles
    ],
)
def test_the_last_round_of_tiles_takes_as_long_as_a_full_one(rows, columns, units, longer):
    assert Product(rows, columns, 4096, 2).longer(units) == pytest.approx(longer)


def test_a_backward_has_the_products_of_both_gradients():
    product = Product(2, 3, 5, 2, 7)
    assert product.of_left[:3] == (2, 5, 3)
    assert product.of_right[:3] == (5, 3, 2)
    assert product.of_left.work == product.of_right.work == product.work


def test_a_slower_network_makes_a_longer_step():
    fast = predicted(paper(mesh=REPLICAS, microbatches=1))
    run = replace(RUN, mesh=REPLICAS, microbatches=1)
    slow = predicted(StepModel(run, run.model, replace(CLUSTER, between=LINKS["ethernet-10"])))
    assert slow.replicas > 2 * fast.replicas
    assert slow.layers == fast.layers
