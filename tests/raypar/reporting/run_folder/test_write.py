"""Writing a run folder: what is in it, what is refused before a run starts, and a disk that fills while it goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.actors.collective.ledger import LedgerEntry
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.run import Run
from raypar.config.conflicts.outputs import run_folder_faults
from raypar.config.run import check_run
from raypar.config.toml import load_run, plain_of, toml_of
from raypar.errors import ConfigError
from raypar.paths import MOST_METRICS
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report
from raypar.reporting.run_folder.append import heard
from raypar.reporting.run_folder.read import read
from raypar.reporting.run_folder.write import Folder
from raypar.schedules import build, lower, simulate

SCHEDULE = lower(build("1f1b", 2, 4))
LOG = logging.getLogger("raypar")


def report(step):
    return Report(step, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.2, None, (2, 1), (5, 6)).to_dict()


def evaluation(step):
    return Evaluation(step, 2.5, 64, 0.5).to_dict()


@pytest.fixture
def begun(tmp_path):
    """Begin a run in a folder; all folders are closed at the end."""
    opened = []

    def begin(step=0, path=tmp_path / "run", **changes):
        opened.append(Folder(str(path)))
        opened[-1].begin(Run(folder=str(path), **changes), SCHEDULE, step)
        return opened[-1]

    yield begin
    for folder in opened:
        folder.close()


def test_what_is_written_is_read(begun, tmp_path):
    folder = begun(mesh=Mesh(pp=2), optim=AdamW(lr=1e-5))
    for line in (report(0), evaluation(1)):
        folder.write(line)
    assert len(read(tmp_path / "run").metrics) == 2, "every line is there at once"
    measured = replace(simulate(SCHEDULE), measured=True)
    folder.measured(0, [measured] * 2, {"pp=0": {("pp", "send"): LedgerEntry(2, 64, 0.5)}})
    past = read(tmp_path / "run")
    resolved = plain_of(Run(mesh=Mesh(pp=2), optim=AdamW(lr=1e-5), folder=str(tmp_path / "run")))
    del resolved["folder"]  # another run of it wants another one
    assert past.config == resolved
    lists = {"in_flight": [2, 1], "peak_memory": [5, 6], "unreached": []}
    assert past.metrics == [{**report(0), **lists}, evaluation(1)]
    assert (past.schedule, past.step, past.timelines) == (SCHEDULE, 0, [measured] * 2)
    assert past.ledger == {"pp=0": {"pp send": (2, 64, 0.5)}}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "ledger.json", "log.txt", "metrics.jsonl", "provenance.json", "run.toml", "schedule.csv", "timeline.json",
    ]  # fmt: skip


def test_no_line_holds_what_json_has_not_and_old_lines_that_do_are_read(begun, tmp_path):
    """NaN and infinity are words in quotes; an older raypar wrote them bare."""
    folder, strict = begun(), json.JSONDecoder(parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    lost = report(0) | {"loss": math.nan, "grad_norm": -math.inf, "aux": {"balance": math.inf}}
    folder.write(lost)
    folder.write(Evaluation(1, math.inf, 64, 0.5).to_dict())
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [strict.decode(line) for line in metrics.read_text().splitlines()]
    assert [lines[0][name] for name in ("loss", "grad_norm", "aux")] == ["NaN", "-Infinity", {"balance": "Infinity"}]
    with metrics.open("a") as file:
        file.write(json.dumps(lost | {"step": 1}) + "\n")
    first, evaluated, old = read(tmp_path / "run").metrics
    assert math.isnan(first["loss"]) and math.isnan(old["loss"])
    assert (first["grad_norm"], old["grad_norm"]) == (-math.inf, -math.inf)
    assert first["aux"] == old["aux"] == {"balance": math.inf}
    assert evaluated["val_loss"] == math.inf


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(split=(3, 5), clip=None, model=GPT(dropout=0.5, tied=True), track=("ray",)),
        Run(data=Text('/tmp/"a"\\\x7f\n\u00e9\U0001f600.txt'), keep_last=3),
    ],
)
def test_a_run_is_made_again_from_its_toml(run, tmp_path):
    (tmp_path / "run.toml").write_text(toml_of(plain_of(run)), encoding="utf-8")
    assert plain_of(load_run(tmp_path / "run.toml")) == plain_of(run)


def test_a_schedule_of_the_users_own_is_named_by_its_file(begun, tmp_path):
    begun(schedule=build("gpipe", 2, 4))
    assert load_run(tmp_path / "run" / "run.toml").schedule == str(tmp_path / "run" / "schedule.csv")


def test_functions_are_told_by_their_names(begun, tmp_path):
    begun(model=Layers(print, len), data=Batches(print))
    assert read(tmp_path / "run").config["model"]["loss"] == "builtins.len"
    with pytest.raises(ConfigError, match=r"model\.fn"):
        load_run(tmp_path / "run" / "run.toml")


def test_a_resumed_run_keeps_the_metrics_of_the_steps_before_it(begun, tmp_path):
    folder = begun()
    for step in range(6):
        folder.write(report(step))
        folder.write(evaluation(step + 1))
    folder.measured(5, [simulate(SCHEDULE)], {})
    folder.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"step"')
    begun(4).write(report(4))
    past = read(tmp_path / "run")
    assert [(line["step"], "val_loss" in line) for line in past.metrics] == [
        *((step + val, bool(val)) for step in range(4) for val in (0, 1)), (4, False),
    ]  # fmt: skip
    assert (past.step, past.timelines) == (None, []), "it is of a step that will be taken once more"


def test_two_jobs_do_not_share_a_folder(begun, tmp_path):
    begun()
    with pytest.raises(ConfigError, match="another job writes to it: give another"):
        Folder(str(tmp_path / "run"))


def test_what_is_logged_is_there_with_its_time(begun, tmp_path):
    folder = begun()
    LOG.warning("careful")
    logging.getLogger("raypar.job.recover.background_save").error("worse")
    folder.close()
    LOG.warning("not any more")
    first, second = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert first.split(" ", 1)[1] == "WARNING careful"
    assert second.split(" ", 1)[1] == "ERROR worse"
    assert len(first.split()[0]) == len("2026-11-21T18:36:22+0000")


def test_a_folder_hears_info_while_it_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(LOG, "level", logging.WARNING)
    LOG.manager._clear_cache()
    first = Folder(str(tmp_path / "first"))
    second = Folder(str(tmp_path / "second"))
    first.close()
    logging.getLogger("raypar.reporting.summary").info("steps: 4")
    assert LOG.level == logging.INFO
    second.close()
    second.close()
    assert LOG.level == logging.WARNING
    assert (tmp_path / "second" / "log.txt").read_text().endswith(" INFO steps: 4\n")
    assert not (tmp_path / "first" / "log.txt").read_text()


def test_a_script_without_logging_still_sees_warnings_and_progress(tmp_path):
    code = (
        "import sys, logging\nfrom raypar.reporting.run_folder.write import Folder\n"
        "from raypar.reporting.run_folder.append import heard\n"
        "Folder(sys.argv[1])\nlogging.getLogger('raypar.x').warning('careful')\nassert not heard()"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "careful\n")
    assert heard(), "pytest listens"


# --- a disk that fills -----------------------------------------------------------------------------------------------


def test_a_disk_that_fills_is_one_warning_and_no_half_line(begun, tmp_path, monkeypatch, caplog):
    folder = begun()
    folder.write(report(0))
    write = os.write

    def full(file, data):
        if len(data) > 9:
            return write(file, data[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    folder.write(report(1))
    folder.write(report(2))
    folder.measured(2, [simulate(SCHEDULE)], {})
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'run'} can't be written (No space left on device), the training goes on"
    ]
    folder.write(report(3))
    assert [line["step"] for line in read(tmp_path / "run").metrics] == [0, 3]
    assert not (tmp_path / "run" / "timeline.json").exists()


def test_a_folder_that_is_removed_in_mid_run_comes_again_with_its_lines(begun, tmp_path, caplog):
    folder, path = begun(), tmp_path / "run"
    folder.write(report(0))
    before = {file.name for file in path.iterdir()}
    shutil.rmtree(path)
    folder.write(report(1))
    folder.write(report(2))
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    logging.getLogger("raypar").warning("something")
    assert "something" in (path / "log.txt").read_text()
    assert before <= {file.name for file in path.iterdir()}
    assert load_run(path / "run.toml") is not None
    assert len([message for message in caplog.messages if "was removed, and is made again" in message]) == 1
    folder.close()


def test_a_folder_in_the_place_of_the_metrics_is_reported_once_until_it_is_gone(begun, tmp_path, caplog):
    folder, path = begun(), tmp_path / "run" / "metrics.jsonl"
    folder.write(report(0))
    path.unlink()
    path.mkdir()
    for step in (1, 2):
        folder.write(report(step))
    assert len([message for message in caplog.messages if "something else is at metrics" in message]) == 1
    path.rmdir()
    folder.write(report(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    assert "can be written again" in caplog.text
    folder.close()


def test_a_disk_that_is_full_from_the_beginning_is_a_warning_too(tmp_path, monkeypatch, caplog):
    folder = Folder(str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        folder.begin(Run(), SCHEDULE, 0)
    folder.write(report(0))
    folder.close()
    assert "No space left on device" in caplog.text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.txt"]


FULL = """
import logging, resource, sys
from raypar.actors.specs.run import Run
from raypar.reporting.run_folder.write import Folder
from raypar.schedules import build, lower, simulate
schedule = lower(build("1f1b", 2, 4))
folder = Folder(sys.argv[1])
folder.begin(Run(), schedule, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(100):
    folder.write({"step": step, "val_loss": 1.5, "perplexity": 2.5, "tokens": 64})
    logging.getLogger("raypar").info("x" * 100)
folder.measured(1, [simulate(schedule)] * 9, {})
folder.close()
"""


def test_files_that_may_not_grow_end_with_a_whole_line(tmp_path):
    """The system's own limit, on everything at once."""
    run = subprocess.run([sys.executable, "-c", FULL, tmp_path / "run"], capture_output=True, text=True)
    told = f"{tmp_path / 'run'} can't be written (File too large), the training goes on\n"
    assert (run.returncode, run.stderr) == (0, told)
    assert [line["step"] for line in read(tmp_path / "run").metrics] == list(range(31))
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines(keepends=True)
    assert lines and all(line.endswith(f" INFO {'x' * 100}\n") for line in lines[:-1])
    assert lines[-1].endswith("\n")
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")], "nothing half is left"


# --- before a run starts ---------------------------------------------------------------------------------------------


def test_a_folder_that_can_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "is there").mkdir()
    (tmp_path / "link").symlink_to("is there")
    for folder in (str(tmp_path / "a" / "b.1"), "run_2-x", "./c", "../x", "is there/run", "link/run", str(tmp_path)):
        assert not list(run_folder_faults(folder, None)), folder
    assert {path.name for path in tmp_path.iterdir()} == {"is there", "link"}, "nothing was made"


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("a b", "has 'a b' in it: use up to 100 letters, digits, '.', '_' and '-', and no leading dot"),
        (".hidden/run", "has '.hidden' in it"),
        ("x/\u0661", "has '\u0661' in it"),
        ("x;rm", "has 'x;rm' in it"),
        ("file/run", "can't be made: "),
        ("file", "can't be made: "),
        ("dangling/run", "can't be made: "),
        ("dangling", "can't be made: "),
        ("loop/run", "can't be made: "),
        ("a\0b", "has 'a\\x00b' in it"),
        ("~nobody-of-this-name/run", "has '~nobody-of-this-name' in it"),
        ("x" * 101, "has 'xxx"),
        ("", "has no name: give it one, or leave it out"),
        (" ", "has no name: give it one, or leave it out"),
    ],
)
def test_a_folder_that_can_not(folder, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("gone")
    Path("loop").symlink_to("loop")
    faults = list(run_folder_faults(folder, None))
    assert len(faults) == 1
    assert faults[0].startswith(f"folder {folder!r} {says}"), faults


def test_a_run_that_is_there_is_not_written_over_but_resumed(tmp_path):
    for name in ("run.toml", "metrics.jsonl", "schedule.csv", "timeline.json", "ledger.json"):
        (tmp_path / name).touch()
        fix = "replace it with --overwrite (overwrite=True), or give another folder"
        first = f"folder {str(tmp_path)!r} holds a run already ({name}): "
        assert list(run_folder_faults(str(tmp_path), None)) == [first + fix], "it has no checkpoint"
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
        command = f"raypar train --resume {tmp_path} (in Python launch(run, resume={str(tmp_path)!r}))"
        how = f"go on with it by {command}, "
        assert list(run_folder_faults(str(tmp_path), None)) == [first + how + fix]
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / name).unlink()
    (tmp_path / "run.toml").touch()
    assert not list(run_folder_faults(str(tmp_path), tmp_path / "checkpoints" / "step-00000001"))
    assert list(run_folder_faults(str(tmp_path), tmp_path / "step-00000001"))


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "log.txt", "checkpoints"])
def test_a_link_in_the_place_of_a_file_is_refused_by_its_name(name, tmp_path):
    (tmp_path / name).symlink_to("gone")
    says = f"has a symbolic link {name}, and raypar writes through none: remove it, or give another folder"
    assert f"folder {str(tmp_path)!r} {says}" in list(run_folder_faults(str(tmp_path), None))
    home = tmp_path / "checkpoints" / "step-00000001"
    assert f"folder {str(tmp_path)!r} {says}" in list(run_folder_faults(str(tmp_path), home))


