"""What actors hold and send with ZeRO, whose replicas cut each tensor into even parts, on paper."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.actors.data_parallel.buckets import pack
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.sharding import first_ranks, num_blocks
from raypar.actors.specs.data import Batches
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.data_sheets import DEVICES, LINKS
from raypar.planner.memory.worker import ActorMemory, worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.search.fit import need_of
from raypar.planner.sizes.sized_run import SizedRun, counts_by_rank
from raypar.planner.timing.step import StepModel
from raypar.planner.traffic import step_traffic
from tests.support.spans import cut_spans

GPT2_XL = GPT(layers=48, hidden=1600, heads=25, seq=1024, vocab=50_257)
LLAMA_8B = Llama(layers=32, hidden=4096, heads=32, kv_heads=8, seq=2048, vocab=128_256, ffn=14_336, tied=False)
EXPERTS = GPT(layers=8, hidden=512, heads=8, seq=512, vocab=32_000, moe=MoE(experts=64, top_k=2))
SMALL = {"layers": 2, "hidden": 128, "heads": 4, "seq": 32, "vocab": 257}  # 0.4 M parameters
BF16 = Precision("bf16")


def sized_of(model, mesh: Mesh, **changes) -> SizedRun:
    run = Run(model=model, mesh=mesh, microbatches=mesh.dp, **changes)
    return SizedRun.of(run, check_run(run)["train"])


def parameters_of(model: GPT | Llama) -> dict[str, nn.Parameter]:
    """The parameters of the modules that actors build, without memory, by name in the order of the model."""
    built = Skeleton(model, 0).model
    found = {
        f"{layer}.{name}": parameter
        for layer, module in zip(built.names, built.skeleton, strict=True)
        for name, parameter in module.named_parameters()
    }
    return {name: found[name] for name in built.parameter_names()}


def memory_of(sized: SizedRun) -> list[ActorMemory]:
    return worker_memory(sized, from_flops(sized).timeline)


@given(
    sizes=st.lists(st.integers(0, 3000) | st.integers(60_000, 90_000) | st.just(0), max_size=9),
    ranks=st.integers(1, 80),
    data=st.data(),
)
def test_ranks_have_what_their_spans_have(sizes, ranks, data):
    elements = {str(number): count for number, count in enumerate(sizes)}
    firsts = {name: data.draw(st.integers(0, ranks - 1)) for name in elements}
    held = [0] * ranks
    for name, count in elements.items():
        for rank, (start, stop) in enumerate(cut_spans(count, ranks, firsts[name])):
            held[rank] += stop - start
    assert counts_by_rank(elements, firsts, ranks) == held


LAYOUTS = [
    *[(model, {}, n) for model in (GPT2_XL, LLAMA_8B, EXPERTS) for n in (2, 3, 8, 64, 512)],
    *[(LLAMA_8B, {"tp": 8}, n) for n in (8, 64, 512)],
    *[(EXPERTS, {"tp": 8}, n) for n in (8, 64, 512)],
    *[(EXPERTS, {"ep": 8}, n) for n in (8, 64, 512)],
    *[(GPT2_XL, {"pp": 4}, n) for n in (3, 64, 512)],
]


@pytest.mark.parametrize(("model", "axes", "replicas"), LAYOUTS, ids=lambda value: getattr(value, "kind", str(value)))
def test_the_fullest_actor_has_hardly_more_than_the_mean(model, axes, replicas):
    sized = sized_of(model, Mesh(dp=replicas, **axes), zero=3, precision=BF16)
    experts = replicas // sized.world.mesh.ep
    for pp, memory in enumerate(memory_of(sized)):
        of_experts = sized.counts.experts[pp]
        mean = Fraction(sized.counts.held[pp] - of_experts, replicas) + Fraction(of_experts, experts)
        for found, each in ((memory.weights, 2), (memory.gradients, 4), (memory.optimizer, 12)):
            assert each * mean <= found <= each * mean * Fraction(101, 100)


@pytest.mark.parametrize("optim", [None, SGD(), Muon()])
@pytest.mark.parametrize("model", [GPT(**SMALL), Llama(**SMALL, kv_heads=2), GPT(**SMALL, moe=MoE(experts=4))])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_of_small_models_too_at_every_level(model, replicas, optim):
    changes = {} if optim is None else {"optim": optim}
    found = {level: memory_of(sized_of(model, Mesh(dp=replicas), zero=level, **changes))[0] for level in range(4)}
    plain = found.pop(0)
    for level, memory in found.items():
        shares = {
            "weights": replicas if level == 3 else 1,
            "gradients": replicas if level > 1 else 1,
            "optimizer": replicas,
        }
        for kind, share in shares.items():
            mean = Fraction(getattr(plain, kind), share)
            assert mean <= getattr(memory, kind) <= mean * Fraction(105, 100), (level, kind)


@pytest.mark.parametrize("kind", [GPT, Llama])
def test_the_fullest_actor_is_that_of_the_models_own_tensors(kind):
    """The tensors of torch's modules, cut as actors do."""
    model = kind(**SMALL)
    shapes = {name: parameter.numel() for name, parameter in parameters_of(model).items()}
    for replicas in (2, 3, 4, 7):
        firsts, held = first_ranks(shapes, replicas), [0] * replicas
        for name, count in shapes.items():
            for rank, (start, stop) in enumerate(cut_spans(count, replicas, firsts[name])):
                held[rank] += stop - start
        (memory,) = memory_of(sized_of(model, Mesh(dp=replicas), zero=3))
        assert memory.weights == 4 * max(held)


