"""The command that measures what the first GPU can tell (tests/gpu/first_hour), without one. No timings."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import raypar as rp
from raypar.actors.collective.gpu import nccl
from raypar.actors.collective.gpu.group import ring
from raypar.actors.collective.group import GroupMember
from raypar.actors.machine.device import ComputeDevice
from raypar.parity.verify import train_plainly
from raypar.planner.formulas.flops import training_flops
from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer
from tests.gpu import fakes
from tests.gpu.first_hour.__main__ import main, parse
from tests.gpu.first_hour.card import peak_flops
from tests.gpu.first_hour.contestants import record_step
from tests.gpu.first_hour.findings import Findings, resumed
from tests.gpu.first_hour.gpu_tests import run_tests
from tests.gpu.first_hour.kernels import step_kernels
from tests.gpu.first_hour.nanochat_like import nanochat_like
from tests.gpu.first_hour.nccl_groups import seconds_of
from tests.gpu.first_hour.outcome import NotPossibleError, Outcome
from tests.gpu.first_hour.row import main as measure_row
from tests.gpu.first_hour.rows import _TEST_SECONDS, FOLDER, ROWS, Row
from tests.gpu.first_hour.runner import NO_TIME, Runner
from tests.gpu.first_hour.workloads import FULL, SMALL, flops_per_token, run_of, tokens_of
from tests.gpu.ops import check_order, together
from tests.gpu.shared_gpu import check_group
from tests.support.local_groups import local_groups

CPU = torch.device("cpu")
MACHINE = {
    "card": "NVIDIA H100 80GB HBM3",
    "driver": "570.1",
    "torch": "2.13.0",
    "nccl": "2.28.3",
    "date": "2026-11-27",
}


# --- rows and what they train -----------------------------------------------------------------------------------------


def test_gpt_2_comes_first_and_a_step_of_it_has_half_a_million_tokens():
    first, *_ = ROWS.values()
    assert first.name == "gpt-124m-step/bf16/raypar"
    run = run_of(FULL["gpt-124m-step"], "bf16", "cuda", "")
    assert (tokens_of(run), run.micro_batch_size, run.model.seq) == (524_288, 64, 1024)


def test_every_row_has_its_workload_its_tests_and_small_sizes():
    assert {row.arguments["workload"] for row in ROWS.values() if row.kind == "training"} == {*FULL} == {*SMALL}
    there = {path.stem for path in FOLDER.glob("test_*.py")}
    assert {*_TEST_SECONDS} <= there
    assert {row.arguments["path"] for row in ROWS.values() if row.kind == "tests"} == {
        str(FOLDER / f"{name}.py") for name in there
    }


@pytest.mark.parametrize("name", FULL)
def test_a_step_has_the_same_tokens_in_every_dtype_and_microbatch(name):
    runs = [run_of(FULL[name], dtype, "cuda", "", halvings) for dtype in ("bf16", "fp32") for halvings in (0, 1, 2)]
    assert len({tokens_of(run) for run in runs}) == 1
    assert runs[1].micro_batch_size == max(1, runs[0].micro_batch_size // 2) == runs[3].micro_batch_size


def test_flops_are_those_of_the_papers():
    gpt = FULL["gpt-124m"].model
    assert flops_per_token(gpt) == pytest.approx(training_flops(12, 768, 1024, 50304) / 1024, rel=1e-4)
    llama = FULL["llama-8b-offload"].model
    weights, scores = 7.5e9, 12 * 32 * 4096 * 2048  # without the embedding, which is looked up; 12 l h s of attention
    assert flops_per_token(llama) == pytest.approx(6 * weights + scores, rel=0.01)
    assert flops_per_token(FULL["llama-8b-lora"].model) == pytest.approx(4 * weights + scores, rel=0.01)


def test_a_peak_is_that_of_the_dtype_or_it_is_said_why_there_is_none():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16")[0] == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32")[0] == 66.9e12
    assert peak_flops("Tesla T4", "fp32") == (None, "MFU: raypar's tables have no fp32 peak of Tesla T4")
    assert peak_flops("none (CPU)", "bf16") == (None, "MFU: it needs a GPU")


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernel(start, seconds, name="gemm", cat="kernel"):
    return {"cat": cat, "name": name, "ts": 1e6 * start, "dur": 1e6 * seconds}


def test_a_gap_is_when_no_kernel_of_any_stream_runs():
    other = [kernel(0.0, 1.0, cat="gpu_memcpy"), {"ph": "M", "name": "process_name"}]
    found = step_kernels([kernel(4.0, 1.0, "add"), kernel(1.0, 2.0), kernel(2.0, 0.5), kernel(2.5, 1.0), *other])
    assert (found.count, found.span, found.gap) == (4, 4.0, 0.5)
    assert found.longest == {"gemm": 3.5, "add": 1.0}
    assert (step_kernels(other).count, step_kernels(other).gap) == (0, 0.0)


# --- contestants ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from a second core, for which they would wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path):
    """``run(workload, dtype)`` is a small one on some text."""
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 50)

    def of(workload, dtype="fp32", **changes):
        made = run_of(SMALL[workload], dtype, "cpu", "")
        return replace(made, data=rp.Text(str(tmp_path / "text"), cache=str(tmp_path)), steps=3, **changes)

    return of


@pytest.mark.sampled
@pytest.mark.parametrize("workload", ["gpt-124m", "llama-1.3b", "llama-8b-lora"])
def test_the_peer_trains_tied_weights_and_adapters_as_raypar_verifies(run, workload):
    losses = LocalTrainer(whole_model(run(workload), 0, CPU)).train(0, 3)
    assert losses == pytest.approx(train_plainly(run(workload)).losses, rel=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("workload", ["gpt-124m", "llama-8b-lora"])
def test_the_peer_trains_in_half_precision(run, workload, dtype):
    losses = LocalTrainer(whole_model(run(workload, dtype), 0, CPU)).train(0, 3)
    wanted = train_plainly(run(workload)).losses
    assert losses == pytest.approx(wanted, rel=0.01)
    assert losses != wanted


def test_the_loop_for_one_model_learns_and_a_cpu_runs_no_kernels(run):
    trainer = nanochat_like(run("gpt-124m", "bf16"), ComputeDevice(), None)
    losses = trainer.train(0, 12)
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # the logarithm of 256
    assert losses[-1] < losses[0] - 0.01
    assert record_step(trainer, 12).count == 0


# --- tests, groups ----------------------------------------------------------------------------------------------------


def test_tests_are_counted_and_their_failures_named(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): pytest.skip('no b')\n"
    )
    reports = []
    with pytest.raises(RuntimeError, match=r"1 of 2 tests failed, the first: test_some.py::test_b: assert 1 == 2"):
        run_tests(str(path), lambda **figures: reports.append(figures))
    assert [reports[-1][name] for name in ("passed", "failed", "skipped")] == [1, 1, 1]
    assert len(reports) == 4, "one when they are found, and one after each"
    path = tmp_path / "test_others.py"
    path.write_text("import pytest\ndef test_c(): pytest.skip('no GPU here')\n")
    with pytest.raises(NotPossibleError, match="1 tests: Skipped: no GPU here"):
        run_tests(str(path), lambda **figures: None)


@pytest.fixture
def played_nccl():
    """NCCL played by threads."""
    with fakes.fake_nccl():
        yield


def test_a_group_over_nccl_is_checked_and_timed(played_nccl):
    store = dist.HashStore()
    groups = together(2, lambda rank: nccl.NcclGroup(GroupMember("g", "x", rank, 2, 30.0), store, CPU))
    try:
        together(2, lambda rank: groups[rank].connect(ring(2)))
        found = together(2, lambda rank: check_group(groups[rank]))
        assert {"all_reduce", "reduce_scatter", "all_to_all", "send", "recv"} <= {*found[0]}
        assert min(together(2, lambda rank: seconds_of(groups[rank], "p2p", 4096))) > 0
    finally:
        for group in groups:
            group.abort()


def test_tensors_that_come_in_another_order_are_found():
    groups = local_groups("x", 2)
    together(2, lambda rank: check_order(groups[rank], CPU))
    for group in groups:
        group.send = lambda tensor, dst, tag, usual=group.send: usual(tensor, dst, tag=tag ^ 1)
    with pytest.raises(AssertionError, match="order"):
        together(2, lambda rank: check_order(groups[rank], CPU))


# --- the runner -------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, time
name, result, *options = sys.argv[1:]
def keep(**report): open(result, "w").write(json.dumps(report))
"""
BODIES = {
    "good": "keep(status='done', figures={'tokens_per_s': 5.0})",
    "wrong": "print('so far', 'so good'); raise ValueError('here is why')",
    "killed": "os.kill(os.getpid(), 9)",
    "hangs": "keep(figures={'tokens_per_s': 3.0}, doing='recording kernels'); time.sleep(60)",
    "large": "full = '2' != options[options.index('--halvings') + 1]\n"
    "keep(status='failed' if full else 'done', reason='CUDA out of memory' if full else '')\nsys.exit(full)",
    "machine": "keep(status='done', figures={'card': 'none', 'gpus': 0})",
}