def test_a_file_that_the_run_could_not_write_is_refused_by_its_name(tmp_path):
    (tmp_path / "log.txt").mkdir()
    os.mkfifo(tmp_path / "run.toml")
    (tmp_path / "checkpoints").touch()
    with (tmp_path / "metrics.jsonl").open("wb") as metrics:
        metrics.truncate(MOST_METRICS + 1)
    home = tmp_path / "checkpoints" / "step-00000001"
    fix = "remove it, or give another folder"
    assert [
        fault.removeprefix(f"folder {str(tmp_path)!r} has ") for fault in run_folder_faults(str(tmp_path), home)
    ] == [
        f"run.toml, which is no plain file: {fix}",
        "metrics.jsonl of more than 1 GiB, which a run can't go on from: move it away",
        f"log.txt, which is no plain file: {fix}",
        f"checkpoints, which is no folder: {fix}",
    ]


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/mine", "checkpoints/step-00000001/a/b"])
def test_a_folder_of_checkpoints_of_another_run_is_refused(inside, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert not list(run_folder_faults(str(tmp_path / inside), None)), "it is no run's"
    (tmp_path / "run.toml").touch()
    says = f"is in the folder of the checkpoints of another run, {str(tmp_path)!r}: give a folder outside it"
    assert list(run_folder_faults(str(tmp_path / inside), None)) == [f"folder {str(tmp_path / inside)!r} {says}"]


def test_it_is_told_with_all_other_faults(tmp_path):
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError) as caught:
        check_run(Run(folder=str(tmp_path), seed=1.5))
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_nothing_is_written_through_a_link(name, tmp_path, caplog):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(other)
    if name == "log.txt":
        with pytest.raises(ConfigError, match="can't be written"):
            Folder(str(tmp_path / "run"))
    else:
        folder = Folder(str(tmp_path / "run"))
        folder.begin(Run(), SCHEDULE, 0)
        folder.write(report(0))
        folder.close()
    assert other.read_text() == "mine"
