"""``raypar plan --gpus``: the plan in words, the file that trains, and all mistakes of a request at once."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.optim import Muon
from raypar.cli.plan.planning import run_plan
from raypar.cli.train.train import train
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import Node, place
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.config.toml import changed_of, load_run, plain_of, run_of, toml_of
from raypar.errors import ConfigError
from raypar.planner.calibrated.calibration_file import VARIABLE, write_calibration
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from tests.support.calibrations import known

PAGE = Path(__file__).parents[3] / "docs/planning.md"
BILLION = "--model.layers 24 --model.hidden 2048 --model.heads 16 --model.seq 2048 --model.vocab 50304 --batch 256"


def planned(words):
    return run_plan(f"gpt-small {words}".split())


def test_a_plan_explains_itself_and_writes_a_run_that_is_sound(tmp_path):
    out = tmp_path / "job.toml"
    reported = planned(f"--gpus 16 --gpu a100 {BILLION} --out {out}")
    assert reported.startswith("16 a100 on 2 nodes")
    for part in ("the best of each mesh", "memory of the fullest actor", "why:", "why the others lost:", "node 1: "):
        assert part in reported
    run = load_run(out)
    assert run.mesh.size == 16
    assert run.precision.compute == "bf16"
    assert run.microbatches * run.micro_batch_size * run.mesh.dp == 256
    assert check_run(run)["train"].num_pipeline_ranks == run.mesh.pp


def test_the_plan_on_the_page_is_what_its_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = re.search(
        r"```bash\nraypar plan gpt-small (.*)\n```\n\nwhich says .*:\n\n```text\n(16 h100[^`]*)\n```", PAGE.read_text()
    )
    assert planned(found[1]) == found[2]


def test_a_cluster_comes_from_a_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('nodes = 2\neach_node = 2\ndevice = "h200"\nbetween = "ethernet-100"\n')
    assert planned(f"--cluster {file} {BILLION}").startswith("4 h200 on 2 nodes: nvlink4 inside of nodes, 1 x ethernet")


def test_what_is_no_file_of_a_cluster_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    for name in ("pipe", "deep.toml", "none.toml"):
        with pytest.raises(ConfigError, match="can't be read"):
            planned(f"--cluster {tmp_path / name}")


def test_a_precision_that_is_given_stays():
    assert "parameters in bf16" in planned("--gpus 2 --gpu h100")
    assert "parameters in fp32" in planned("--gpus 2 --gpu h100 --precision fp32")


def test_what_was_given_and_what_is_not_searched_is_said():
    reported = planned("--gpus 2 --gpu h100 --mesh.tp 1")
    assert "tp 1: as it was given" in reported
    assert "cp 1: context ranks are searched for sequences of 8,192 tokens and more" in reported


def test_all_mistakes_of_a_request_are_told_at_once(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('nodes = 2\ndevice = "h20"\n')
    with pytest.raises(ConfigError) as error:
        planned(f"--gpus 4 --cluster {file} --batch -1 --out {tmp_path}")
    reported = "\n".join(error.value.faults)
    for part in ("each_node is missing", "'h20'", "measure", "--batch is -1", "leave one out", "is a folder"):
        assert part in reported


def test_axes_that_are_given_are_kept():
    reported = planned(f"--gpus 4 --gpu a100 {BILLION} --mesh.tp 2 --mesh.pp 2 --zero 0")
    assert "tp 2: as it was given" in reported
    assert "pp 2: as it was given" in reported


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "--mesh.tp 3 --mesh.pp 100 --mesh.ep 2",
            ("--mesh.tp 3 does not divide 8 devices", "8 heads", "8 layers", "none: leave"),
        ),
        ("--mesh.tp 4 --mesh.pp 4", ("--mesh.tp 4 --mesh.pp 4 make 16 ranks",)),
        ("--batch 1000000000000", ("a step of 1,000,000,000,000 sequences",)),
        ("--model.moe.experts 6 --mesh.ep 4", ("--mesh.ep 4 does not divide 6 experts",)),
        ("--precision fp8", ("precision.compute is 'fp8', whose speed", "rank layouts with --precision bf16")),
    ],
)
def test_axes_that_no_layout_has_are_told_each_with_its_fix(words, parts):
    with pytest.raises(ConfigError) as error:
        planned(f"--gpus 8 {words}")
    reported = "\n".join(error.value.faults)
    assert all(part in reported for part in parts), reported
    assert "no layout" not in reported


def test_what_is_searched_and_a_grid_are_not_taken():
    with pytest.raises(ConfigError) as error:
        planned("--gpus 4 --mesh.dp 2 --chunks 2 --mesh.tp 2d-2x2")
    reported = "\n".join(error.value.faults)
    for part in ("--mesh.dp is searched", "--chunks is searched"):
        assert part in reported


def test_what_fits_nowhere_is_a_mistake_with_the_smallest_number_that_would():
    with pytest.raises(ConfigError) as error:
        planned(f"--gpus 1 --gpu l4 {BILLION} --batch 16 --model.layers 200")
    reported = "\n".join(error.value.faults)
    assert "no layout fits" in reported
    assert "are the smallest larger number on which one fits" in reported


def test_the_two_nodes_of_the_notes_hold_two_stages_each():
    """Two nodes of eight: tensor ranks 0 and 1, replicas 01 and 23, stages 01 and 45 on one node, two more on both."""
    mesh, has = Mesh(pp=4, dp=2, tp=2), {"CPU": 8.0, "GPU": 8.0}
    nodes = [Node(name, name, name, has, has) for name in ("a", "b")]
    placed = place(World(mesh), nodes, ActorResources("cuda", 1.0))
    assert [rank for rank, node in enumerate(placed.nodes) if node is nodes[0]] == [*range(8)]
    assert mesh.groups("tp")[0] == (0, 1)
    assert mesh.groups("dp")[0] == (0, 2)
    assert mesh.groups("pp")[0] == (0, 4, 8, 12)


@pytest.mark.parametrize("gpus", ["0", "-3"])
def test_so_few_devices_are_refused(gpus):
    with pytest.raises(ConfigError, match=f"gpus is {gpus}: give 1 or more"):
        planned(f"--gpus {gpus}")


def test_a_plan_for_this_machine_takes_as_long_as_the_dry_run_of_its_file_by_the_calibration(tmp_path, monkeypatch):
    file, out = tmp_path / "mine.json", tmp_path / "job.toml"
    write_calibration(known(), file)
    reported = planned(f"--gpus 2 --gpu cpu --batch 8 --out {out} --calibration {file}")
    step = float(re.search(r"the best step takes (\S+) s \(from the calibration\)", reported)[1])
    monkeypatch.setenv(VARIABLE, str(file))
    dry = dict(train([str(out), "--dry-run"], terminal=False).rows)["time"]
    assert "from the calibration" in dry
    in_ms = float(re.search(r"steps of (\S+) ms", dry)[1].replace(",", ""))
    assert in_ms == pytest.approx(1e3 * step, rel=0.005)  # which is reported with three digits
    monkeypatch.setattr("raypar.cli.plan.planning.num_slots", lambda: 1)
    assert "from the calibration" not in planned(f"--gpus 2 --gpu cpu --batch 8 --calibration {file}")
    other = planned(f"--gpus 2 --gpu h100 --batch 8 --calibration {file}")
    assert "(from the calibration)" not in other and "not from the calibration" in other


@pytest.mark.parametrize("words", ["--gpus 2 --gpu cpu --batch 8", ""])
def test_a_calibration_that_is_not_there_is_a_mistake(tmp_path, words):
    before = dict(os.environ)
    with pytest.raises(ConfigError) as error:
        planned(f"{words} --calibration {tmp_path / 'none.json'}")
    assert "none.json" in error.value.faults[0] and "raypar calibrate" in error.value.faults[0]
    assert dict(os.environ) == before


def test_the_file_has_what_differs_alone_and_is_checked_without_a_gpu(tmp_path, monkeypatch, caplog):
    out = tmp_path / "job.toml"
    reported = planned(f"--gpus 16 --gpu h100 {BILLION} --out {out}")
    assert "seconds are of h100 at 71% of its data sheet, which published steps of other programs reach" in reported
    assert "  batch  zero  " in reported
    lines = out.read_text().splitlines()
    assert lines[0] == "# EDIT: data, lr, steps. What is not here is as in every run."
    assert len(lines) < 40
    assert not [line for line in lines if line.split(" = ")[-1] in ('"none"', "false", "[]")], "defaults"
    monkeypatch.setattr("raypar.actors.machine.this_machine.torch_has_cuda", lambda: False)
    with caplog.at_level("WARNING"):
        found = train([str(out), "--dry-run", "--folder", "none"], terminal=False)
    assert dict(found.rows)["actors"].startswith("16 = ")
    assert "this is a plan for other machines: device is 'cuda', but torch is built without CUDA here" in caplog.text
    assert found.verdict == "ok: this run can start on other machines, but not here"
    with pytest.raises(ConfigError, match="torch is built without CUDA here"):
        train([str(out), "--folder", "none"], terminal=False)


def test_a_field_that_a_file_leaves_out_is_the_same():
    for run in (recipe("gpt-124m"), recipe("moe-small", mesh=Mesh(ep=2)), replace(recipe("llama-tiny"), optim=Muon())):
        short = changed_of(run)
        assert run_of(short) == run_of(plain_of(run))
        assert len(toml_of(short)) < len(toml_of(plain_of(run))) / 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_plan_with_offload_needs_what_the_forecast_says(tmp_path, zero):
    """Where replicas sum gradients at the end of a step, all of them wait in buckets."""
    out = tmp_path / "job.toml"
    model = "--model.layers 24 --model.hidden 4096 --model.heads 32 --mesh.pp 1 --mesh.tp 1 --offload optimizer"
    reported = planned(f"--gpus 2 --batch 64 --zero {zero} {model} --out {out}")
    assert forecast_gb(load_run(out)) == pytest.approx(
        float(re.search(r"fullest actor: (\d+\.\d) of", reported)[1]), rel=0.05
    )


def forecast_gb(run):
    """The peak of the fullest actor, as a dry run says."""
    schedule = check_run(replace(run, device="cpu"))["train"]
    sized = SizedRun.of(run, schedule)
    timeline = from_flops(sized).timeline
    return max(need.peak for need in worker_memory(sized, timeline, 0)) / 1e9


def test_where_nothing_fits_states_go_to_host_memory(tmp_path):
    out, model = tmp_path / "job.toml", "--model.layers 32 --model.hidden 4096 --model.heads 32 --model.seq 2048"
    reported = planned(f"--gpus 1 --gpu h100 --batch 8 {model} --out {out}")
    assert reported.startswith(
        "no layout fits as it is; with --offload optimizer, whose updates in host memory are not "
    )
    of_plan = float(re.search(r"fullest actor: (\d+\.\d) of", reported)[1])
    run = load_run(out)
    assert run.offload == "optimizer"
    assert forecast_gb(run) == pytest.approx(of_plan, rel=0.05)
    with pytest.raises(
        ConfigError, match=r"no layout fits: the one that needs least, one device, .*nor does one with --offload"
    ):
        planned(f"--gpus 1 --gpu h100 --batch 8 {model} --model.layers 300")