def fake(name, result, options):
    """The command of a process that plays a row."""
    return [sys.executable, "-S", "-u", "-c", PROGRAM + BODIES[name], name, str(result), *options]


def row(name, seconds=0.1, kind="training"):
    return Row(name, kind, seconds)


def measured(tmp_path, rows, seconds=60.0, found=None):
    found = Findings(MACHINE, False) if found is None else found
    Runner(tmp_path, seconds, command=fake).run(rows, found, lambda row, outcome: None)
    return found


def test_a_row_that_fails_is_one_row_with_its_cause(tmp_path):
    found = measured(tmp_path, [row("wrong"), row("killed"), row("good")])
    states = {name: (one.status, one.reason) for name, one in found.outcomes.items()}
    assert states["wrong"] == ("failed", "ended with exit code 1: ValueError: here is why")
    assert states["killed"] == ("failed", "ended by SIGKILL: it wrote nothing")
    assert states["good"] == ("done", "")
    assert found.outcomes["wrong"].log[0] == "so far so good"
    assert {*found.failures()} == {"wrong", "killed"}


def test_a_row_that_hangs_keeps_its_figures_and_ends_in_time(tmp_path):
    found = measured(tmp_path, [row("hangs"), row("good", seconds=40.0)], seconds=4.0)
    hangs, late = found.outcomes.values()
    assert (hangs.status, hangs.figures) == ("cut off", {"tokens_per_s": 3.0})
    assert hangs.reason == "the time was over after 1 s, while recording kernels"
    assert (late.status, late.reason, late.attempts) == ("no time left", NO_TIME, 0)


