"""Reading what a run has left behind, whole or damaged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from raypar.errors import ConfigError
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import read
from raypar.schedules import build, lower, simulate, to_csv
from tests.support.checkpoints import save_at

REPORT = Report(0, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.2, None, (2, 1), (5, 6))
SCHEDULE = lower(build("1f1b", 2, 4), reduce_grad=True)
TOML = 'schedule = "1f1b"\nsteps = 4\n[model]\n[mesh]\npp = 2\n[data]\n[optim]\n'


def actions(timeline):
    return [[e.rank, e.actor, str(e.action), e.start, e.end, e.bytes, e.bucket] for e in timeline.events]


@pytest.fixture
def past(tmp_path):
    """A run folder as it should be."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(TOML)
    lines = [REPORT.to_dict(), Evaluation(1, math.nan, 64, 0.5).to_dict()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "schedule.csv").write_text(to_csv(SCHEDULE))
    measured = {"step": 3, "timelines": [{"actions": actions(simulate(SCHEDULE))}]}
    (folder / "timeline.json").write_text(json.dumps(measured))
    (folder / "ledger.json").write_text('{"pp=0": {"pp send": [2, 64]}}')
    save_at(folder / "checkpoints", 2)
    return folder


def faults_of(folder):
    with pytest.raises(ConfigError) as caught:
        read(folder)
    return caught.value.faults


def test_all_of_it_is_read(past):
    found = read(past)
    assert (found.folder, found.config["mesh"], found.step) == (past, {"pp": 2}, 3)
    assert found.metrics[0] == json.loads(json.dumps(REPORT.to_dict()))
    assert math.isnan(found.metrics[1]["val_loss"])
    assert found.schedule == SCHEDULE
    assert found.timelines == [replace(simulate(SCHEDULE), measured=True)]
    assert found.ledger == {"pp=0": {"pp send": (2, 64, None)}}
    assert [line.step for line in found.checkpoints] == [2]


def test_what_a_killed_run_has_not_written_is_no_fault(past):
    for name in ("schedule.csv", "timeline.json", "ledger.json"):
        (past / name).unlink()
    with (past / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "los')
    found = read(past)
    assert (found.schedule, found.step, found.timelines, found.ledger) == (None, None, [], {})
    assert len(found.metrics) == 2
    (past / "metrics.jsonl").unlink()
    assert read(past).metrics == []


def test_a_folder_of_something_else_is_told(past, tmp_path):
    assert faults_of(tmp_path) == [
        f"{str(tmp_path)!r} is no run folder: it has no run.toml; give one that raypar train has written"
    ]
    assert len(faults_of(tmp_path / "gone")) == 1
    (past / "run.toml").write_text("[tool.ruff]")
    assert faults_of(past) == [f"run folder {str(past)!r}: run.toml is not that of a raypar run"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.toml", "a = [", "run.toml is not TOML"),
        ("run.toml", "a = " + "[" * 100_000, "run.toml is not TOML"),
        ("run.toml", "a" + ".b" * 100_000 + " = 1", "run.toml is not TOML (more than 100 dots in a line)"),
        ("metrics.jsonl", "[1]\n", "line 1 has a text: [1]: Input should be an object"),
        ("metrics.jsonl", '{"step": 0}\n', "line 1 has loss: {'step': 0}: Field required"),
        ("metrics.jsonl", '{"step": -1, "val_loss": 1, "perplexity": 1.0, "tokens": "9"}\n', "has step: -1"),
        ("metrics.jsonl", json.dumps(REPORT.to_dict() | {"step": 10**400}) + "\n", "line 1 has step: 1000"),
        ("metrics.jsonl", json.dumps(REPORT.to_dict() | {"step_ms": math.inf}) + "\n", "line 1 has step_ms: inf"),
        ("metrics.jsonl", json.dumps(REPORT.to_dict() | {"peak_memory": [-1]}) + "\n", "has peak_memory.0: -1"),
        ("metrics.jsonl", "\0" * 100 + "\n", "line 1 has a text: "),
        ("metrics.jsonl", "[" * 100_000 + "\n", "line 1 has a text: "),
        ("metrics.jsonl", " " * 2_000_000 + "\n", "line 1 is longer than 1048576 bytes"),
        ("metrics.jsonl", '{"step": 2, "tokens": 8, "val_loss": 1' + "0" * 400 + "}\n", "it is too large for a float"),
        ("schedule.csv", "0F0,0B0\n1B0,1F0\n", "schedule.csv is no schedule that can run"),
        (
            "schedule.csv",
            "0F999999999,0B999999999\n",
            "999999999 is named, but the rows have only 1 forward",
        ),
        ("schedule.csv", "0F0,0F1,0F2,0F3,1F0,2F0\n", "it leaves microbatches out"),
        ("schedule.csv", "<html>", "is not an action"),
        ("schedule.csv", "<html>\n" * 10_000, "... and 9990 more"),
        ("schedule.csv", "<" * 100_000, "is not an action"),
        ("schedule.csv", "0F0," * 100 + "0B0\n", "it has actions more than once"),
        ("schedule.csv", "0F" + "9" * 5000 + ",0B0\n", "is not an action"),
        ("timeline.json", '{"step": 1}', "timeline.json has timelines"),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[0,"a","1F0",0,NaN,0,null]]}]}', "finite number"),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[0,"a","1F0",0,1e308,0,null]]}]}', "less than or equal"),
        (
            "timeline.json",
            '{"step":1,"timelines":[{"actions":[[0,"a","1F0",2,1,0,null]]}]}',
            "it ends before it starts",
        ),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[2,"a","1F0",0,1,0,null]]}]}', "2 ranks and 2 stages"),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[0,"a","9F0",0,1,0,null]]}]}', "2 ranks and 2 stages"),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[0,"a","1F7",0,1,0,null]]}]}', "4 microbatches"),
        ("timeline.json", '{"step":1,"timelines":[{"actions":[[0,"a","x",0,1,0,null]]}]}', "'x' is not an action"),
        ("ledger.json", '{"pp=0": {"pp send": [1]}}', "ledger.json has pp=0.pp send.1"),
    ],
)
def test_damage_is_told(past, name, text, says):
    (past / name).write_text(text)
    fault = faults_of(past)[0]
    assert says in fault
    assert fault.startswith(f"run folder {str(past)!r}: {name}")
    assert len(fault) < 2000


