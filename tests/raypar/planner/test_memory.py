"""The memory that a run needs, against what stages keep and what a machine has."""

from __future__ import annotations

import re
import types
from dataclasses import replace

import pytest
import torch

from raypar.actors.machine import this_machine as host
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.init.cast import cast
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.memory.all_actors import server_memory
from raypar.planner.memory.snapshots import snapshot_counts
from raypar.planner.memory.worker import ActorMemory, worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.resource_needs import actors_text
from raypar.planner.sizes.sized_run import ParameterCounts, SizedRun
from raypar.reporting.summary import log_plan, plan_rows
from raypar.schedules.catalog import build
from tests.support.kept_activations import (  # noqa: F401  (fixtures that hold for every test)
    A,
    B,
    H,
    S,
    block,
    hooks_inside_count_too,
    kept,
    one_thread,
)

HIDDEN = {"layers": 3, "hidden": H, "heads": A, "seq": S, "vocab": 256, "attention": "materialised"}


def memory_of(run: Run, skeleton: Skeleton | None = None) -> list[ActorMemory]:
    schedule = check_run(run)["train"]
    sized = SizedRun.of(run, schedule, skeleton)
    return worker_memory(sized, from_flops(sized).timeline)


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (GPT, {}),
        (Llama, {}),
        (Llama, {"kv_heads": 1}),
        (Llama, {"head_width": 2 * H // A, "qk_norm": True, "qkv_bias": True}),
        (Llama, {"post_norms": True, "attention_cap": 9.0, "query_scale": 5.0, "gate": "gelu_tanh"}),
        (GPT, {"moe": MoE(experts=4)}),
        (Llama, {"moe": MoE(experts=4, shared=1, residual=True, width=32)}),
    ],
)
def test_a_block_keeps_what_is_counted(kind, more, dropout, recompute):
    """The middle one of three stages has one block and nothing else; one microbatch is under way."""
    run = Run(
        model=kind(**HIDDEN, **more, dropout=dropout), mesh=Mesh(pp=3), schedule="naive", microbatches=1,
        micro_batch_size=B, recompute=(recompute,) * 3,
    )  # fmt: skip
    stage, x, _ = block(kind, recompute=(recompute,), dropout=dropout, **more)
    again = (3 if dropout else 1) + ("attention_cap" in more)
    scores = A * S * S * B * again if recompute == "selective" else 0  # made again, one block at a time
    assert memory_of(run)[1].activations == pytest.approx(4 * (kept(stage, x) + scores), rel=0.06)


@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}, {"attention": "fused"}, {"moe": MoE(experts=4)}])
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_in_half_precision_a_block_keeps_half_but_for_what_is_computed_in_fp32(kind, more):
    run = Run(
        model=kind(**HIDDEN | more), mesh=Mesh(pp=3), schedule="naive", microbatches=1, micro_batch_size=B,
        precision=Precision("bf16"),
    )  # fmt: skip
    stage, x, _ = block(kind, **more)
    cast(stage.modules, torch.bfloat16, torch.float32)
    assert memory_of(run)[1].activations == pytest.approx(4 * kept(stage, x.bfloat16()), rel=0.06)


def test_scratch_memory_of_attention_in_blocks_is_counted_where_it_serves():
    """It serves in fp32 only; in half precision torch's attention takes its place."""

    def more_in_blocks(precision: Precision, **of_model) -> int:
        run = recipe("gpt-small", mesh=Mesh(), precision=precision)
        run = replace(run, model=replace(run.model, **of_model))
        fused = replace(run, model=replace(run.model, attention="fused"))
        return memory_of(run)[0].activations - memory_of(fused)[0].activations

    assert (more_in_blocks(Precision()), more_in_blocks(Precision("bf16"))) == (12 << 20, 0)
    a_layer = 2 * 8 * (64 * 64 * (1 + 2 + 3 + 4)) * 4
    assert [more_in_blocks(Precision(), layers=layers) for layers in (1, 2)] == [a_layer, 2 * a_layer]
    assert [more_in_blocks(Precision(), **few) for few in ({"seq": 32}, {"heads": 4}, {"positions": "alibi"})] == [
        0
    ] * 3