def test_a_microbatch_that_does_not_fit_is_halved(tmp_path):
    found = measured(tmp_path, [row("large")]).outcomes["large"]
    assert (found.status, found.attempts) == ("done", 1)
    assert found.notes == ["microbatches 4 times as large need more memory than there is"]


def test_what_is_done_is_not_run_again_and_what_failed_once_more(tmp_path):
    rows = [row("good"), row("wrong"), row("machine", seconds=100.0)]
    found = measured(tmp_path, rows, seconds=20.0)
    found.write(tmp_path)
    again = resumed(tmp_path / "first_hour.json", MACHINE, small=False)
    assert again.outcomes == found.outcomes
    assert [one.name for one in rows if again.is_open(one.name)] == ["wrong", "machine"]
    measured(tmp_path, rows, seconds=200.0, found=again)
    assert [again.outcomes[name].attempts for name in ("good", "wrong", "machine")] == [1, 2, 1]
    assert not any(again.is_open(one.name) for one in rows)


@pytest.mark.parametrize(
    ("machine", "small", "says"),
    [
        (MACHINE | {"card": "NVIDIA H200"}, False, "card NVIDIA H100 80GB HBM3, here NVIDIA H200"),
        (MACHINE, True, "its sizes are full ones"),
    ],
)
def test_rows_of_two_machines_do_not_share_a_table(tmp_path, machine, small, says):
    Findings(MACHINE, False).write(tmp_path)
    with pytest.raises(ValueError, match=says):
        resumed(tmp_path / "first_hour.json", machine, small=small)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": {"a": {"other": 1}}, "machine": {}, "small": false}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="no file of this program"):
        resumed(tmp_path / "other.json", MACHINE, small=False)


def test_the_table_has_figures_reasons_and_the_machine(tmp_path):
    figures = {"tokens_per_s": 123456.0, "mfu": 0.4321, "kernels": 1234, "gap_ms": 5.0, "gap_share": 0.01}
    found = Findings(MACHINE, True)
    found.outcomes = {
        "gpt-124m/bf16/raypar": Outcome("done", figures=figures, notes=["a | note"]),
        "gpt-124m/bf16/torch": Outcome("failed", "OutOfMemoryError: CUDA out of memory"),
        "tests/gpu/test_device.py": Outcome("done", figures={"tests": 2, "passed": 2}),
        "NCCL group of 2 actors on one GPU": Outcome(
            "done", figures={"ops": ["all_reduce"], "bytes_per_s": {"all_reduce": {"1048576": 2e9, "65536": 1e9}}}
        ),
        "pp=2 over NCCL on one GPU": Outcome("no time left", NO_TIME),
    }
    found.write(tmp_path)
    text = (tmp_path / "first_hour.md").read_text()
    assert "| gpt-124m/bf16/raypar | 123,456 | 43.2% | - | - | 1,234 | 5.0 | 1.0% | - | - | - | a / note |" in text
    assert "failed: OutOfMemoryError: CUDA out of memory |" in text
    assert "| tests/gpu/test_device.py | 2 | 2 | - | - | - |" in text
    assert "| - | 1: all_reduce | all_reduce 1,000 2,000 | - |" in text
    assert "| no time left |" in text
    assert text.rstrip().endswith("their figures mean nothing.")
    assert "NVIDIA H100 80GB HBM3, driver 570.1" in text
    assert json.loads((tmp_path / "first_hour.json").read_text())["rows"]["gpt-124m/bf16/torch"]["status"] == "failed"