def test_all_faults_are_told_at_once(past):
    for name in ("run.toml", "metrics.jsonl", "schedule.csv", "timeline.json", "ledger.json"):
        (past / name).write_text("{[\n")
    assert len(faults_of(past)) == 5


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "schedule.csv", "timeline.json", "ledger.json"])
def test_links_pipes_and_folders_are_not_opened(past, tmp_path, name):
    (past / name).rename(tmp_path / "elsewhere")
    (past / name).symlink_to(tmp_path / "elsewhere")
    assert "it is no plain file" in faults_of(past)[0]
    (past / name).unlink()
    os.mkfifo(past / name)
    assert "it is no plain file" in faults_of(past)[0]


def test_a_link_to_checkpoints_is_not_followed(past, tmp_path):
    (past / "checkpoints").rename(tmp_path / "elsewhere")
    (past / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert faults_of(past) == [f"run folder {str(past)!r}: checkpoints is a link: put the folder itself there"]


FRUGAL = """
import resource, sys
from pathlib import Path
from raypar.errors import ConfigError
from raypar.reporting.run_folder.read import read
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (300 << 20),) * 2)
try:
    read(Path(sys.argv[1]))
except ConfigError as error:
    print(len(error.faults), len(str(error)) < 10_000)
"""


@pytest.mark.long
def test_damage_takes_no_more_memory_than_a_small_multiple_of_the_files(past):
    """A MiB or two of each kind of garbage, 300 MiB to read it in."""
    (past / "run.toml").write_text("a = [" + "[], " * 250_000 + "]")
    (past / "metrics.jsonl").write_text("[" * 1_000_000 + "\n" + "[]\n" * 300_000)
    (past / "schedule.csv").write_text("<html>,\n" * 200_000)
    (past / "timeline.json").write_text('{"step": 1, "timelines": [' + "[]," * 500_000 + "[]]}")
    (past / "ledger.json").write_text('{"a": {' + ",".join(f'"{n}": 1' for n in range(100_000)) + "}}")
    run = subprocess.run([sys.executable, "-c", FRUGAL, past], capture_output=True, text=True, timeout=60)
    assert run.stdout.split()[1:] == ["True"], run.stderr
