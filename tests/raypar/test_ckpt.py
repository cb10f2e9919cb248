"""Checkpoints on the command line: ``raypar ckpt``, ``raypar train --save-to`` and ``--resume``."""

from __future__ import annotations

import argparse
import json
import random

import pytest

from tests.raypar.checkpoints import flip, save_at


def test_ls_is_the_newest_first_and_marks_what_is_not_sound(said, tmp_path):
    assert said("ckpt", "ls", tmp_path) == (0, "no checkpoints\n", "")
    for step in (1, 20):
        save_at(tmp_path, step)
    code, out, _ = said("ckpt", "ls", tmp_path)
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["step-00000020", "step-00000001"])
    assert "3 tensors" in out
    flip(tmp_path / "step-00000001" / "manifest.json", random.Random(0))
    code, out, _ = said("ckpt", "ls", tmp_path)
    assert code == 1
    assert [("NOT SOUND: manifest.json" in line) for line in out.splitlines()] == [False, True]


def test_verify_reads_one_or_all(said, tmp_path):
    paths = [save_at(tmp_path, step) for step in (1, 2)]
    assert said("ckpt", "verify", paths[0]) == (0, f"{paths[0]}: ok\n", "")
    flip(paths[0] / "pp0.safetensors", random.Random(0))
    wrong = f"{paths[0]}: 1 faults\n- 'pp0.safetensors' was changed: its sha256 is another one\n"
    assert said("ckpt", "verify", paths[0]) == (1, wrong, "")
    assert said("ckpt", "verify", tmp_path) == (1, f"{paths[1]}: ok\n{wrong}", "")
    assert said("ckpt", "verify", paths[1]) == (0, f"{paths[1]}: ok\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ckpt", "ls", "nowhere"), "'nowhere' can't be read (No such file or directory)"),
        (("ckpt", "verify", "nowhere"), "'nowhere' can't be read (No such file or directory)"),
        (("ckpt", "verify", "."), "there is no checkpoint in '.': give another path"),
        (("ckpt",), "ckpt"),
        (("ckpt", "rm", "x"), "ckpt"),
        (("train", "--resume", "nowhere"), "can't be read"),
        (("train", "--resume"), "--resume"),
        (("train", "gpt-tiny", "--save-every", "2"), "save_every is 2, but save_to names no folder"),
    ],
)
def test_a_mistake_is_told(said, words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(*words)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_train_saves_and_goes_on(said, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs = [tmp_path / "whole.jsonl", tmp_path / "rest.jsonl"]
    words = ("gpt-tiny", "--data.path", argparse.__file__, "--steps", 4)
    code, out, err = said("train", *words, "--save-to", "ckpts", "--save-every", 2, "--keep-last", 2, "--log", logs[0])
    assert code == 0, err
    assert dict(line.split(": ", 1) for line in out.splitlines())["checkpoints"].strip() == "ckpts"
    assert said("ckpt", "verify", "ckpts")[0] == 0
    code, out, err = said("train", "--resume", "ckpts")
    assert code == 2
    assert "step-00000004 is the end of a run of 4 steps: give more --steps to go on" in err
    assert said("train", *words, "--save-to", "ckpts")[0] == 2, "it would save below them"
    flip(tmp_path / "ckpts" / "step-00000004" / "pp0.safetensors", random.Random(0))
    code, out, err = said("train", "--resume", "ckpts", "--log", logs[1])
    assert code == 0, err
    assert "step-00000004 is skipped:" in err
    whole, rest = ([json.loads(line) for line in log.read_text().splitlines()] for log in logs)
    keys = ("step", "loss", "grad_norm", "lr")
    assert [[line.get(key) for key in keys] for line in rest] == [[line.get(key) for key in keys] for line in whole[2:]]
    assert said("ckpt", "verify", "ckpts") == (
        0,
        "".join(f"ckpts/step-0000000{step}: ok\n" for step in (4, 2)),
        "",
    ), "the damaged one was replaced"
