"""Checkpoints on the command line: ``raypar ckpt``, ``raypar train --folder`` and ``--resume``."""

from __future__ import annotations

import argparse
import random

import pytest

import raypar as rp
from raypar.checkpoint.find import newest
from raypar.cli.train.resuming import its_run
from raypar.config.toml import plain_of
from raypar.job.job import Job
from raypar.reporting.run_folder.read import read
from tests.support.checkpoints import flip, save_at


def test_ls_is_the_newest_first_and_marks_what_is_not_sound(said, tmp_path):
    code, out, err = said("ckpt", "ls", tmp_path)
    assert (code, out) == (2, "") and "is no run folder and has no checkpoints: give another path" in err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").touch()
    (tmp_path / "run" / "checkpoints").mkdir()
    assert said("ckpt", "ls", tmp_path / "run") == (0, "no checkpoints\n", "")
    for step in (1, 20):
        save_at(tmp_path, step)
    code, out, _ = said("ckpt", "ls", tmp_path)
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["step-00000020", "step-00000001"])
    assert "  110 B  2 tensors of the model, 1 of the optimizer\n" in out, "6 x 4 and 1 of fp32, 5 of bf16"
    flip(tmp_path / "step-00000001" / "manifest.json", random.Random(0))
    code, out, _ = said("ckpt", "ls", tmp_path)
    assert code == 1
    assert [("NOT SOUND: manifest.json" in line) for line in out.splitlines()] == [False, True]


def test_verify_reads_one_or_all(said, tmp_path):
    paths = [save_at(tmp_path, step) for step in (1, 2)]
    assert said("ckpt", "verify", paths[0]) == (0, f"{paths[0]}: ok\n", "")
    flip(paths[0] / "pp0.safetensors", random.Random(0))
    wrong = f"{paths[0]}: NOT SOUND\n- 'pp0.safetensors' was changed: its sha256 is another one\n"
    assert said("ckpt", "verify", paths[0]) == (1, wrong, "")
    assert said("ckpt", "verify", tmp_path) == (1, f"{paths[1]}: ok\n{wrong}", "")
    assert said("ckpt", "verify", paths[1]) == (0, f"{paths[1]}: ok\n", "")