def test_the_command_line_names_rows_by_patterns(capsys):
    assert [one.name for one in parse(["--only", "gpt-124m/bf16/torch*"]).only] == [
        "gpt-124m/bf16/torch",
        "gpt-124m/bf16/torch-compiled",
    ]
    with pytest.raises(SystemExit):
        parse(["--only", "gpt-3"])
    assert "--only gpt-3: no row has such a name" in capsys.readouterr().err
    assert main(["--list", "--only", "NCCL*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- all of it --------------------------------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes are taken where there is no GPU")


def report_of(path, name, *options):
    """The exit code of a row's process, played here, and its report."""
    code = measure_row([name, str(path / "row.json"), "--small", "--cache", str(path), *options])
    return code, json.loads((path / "row.json").read_text())


@NO_GPU
def test_a_row_reports_its_figures_and_what_a_cpu_lacks(tmp_path):
    code, found = report_of(tmp_path, "gpt-124m/bf16/torch", "--card", "none (CPU)")
    assert (code, found["status"], found["reason"]) == (0, "done", "")
    assert found["figures"]["tokens_per_s"] > 0
    assert found["figures"]["tokens_a_step"] == 128
    assert found["notes"] == ["MFU: it needs a GPU", "kernels and gaps: a CPU has none"]


@NO_GPU
@pytest.mark.long
@pytest.mark.parametrize("contestant", ["ddp", "fsdp2", "raypar-zero-0", "raypar-zero-3"])
def test_replicas_of_one_gpu_are_processes_of_their_own(tmp_path, contestant):
    code, found = report_of(tmp_path, f"gpt-124m/bf16/2 on one GPU/{contestant}")
    assert (code, found["status"], found["reason"]) == (0, "done", "")
    assert found["figures"]["tokens_per_s"] > 0 and found["figures"]["peak_memory_gib"] > 0


def test_a_row_says_what_it_can_not_do_and_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    code, found = report_of(tmp_path, "pp=2 over NCCL on one GPU")
    assert (code, found["status"]) == (0, "not possible")
    assert found["reason"].startswith("Ray is not here: ")
    if not torch.cuda.is_available():
        assert "takes minutes" in report_of(tmp_path, "gpt-124m/bf16/raypar-compiled")[1]["reason"]
    monkeypatch.setitem(SMALL, "gpt-124m", replace(SMALL["gpt-124m"], text=str(tmp_path / "nothing")))
    code, found = report_of(tmp_path, "gpt-124m/bf16/torch")
    assert (code, found["status"]) == (1, "failed")
    assert "nothing" in found["reason"]


@NO_GPU
def test_the_machine_is_named(tmp_path):
    found = report_of(tmp_path, "machine")[1]["figures"]
    assert (found["card"], found["gpus"], found["nccl"]) == ("none (CPU)", 0, "none")
    assert found["torch"] == torch.__version__


@pytest.mark.long
@NO_GPU
def test_rows_of_torchs_need_no_ray(tmp_path, monkeypatch, capsys):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("raise ImportError('a machine without Ray')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = "gpt-124m/bf16/*torch*,gpt-124m/bf16/nano*,gpt-124m/bf16/fsdp2,pp=2*"
    assert main(["--minutes", "20", "--out", str(tmp_path / "out"), "--only", names]) == 0
    rows = json.loads((tmp_path / "out/first_hour.json").read_text())["rows"]
    assert rows.pop("pp=2 over NCCL on one GPU")["reason"] == "Ray is not here: a machine without Ray"
    assert len(rows) == 4
    assert {one["status"] for one in rows.values()} == {"done"}
    assert "GPU none (CPU)" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(3600)
@NO_GPU
def test_everything_runs_to_its_end_on_cpus(tmp_path):
    assert main(["--minutes", "50", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "first_hour.json").read_text())["rows"]
    assert {*rows} == {*ROWS}
    assert {one["status"] for one in rows.values()} == {"done", "not possible"}
    assert all(one["reason"] for one in rows.values() if one["status"] == "not possible")