def test_state_is_divided_as_the_run_says():
    run = recipe("gpt-small", mesh=Mesh(dp=2))
    whole = 4 * 6_509_056
    zero, plain = memory_of(run)[0], memory_of(replace(run, zero=0))[0]
    assert (zero.weights, zero.gradients, zero.optimizer) == (whole, whole, whole)
    assert plain.optimizer == 2 * whole
    assert memory_of(replace(run, zero=0, optim=SGD()))[0].optimizer == whole
    served = replace(run, zero=None, data_parallel="parameter_server", servers=2)
    assert memory_of(served)[0].optimizer == 0
    (server,) = server_memory(
        SizedRun(served, world_of(served), ParameterCounts([6_509_056], ()), build("naive", 1, 1))
    )
    assert (server.weights, server.optimizer) == (whole // 2, whole)


def test_what_is_copied_for_other_replicas_is_in_the_shared_memory_of_each():
    """Of a large model a member of a group fills 24 MiB; of a small one no more than there is to send."""
    large, small = (recipe(name, zero=3, mesh=Mesh(dp=2)) for name in ("gpt-124m", "gpt-tiny"))
    four = replace(large, mesh=Mesh(dp=4))
    whole = [memory_of(run)[0] for run in (large, four, small)]
    assert [memory.shared for memory in whole[:2]] == [48 << 20, 96 << 20]
    assert whole[2].shared == 2 * (whole[2].buckets + whole[2].gathered)


def test_muon_keeps_one_value_for_a_parameter_of_a_matrix():
    run = recipe("gpt-small", mesh=Mesh(dp=2, pp=2), optim=Muon())
    kept = [memory.optimizer for memory in memory_of(run, Skeleton(run.model, run.seed))]
    matrices, others = 4 * 12 * 256**2, 4 * 10 * 256
    ends = [256 * (256 + run.model.seq), 256 * 256 + 2 * 256]
    halves = [4 * (matrices + 2 * (others + end)) // 2 for end in ends]
    assert kept == pytest.approx(halves, rel=0.035)  # parameters are owned whole


def test_recomputation_and_more_ranks_take_less():
    run = recipe("gpt-small", mesh=Mesh())
    plain = memory_of(run)[0].activations
    changes = [{"recompute": "full"}, {"mesh": Mesh(tp=2)}, {"mesh": Mesh(cp=2)}, {"mesh": Mesh(tp="2d:2x2")}]
    found = [memory_of(replace(run, **change))[0].activations for change in changes]
    assert all(less < plain for less in found[1:])
    assert found[0] < 1.2 * plain, "with one microbatch under way nothing is gained, and little lost"
    sequence = memory_of(replace(run, mesh=Mesh(tp=2), sequence_parallel=True))[0].activations
    assert sequence < found[1]


def test_checkpoints_are_held_against_the_disk(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = replace(recipe("gpt-small"), folder=str(tmp_path / "not" / "yet"))
    schedule = check_run(run)["train"]
    monkeypatch.setattr(
        "raypar.planner.resource_needs.free_disk", lambda folder: 250 << 20 if folder == tmp_path else None
    )
    assert dict(plan_rows(run, schedule))["checkpoints"] == "about 74 MiB: 1; the disk has 250 MiB free"
    with monkeypatch.context() as without:
        without.setattr("raypar.planner.resource_needs.lacks_device", lambda device: device == "cuda")
        on_paper = dict(plan_rows(replace(run, device="cuda"), schedule))["checkpoints"]
    assert on_paper == "about 74 MiB: 1", "the disk of other machines is not known"
    beside = "2 of about 74 MiB each, and the one that is written"
    for keep, told in ((2, f"about 223 MiB: {beside}"), (3, "TOO MUCH: set keep_last to 2 at most, or give a folder")):
        often = replace(run, save_every=15, keep_last=keep)
        assert told in dict(plan_rows(often, schedule))["checkpoints"]
    monkeypatch.setattr("raypar.planner.resource_needs.free_disk", lambda folder: 120 << 20)
    told = dict(plan_rows(replace(run, save_every=15, keep_last=1), schedule))["checkpoints"]
    assert told.endswith("TOO MUCH: free about 29 MiB more, or give a folder of another disk")
    monkeypatch.setattr("raypar.planner.resource_needs.free_disk", lambda folder: 50 << 20)
    told = dict(plan_rows(run, schedule))["checkpoints"]
    assert told.endswith("TOO MUCH: free about 24 MiB more, or give a folder of another disk")
    plain = replace(run, optim=SGD(momentum=0.0), save_every=50)
    assert dict(plan_rows(plain, schedule))["checkpoints"].startswith("about 50 MiB: 2 of about 25 MiB each")


def test_checkpoints_of_adapters_hold_these_alone(tmp_path):
    """In each of two blocks q and v of 64 to 64, rank 4, with Adam's two moments beside each weight."""
    model = GPT(layers=2, hidden=64, heads=4, lora=Lora(rank=4, targets=("q", "v")))
    run = Run(model=model, folder=str(tmp_path / "run"))
    found = dict(plan_rows(run, check_run(run)["train"]))["checkpoints"]
    assert found.startswith(f"about {2 * 2 * 4 * 128 * 12 / 1024:.0f} KiB: 1"), found


def test_what_is_needed_is_held_against_what_is_free(monkeypatch):
    run = recipe("gpt-small")
    schedule = check_run(run)["train"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.planner.resource_needs.free_memory", lambda: 24 << 30)
    assert (
        dict(plan_rows(run, schedule))["memory in all"] == "about 987 MiB of 24.0 GiB free here, 12.0 GiB for each of 2"
    )
    monkeypatch.setattr("raypar.planner.resource_needs.free_memory", lambda: 500 << 20)
    assert "free here, 250 MiB for each of 2: TOO MUCH" in dict(plan_rows(run, schedule))["memory in all"]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "not known before the launch" in dict(plan_rows(run, schedule))["memory in all"]


def test_a_machine_tells_what_is_free(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert (host.free_memory(), host.total_memory()) == (2 << 20, 9 << 10)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert (host.free_memory(), host.total_memory()) == (600, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory() == 2 << 20
    (tmp_path / "meminfo").unlink()
    assert host.free_memory() is None


def test_a_system_without_proc_tells_its_memory_in_pages(monkeypatch, tmp_path):
    for name in ("_MEMINFO", "_CGROUP"):
        monkeypatch.setattr(host, name, tmp_path / "none")
    monkeypatch.setattr(host.os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 16384}.__getitem__)
    assert (host.free_memory(), host.total_memory()) == (None, 16_384_000)


def test_a_process_takes_more_where_torch_has_cuda(monkeypatch):
    run = recipe("gpt-tiny", mesh=Mesh(), device="cpu")
    schedule = check_run(run)["train"]
    for built, told in ((False, "process 336 MiB"), (None, "process 336 MiB"), (True, "process 656 MiB")):
        monkeypatch.setattr("raypar.planner.memory.worker.torch_has_cuda", lambda built=built: built)
        assert told in dict(plan_rows(run, schedule))["memory, pp=0"]


@pytest.mark.parametrize(
    ("line", "has"),
    [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '13.0'", True), ("hip = None", None)],
)
def test_torch_says_in_its_version_whether_it_has_cuda(monkeypatch, tmp_path, line, has):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
    origin = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host, "find_spec", lambda name: origin if name == "torch" else None)
    assert host.torch_has_cuda.__wrapped__() is has


def test_actors_need_this_machines_memory_where_they_compute_on_its_cpus(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_NVIDIA", tmp_path / "none")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [host.computes_here(device) for device in ("cpu", "auto", "cuda")] == [True, True, False]
    monkeypatch.setattr(host, "_NVIDIA", tmp_path)
    assert [host.computes_here(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not host.computes_here("cpu")


def test_an_estimate_that_is_more_than_is_free_is_a_warning(monkeypatch, caplog):
    run = recipe("gpt-small", device="cpu")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for free, level in ((24 << 30, "INFO"), (500 << 20, "WARNING")):
        monkeypatch.setattr("raypar.planner.resource_needs.free_memory", lambda free=free: free)
        caplog.clear()
        with caplog.at_level("INFO", "raypar"):
            log_plan(run, check_run(run)["train"], Skeleton(run.model, run.seed))
        (record,) = (one for one in caplog.records if "memory in all" in one.getMessage())
        assert record.levelname == level


def test_actors_are_told_by_axis():
    assert actors_text(Run(mesh=Mesh())) == "1"
    assert actors_text(Run(mesh=Mesh(pp=2), max_failures=1, spares=1)) == "2 = pp 2, and 1 spare"
    assert actors_text(Run(mesh=Mesh(pp=2, tp="2d:2x2")), {"pp": "recipe x"}) == "8 = pp 2 (recipe x) x tp 2d:2x2"


def test_spares_have_processes_of_their_own():
    run = Run(model=GPT(layers=2, hidden=32, heads=2, seq=8), mesh=Mesh(pp=2), max_failures=1, device="cpu")
    runs = run, replace(run, spares=2)
    rows = [dict(plan_rows(one, check_run(one)["train"])) for one in runs]
    found = [re.search(r"about ([\d.]+) (MiB|GiB) .* for each of (\d)", one["memory in all"]) for one in rows]
    sizes = [float(one[1]) * {"MiB": 1, "GiB": 1024}[one[2]] for one in found]
    process = float(re.search(r"process ([\d.]+) MiB", rows[0]["memory, pp=0"])[1])
    assert sizes[1] - sizes[0] == pytest.approx(2 * process, abs=60)
    assert [one[3] for one in found] == ["2", "4"]


def test_where_weights_are_divided_an_actor_computes_with_more_than_it_holds():
    run = Run(model=GPT(layers=2, hidden=32, heads=2, seq=8), mesh=Mesh(dp=2), zero=3)
    held = dict(plan_rows(run, check_run(run)["train"]))["parameters"].partition("; an actor ")[2]
    assert held.startswith("computes with ") and held.endswith("of which it holds its replica's part")


def test_own_layers_are_counted_from_their_skeleton():
    from torch import nn

    from raypar.actors.specs.data import Batches
    from raypar.actors.specs.model import Layers

    model = Layers(lambda: [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)], loss=nn.functional.cross_entropy)
    run = Run(model=model, mesh=Mesh(pp=2), data=Batches(lambda *_: (torch.ones(1, 3), torch.zeros(1).long())))
    rows = dict(plan_rows(run, check_run(run)["train"]))
    assert rows["parameters"] == "24; an actor holds 8 to 16"
    assert "activations unknown" in rows["memory, pp=0"]


def test_snapshots_and_their_copies_count_where_a_run_survives_failures():
    survives = replace(recipe("gpt-tiny", mesh=Mesh(pp=2)), max_failures=1)
    runs = [survives, *(replace(survives, **more) for more in ({"buddy_every": 1}, {"buddy_every": 0}))]
    assert [snapshot_counts(run) for run in runs] == [(2, 3), (2, 4), (2, 0)]
    assert [snapshot_counts(replace(survives, **{name: 0})) for name in ("max_failures", "snapshot_every")] == [
        (0, 0)
    ] * 2
    plain, kept = (memory_of(run)[0] for run in (replace(survives, max_failures=0), survives))
    assert kept.snapshots == 2 * (kept.weights + kept.optimizer) == kept.total - plain.total
    assert kept.copies == 3 * (kept.weights + kept.optimizer)
    assert dict(plan_rows(survives, check_run(survives)["train"]))["memory, pp=0"].count("on several nodes") == 1