def test_of_a_step_that_is_not_there_those_that_are_there_are_told(said, tmp_path):
    for step in (1, 20):
        save_at(tmp_path / "run" / "checkpoints", step)
    (tmp_path / "run" / "run.toml").touch()
    for gone in (tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "run" / "step-00000003"):
        says = f"{str(gone)!r} is not there: {str(gone.parent)!r} has checkpoints after step 20, 1\n"
        for words in (("ckpt", "ls"), ("ckpt", "verify"), ("train", "--resume")):
            code, out, err = said(*words, gone)
            assert (code, out) == (2, "") and says in err, words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ckpt", "ls", "nowhere"), "raypar: 'nowhere' can't be read (No such file or directory)"),
        (("ckpt", "verify", "nowhere"), "raypar: 'nowhere' can't be read (No such file or directory)"),
        (("ckpt", "verify", "."), "there is no checkpoint in '.': give another path"),
        (
            ("ckpt",),
            "raypar: a command is missing: raypar ckpt ls FOLDER, or raypar ckpt verify PATH, or ",
        ),
        (("ckpt", "ls"), "raypar: a path is missing: raypar ckpt ls FOLDER\n"),
        (("ckpt", "verify", "--deep"), "raypar: --deep is no flag: see --help for all flags\n"),
        (
            ("ckpt", "ls", "a", "b", "-x"),
            "raypar: 2 mistakes:\n- -x is no flag: see --help for all flags\n- 'b' is a word too many: only one",
        ),
        (
            ("trace", "-o"),
            "2 mistakes:\n- --out has no value: give a path or none\n- a run folder is missing: raypar trace RUN\n",
        ),
        (
            ("report", "--peak", "nan", "--port", "-1"),
            "raypar: 4 mistakes:\n- a run folder is missing: raypar report RUN, or several to compare them\n"
            "- --port -1 is where --live serves the page: add --live\n- --port is -1: it must be from 0 to 65535\n"
            "- --peak is nan",
        ),
        (("report", "a", "--peak", "x"), "raypar: --peak is 'x': it must be a number or v100 or t4 or a10 or a100 or "),
        (
            ("report", "a", "b", "--peek", "1", "--live=maybe", "--peak", "nan"),
            "raypar: 3 mistakes:\n- --peek is no flag: did you mean --peak?\n- --live is a switch, and takes no 'maybe'"
            ": write --live alone, or --no-live\n- --peak is nan: give the FLOP/s that the device of one actor",
        ),
        (
            ("doctor", "x", "--jsn"),
            "raypar: 2 mistakes:\n- --jsn is no flag: did you mean --json?\n- 'x' is a word too many: all that is read",
        ),
        (
            ("ckpt", "rm", "x"),
            "raypar: there is no command 'rm': raypar ckpt ls FOLDER, or raypar ckpt verify PATH, or ",
        ),
        (("train", "--resume", "nowhere"), "raypar: a mistake, no step was taken:\n--resume: there is no 'nowhere'"),
        (("train", "--resume"), "--resume"),
        (
            ("train", "gpt-tiny", "--save-every", "2", "--folder", "none"),
            "--save-every is 2, but there is no folder for checkpoints",
        ),
    ],
)
def test_a_mistake_is_told(said, words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(*words)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("is_blind", [False, True])
def test_train_keeps_what_it_makes_where_nobody_named_a_folder(
    said, kept_actors, tmp_path, monkeypatch, caplog, is_blind
):
    if is_blind:
        monkeypatch.setattr("raypar.job.launch.without_folder", lambda nodes, folder: ["far (10.0.0.2)"])
    code, out, err = said("train", "gpt-tiny", "--data.path", argparse.__file__, "--steps", 2)
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    *_, kept, following = out.splitlines()
    assert kept.split(": ", 1)[1].strip() == str(folder) + (
        ", without checkpoints: not all nodes see it" if is_blind else ""
    )
    assert following.split(": ", 1)[1].strip() == f"raypar report {folder}"
    assert [line["step"] for line in read(folder).metrics][:2] == [0, 1]
    assert len(read(folder).checkpoints) == (0 if is_blind else 1)
    assert ("node far (10.0.0.2) does not see" in err) == is_blind


def test_train_leaves_a_folder_and_goes_on_in_it(said, kept_actors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("gpt-tiny", "--data.path", argparse.__file__, "--steps", 4)
    code, out, err = said("train", *words, "--folder", "a/run", "--save-every", 2, "--keep-last", 2)
    assert code == 0, err
    assert [line.split(": ")[1].strip() for line in out.splitlines()[-2:]] == ["a/run", "raypar report a/run"]
    whole = read(tmp_path / "a" / "run")
    assert [line["step"] for line in whole.metrics] == [0, 1, 2, 3, 4]
    assert (whole.step, whole.config["steps"], [line.step for line in whole.checkpoints]) == (3, 4, [4, 2])
    assert {event.actor for event in whole.timelines[0].events} == set(whole.ledger) == {"pp=0", "pp=1"}
    steps = 4 + whole.config["eval_steps"]
    assert whole.ledger["pp=0"]["pp send"][0] == 4 * steps, "microbatches x steps, with those of the last evaluation"
    assert (tmp_path / "a" / "run" / "log.txt").read_text().count("actors: ") == 1
    assert "INFO actors: 2 = pp 2\n" in (tmp_path / "a" / "run" / "log.txt").read_text()
    assert err.count("actors: ") == 1
    assert said("ckpt", "verify", "a/run")[0] == 0
    code, out, err = said("train", "--resume", "a/run")
    assert code == 2
    told = "this run is finished: step-00000004 has all its 4 steps; for more, raypar train --resume "
    assert f"{told}a/run --steps 8\n" in err
    err = said("train", "--resume", "a/run", "--model.hidden", 64)[2]
    assert "2 mistakes" in err and "model.hidden is 64, but 32 in the checkpoint" in err
    err = said("train", "--resume", "a/run", "--steps", 9, "--model.hidden", 64, "--seed", 3, "--dry-run")[2]
    assert "2 mistakes" in err and "seed is 3, but 0 in the checkpoint: give the same" in err
    code, _, err = said("train", "--resume", "a/run", "--steps", 9, "--clip", 3.0, "--dry-run")
    assert code == 0 and err.startswith("resumed with clip 3.0, which was 1.0\nresumed with steps 9, which was 4\n")
    old = "a/run/checkpoints/step-00000002"
    err = said("train", "--resume", old, "--steps", 9, "--dry-run")[2]
    assert "has 'step-00000004', and this run begins at step 3" in err
    err = said("train", *words, "--folder", "a/run", "--dry-run")[2]
    fix = "go on with it by raypar train --resume a/run (in Python launch(run, resume='a/run')), replace it"
    assert f"holds a run already (run.toml): {fix}" in err
    assert said("train", "a/run/run.toml", "--dry-run")[0] == 0, "another run makes a folder of its own"
    assert said("train", "a/run/run.toml", "--folder", "other", "--dry-run")[0] == 0
    assert not (tmp_path / "other").exists()
    (tmp_path / "a" / "run").rename(tmp_path / "moved")
    flip(tmp_path / "moved" / "checkpoints" / "step-00000004" / "pp0.safetensors", random.Random(0))
    code, out, err = said("train", "--resume", "moved")
    assert code == 0, err
    assert "step-00000004 is skipped:" in err
    places = "moved/checkpoints/step-00000004", "moved", "raypar report moved"
    assert [line.partition(":")[2].strip() for line in out.splitlines()[-3:]] == [*places], "as they were typed"
    rest = read(tmp_path / "moved")
    keys = ("step", "loss", "val_loss", "grad_norm", "lr")
    assert [[line.get(key) for key in keys] for line in rest.metrics] == [
        [line.get(key) for key in keys] for line in whole.metrics
    ]
    assert "folder" not in rest.config
    assert not (tmp_path / "a" / "run").exists()
    assert said("ckpt", "verify", "moved") == (
        0,
        "".join(f"moved/checkpoints/step-0000000{step}: ok\n" for step in (4, 2)),
        "",
    ), "the damaged one was replaced"


def test_the_folder_of_a_resumed_run_is_relative_if_it_was_typed_so(tmp_path, monkeypatch):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "run.toml").touch()
    save_at(folder, 4, run=plain_of(rp.recipe("gpt-tiny")))
    monkeypatch.chdir(folder)
    found = newest(folder)
    for typed, path in {"../../run": "..", str(tmp_path / "run"): str(tmp_path / "run"), ".": ".."}.items():
        assert its_run(found, typed).folder == path
    assert its_run(found).folder == str(tmp_path / "run")


def test_ctrl_c_saves_what_a_run_with_a_folder_has_come_to(said, kept_actors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = Job.train

    def interrupted(job, **how):
        train(job, steps=3, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "train", interrupted)
    code, _, err = said("train", "gpt-tiny", "--data.path", argparse.__file__, "--steps", 5, "--folder", "run")
    assert code == 130
    assert "saved as step-00000003\n" in err
    assert err.endswith("raypar: interrupted\nresume with: raypar train --resume run (after step 3)\n")
    monkeypatch.setattr(Job, "train", train)
    code, _, err = said("train", "--resume", "run")
    assert code == 0, err
    assert [line["step"] for line in read(tmp_path / "run").metrics] == [0, 1, 2, 3, 4, 5]


def test_help_of_checkpoints_names_both_commands(said):
    code, out, _ = said("ckpt", "--help")
    assert (code, "raypar ckpt ls FOLDER" in out, "raypar ckpt verify PATH" in out) == (0, True, True)
    assert said("ckpt", "ls", "--help")[0] == 0


def test_a_run_is_not_compared_with_itself(said, tmp_path):
    twice = str(tmp_path)
    assert said("report", twice, twice)[::2] == (2, f"raypar: {twice!r} is given twice: give each run once\n")
