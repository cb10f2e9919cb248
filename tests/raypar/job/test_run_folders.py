"""Run folders: a new one for each run, one that replaces another, what made a run, and how a failed run goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cli.train import train as commands
from raypar.config.run import check_run
from raypar.errors import JobError
from raypar.job.start.batch_checks import _IMPURE, warn_of_batches
from raypar.job.start.resume import find

FLAGS = ("--steps", 2, "--mesh.pp", 1, "--eval-steps", 1)
RUN = rp.recipe("gpt-tiny", steps=1, mesh=rp.Mesh(pp=1), folder="runs/a")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def trained(**changes):
    words = {"overwrite": changes.pop("overwrite", False), "resume": changes.pop("resume", None)}
    with rp.launch(replace(RUN, **changes), **words) as job:
        job.train()
        return job.run


@pytest.mark.long
def test_auto_is_a_new_folder_for_every_run(kept_actors, said):
    first, second = (said("train", "gpt-tiny", *FLAGS, "--folder", "auto") for _ in range(2))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    told = [run[2].splitlines()[0].removeprefix("run folder: ") for run in (first, second)]
    assert told[0] != told[1]
    for folder in map(Path, told):
        assert folder.parent == Path("runs")
        assert (folder / "metrics.jsonl").read_text()
        text = (folder / "run.toml").read_text()
        assert f"# Its folder: {folder.absolute()}\n" in text
    third = trained(folder="auto")
    assert Path(third.folder, "run.toml").exists() and third.folder not in told


def test_a_dry_run_makes_no_folder(said):
    assert said("train", "gpt-tiny", "--folder", "auto", "--dry-run")[0] == 0
    assert not list(Path().iterdir())


@pytest.mark.long
def test_overwrite_replaces_a_run_and_leaves_nothing_of_it(kept_actors, said):
    trained()
    Path("runs/a/comparison.html").touch()  # of raypar report runs/a runs/b
    code, _, err = said("train", "gpt-tiny", *FLAGS, "--folder", "runs/a")
    assert code == 2 and "--overwrite" in err
    code, _, err = said("train", "gpt-tiny", *FLAGS, "--folder", "runs/a", "--overwrite")
    assert code == 0, err
    assert names("runs") == ["a"]
    assert names("runs/a/checkpoints") == [".lock", "step-00000002"]
    trained(overwrite=True)
    assert names("runs/a/checkpoints") == [".lock", "step-00000001"]
    trained(folder="runs/new", overwrite=True)


def test_a_launch_that_fails_leaves_the_run_that_was_there(kept_actors, monkeypatch):
    trained()
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}

    def fails(*_, **__):
        raise JobError("no")

    monkeypatch.setattr("raypar.job.launch.Job", fails)
    with pytest.raises(JobError):
        rp.launch(RUN, overwrite=True)
    assert names("runs") == ["a"]
    assert {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()} == before


def faults(folder, **words):
    with pytest.raises(rp.ConfigError) as caught:
        check_run(replace(RUN, folder=str(folder)), overwrite=True, **words)
    return str(caught.value)


def test_overwrite_touches_nothing_but_a_run_folder(kept_actors):
    trained()
    Path("link").symlink_to("runs/a")
    assert "symbolic link" in faults("link")
    Path("mine").mkdir()
    Path("mine/run.toml").write_text("steps = 3\n")
    assert "no run folder of raypar" in faults("mine")
    Path("mine/run.toml").unlink()
    Path("mine/log.txt").write_text("my own log\n")
    assert "no run folder of raypar" in faults("mine")
    Path("mine/log.txt").write_text("2026-11-25T18:38:28+0000 INFO actors: 2 = pp 2\n")
    Path("mine/checkpoints").mkdir()
    Path("mine/checkpoints/.lock").touch()
    check_run(replace(RUN, folder="mine"), overwrite=True)  # what an interrupted launch leaves is no run
    Path("mine/checkpoints/step-00000001").mkdir()
    assert "no run folder of raypar" in faults("mine")
    for name in ("notes.txt", "checkpoints/mine", "checkpoints/step-00000001/notes.txt"):
        Path("runs/a", name).write_text("keep me")
        assert "which no run has written" in faults("runs/a"), name
        Path("runs/a", name).unlink()
    Path("runs/a/report.html").symlink_to("/etc/hosts")
    assert "which no run has written" in faults("runs/a")
    Path("runs/a/report.html").unlink()
    assert "leave overwrite out" in faults("runs/a", resumed=Path("runs/a/checkpoints/step-00000001").absolute())
    with rp.launch(replace(RUN, folder="runs/busy")) as job:
        with pytest.raises(rp.ConfigError, match="under way and has saved no checkpoint yet: wait for its first"):
            find(Path("runs/busy"))
        job.train()
        assert "under way" in faults("runs/busy")
        with pytest.raises(rp.ConfigError, match="holds a run that is under way: end that one first"):
            check_run(replace(RUN, folder="runs/busy"))
    assert Path("runs/a/run.toml").exists()


def test_what_made_a_run_is_kept_and_a_resume_is_added(kept_actors):
    trained(steps=2)
    path = Path("runs/a/provenance.json")
    first = json.loads(path.read_text())
    assert list(first) == ["raypar", "python", "torch", "ray", "host", "hardware", "commit", "command", "started"]
    assert first["commit"] is None and isinstance(first["command"], list) and "+" in first["started"]
    logged = Path("runs/a/log.txt").read_text().split()[0]
    assert datetime.fromisoformat(first["started"]) <= datetime.fromisoformat(logged), "not after its launch"
    trained(steps=3, resume="runs/a")
    trained(steps=4, resume="runs/a")
    assert len(json.loads(path.read_text())["resumed"]) == 2
    assert {key: value for key, value in json.loads(path.read_text()).items() if key != "resumed"} == first
    path.unlink()  # a folder of an older raypar
    trained(steps=5, resume="runs/a")
    again = json.loads(path.read_text())
    assert again["started"] is None and len(again["resumed"]) == 1


ENDS = [JobError, rp.NonFiniteError, signal.SIGINT, signal.SIGTERM]


@pytest.mark.sampled
@pytest.mark.parametrize("end", ENDS, ids=str)
@pytest.mark.parametrize("folder", ["runs/k", None])
def test_a_run_that_ends_badly_says_how_it_goes_on(kept_actors, said, monkeypatch, end, folder):
    lines = []

    def write(line):
        lines.append(line)
        if len(lines) == 2 and isinstance(end, type):
            raise end("step 1 went wrong")
        if len(lines) == 2:
            os.kill(os.getpid(), end)

    monkeypatch.setattr(commands, "growing_file", lambda *_: nullcontext(write))
    words = ("--folder", folder, "--save-every", 1) if folder else ()
    code, _, err = said("train", "gpt-tiny", *FLAGS, "--steps", 9, *words)
    assert code in (4, 6, 130, 143)
    sentence, last = err.splitlines()[-2:]
    assert sentence.startswith("raypar: ")
    if folder is None:
        assert last == "nothing was saved: give --folder, and --save-every, to keep checkpoints"
    else:
        assert re.fullmatch(r"resume with: raypar train --resume runs/k \(after step [123]\)", last), err


def files():
    return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


@pytest.mark.long
def test_the_run_of_a_folder_is_verified_without_touching_it(kept_actors, said):
    trained()
    before = files()
    code, out, err = said("verify", "runs/a", "--steps", 2)
    assert code == 0, err
    assert out.startswith("bitwise equal: 2 losses")
    assert files() == before


def same(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def other(step, microbatch, dp):
    x, y = same(2 * step + dp, microbatch, dp)
    return x, y


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (same, ["data.fn gives replicas 0 and 1 the same samples: have it look at dp"]),
        (other, []),
        (lambda *_: (torch.rand(3, 4), torch.rand(3, 4)), [_IMPURE]),
    ],
)
def test_a_batch_function_with_the_same_samples_or_none_twice_is_told(caplog, fn, says):
    model = rp.Layers(lambda: [nn.Linear(4, 4)], nn.functional.mse_loss)
    warn_of_batches(rp.Run(model=model, data=rp.Batches(fn), mesh=rp.Mesh(dp=2), steps=1))
    assert [record.getMessage() for record in caplog.records] == says


def test_a_launch_waits_for_a_number_of_seconds():
    with pytest.raises(rp.ConfigError, match="wait_for_nodes is nan: it must be a finite number"):
        rp.launch(RUN, wait_for_nodes=float("nan"))


def test_a_launch_looks_at_the_batches_and_says_no_more_samples_than_it_knows(kept_actors, by_value, caplog):
    caplog.set_level(logging.INFO, "raypar")
    model = rp.Layers(lambda: [nn.Linear(4, 4)], nn.functional.mse_loss)
    run = rp.Run(model=model, data=rp.Batches(same), mesh=rp.Mesh(dp=2), microbatches=3, steps=1, eval_every=1)
    with rp.launch(run) as job:
        assert "data.fn gives replicas 0 and 1 the same samples" in caplog.text
        assert "steps: 1 of 2 replicas x 3 microbatches\n" in caplog.text
        assert "eval_every 1 has no effect without Batches(validate=...)" in caplog.text
        assert len(job.train(steps=2)) == 2
    assert "the run has 1 steps, and this goes on to step 2: later steps have the last" in caplog.text


def test_what_has_no_effect_is_told(said):
    _, _, err = said("train", "gpt-tiny", "--dry-run", "--sequence-parallel", "--context", "ulysses")
    assert "sequence_parallel has no effect without mesh.tp" in err
    assert "context 'ulysses' has no effect without mesh.cp" in err
    assert "no effect" not in said("train", "gpt-tiny", "--dry-run", "--sequence-parallel", "--mesh.tp", 2)[2]