@pytest.mark.parametrize("replicas", [64, 512, 4096])
def test_a_large_llama_is_divided_by_any_number_of_replicas(replicas):
    begin = time.process_time()
    sized = sized_of(LLAMA_8B, Mesh(dp=replicas), zero=3, precision=BF16)
    (memory,) = memory_of(sized)
    step_traffic(sized)
    assert time.process_time() - begin < 3.0, "0.6 s where nothing else computes"
    assert memory.weights == pytest.approx(15.0 * 2**30 / replicas, rel=0.01)
    assert memory.optimizer == pytest.approx(1.4 * 2**30 * 64 / replicas, rel=0.01)
    unit = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336 + 2)
    assert memory.buckets <= 4 * (128_256 * 4096 + unit), "the largest tensor's gradient and one unit"


@pytest.mark.parametrize("bucket_mb", [0.001, 0.05, 0.2, 4.0])
@pytest.mark.parametrize("precision", [Precision(), BF16])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("moe", [None, MoE(experts=4)])
def test_three_buckets_in_turn_are_there_at_a_time(bucket_mb, precision, microbatches, moe):
    """Actors pack buckets; of experts that are divided, one is filled while those of other weights are reduced."""
    model, dtype = GPT(**SMALL, moe=moe), torch.bfloat16 if precision.is_half else torch.float32
    mesh, bucket = Mesh(dp=4, ep=2 if moe else 1), int(bucket_mb * 2**20)
    run = Run(model=model, mesh=mesh, microbatches=microbatches, zero=2, bucket_mb=bucket_mb, precision=precision,
              zero_reduce="microbatch")  # fmt: skip
    (memory,) = memory_of(SizedRun.of(run, check_run(run)["train"]))
    own = {
        name: nn.Parameter(one.to(dtype))
        for name, one in parameters_of(model).items()
        if not any(f".experts.{away}." in name for away in (2, 3))
    }
    packed = pack(0, own, {name: int(".experts." in name) for name in own}, bucket)
    bytes_ = [4 * sum(one.numel() for one in each.parameters.values()) for each in packed] * microbatches
    most = max(sum(bytes_[at : at + 3]) for at in range(len(bytes_)))
    largest = 4 * max(one.numel() for one in own.values())
    layer = [4 * sum(one.numel() for name, one in own.items() if name.startswith(f"blocks.{at}.")) for at in (0, 1)]
    full = bucket * (2 if precision.is_half else 1)  # with gradients in fp32
    in_bound = max(largest + max(layer), 3 * full)
    assert memory.buckets <= in_bound
    assert min(most, in_bound) <= memory.buckets <= min(most + (full if moe else 0), in_bound)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_stage_without_tensors_has_no_parts(level):
    own = Layers(lambda: [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)], loss=nn.functional.cross_entropy)
    data = Batches(lambda *_: (torch.ones(1, 3), torch.zeros(1).long()))
    nothing = memory_of(sized_of(own, Mesh(pp=3, dp=3), zero=level, data=data))[1]
    assert (nothing.weights, nothing.gradients, nothing.optimizer, nothing.buckets) == (0, 0, 0, 0)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("model", "replicas"), [(GPT(**SMALL), 3), (Llama(**SMALL), 64), (GPT2_XL, 512)])
def test_an_actor_sends_its_part_of_each_message(model, replicas, level):
    """A flag goes with each part of a gradient: a tensor of fewer blocks than replicas has fewer parts."""
    sized = sized_of(model, Mesh(dp=replicas), zero=level, zero_reduce="step", zero_gather="step") if level == 3 else (
        sized_of(model, Mesh(dp=replicas), zero=level)
    )  # fmt: skip
    sizes = [parameter.numel() for parameter in parameters_of(model).values()]
    flags = sum(min(replicas, num_blocks(count)) for count in sizes)
    rounds = replicas if level == 2 else 1  # microbatches; others add gradients up first
    sent = step_traffic(sized)
    assert {*sent} == {("dp", "reduce_scatter"), ("dp", "all_gather")}
    assert sent["dp", "reduce_scatter"] == rounds * 4 * (sum(sizes) + flags) * (replicas - 1) // replicas
    assert sent["dp", "all_gather"] == 4 * sum(sizes) * (replicas - 1) // replicas


def test_copies_of_shards_are_added_up_and_experts_sent_apart():
    hybrid = step_traffic(sized_of(GPT(**SMALL), Mesh(dp=4, shard=2), zero=1))
    assert {*hybrid} == {("shard", "reduce_scatter"), ("shard", "all_gather"), ("replicate", "all_reduce")}
    experts = step_traffic(sized_of(GPT(**SMALL, moe=MoE(experts=4)), Mesh(dp=4, ep=2), zero=1))
    assert {*experts} == {
        *(("dp", op) for op in ("reduce_scatter", "all_gather")),
        *(("edp", op) for op in ("reduce_scatter", "all_gather")),
        ("ep", "all_to_all"),
    }


def test_muon_has_whole_matrices_for_a_while():
    changes = {"optim": Muon(), "zero": 3}
    (memory,) = memory_of(sized_of(GPT2_XL, Mesh(dp=64), **changes))
    assert memory.working >= 9 * 4 * 1600 * 6400
    (other,) = memory_of(sized_of(GPT2_XL, Mesh(dp=64), zero=3))
    assert 1.0 < other.optimizer / memory.optimizer < 2.0


def test_own_layers_tiles_and_adapters_are_divided_too():
    own = Layers(lambda: [nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 20)], loss=nn.functional.cross_entropy)
    data = Batches(lambda *_: (torch.ones(1, 300), torch.zeros(1).long()))
    adapted = GPT(**SMALL, lora=Lora(rank=4))
    tiled = {"tile": {"blocks.*": 4}}
    for model, changes in ((own, {"data": data}), (adapted, {}), (GPT(**SMALL), tiled)):
        sized = sized_of(model, Mesh(dp=3), zero=3, **changes)
        (share,), (held,) = sized.counts.shares, sized.counts.held
        assert held / 3 <= share.count <= 1.05 * held / 3, model


def test_parts_of_no_tensor_are_counted():
    assert counts_by_rank({}, {}, 3) == [0, 0, 0]
    assert math.prod(counts_by_rank({"a": 64}, {"a": 2}, 3)) == 0


@pytest.mark.parametrize("level", [2, 3])
def test_a_search_counts_the_same(level):
    """In closed form, for thousands of layouts."""
    cluster = Cluster(DEVICES["a100"], 64, 8, LINKS["nvlink3"], LINKS["ib-hdr"], 8)
    for replicas in (64, 512):
        sized = sized_of(LLAMA_8B, Mesh(dp=replicas), zero=level, precision=BF16)
        (memory,) = memory_of(sized)
        need = need_of(StepModel(sized.run, LLAMA_8B, cluster))
        assert need.optimizer == pytest.approx(memory.optimizer, rel=0.01)
        assert need.weights == pytest.approx(memory.weights + memory.gathered, rel=0.01)
        assert need.gradients == pytest.approx(memory.gradients + memory.buckets, rel=0.1)


def test_a_search_counts_the_largest_gradient_of_an_actor_alone():
    cluster = Cluster(DEVICES["a100"], 1, 1, LINKS["nvlink3"], LINKS["ib-hdr"], 8)
    sized = sized_of(LLAMA_8B, Mesh(), offload="optimizer", precision=BF16)
    need = need_of(StepModel(sized.run, LLAMA_8B, cluster))
    assert need.gradients >= 4 * 128_256 * 4096
