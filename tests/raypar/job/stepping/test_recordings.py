"""Recordings that somebody made up: nothing in them is believed, and nothing of theirs runs."""

from __future__ import annotations

import os
import pickle
import random
import time
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.checkpoint.shards import write_shard
from raypar.job.stepping.recording import _sha256, read_recording, write_recording
from tests.support.team import Team
from tests.support.thread_jobs import Hands

SPEC = rp.GPT(layers=2, hidden=8, heads=2, seq=6, vocab=16)


def tokens(step, microbatch, dp):
    ids = torch.arange(14).reshape(2, 7) % 16
    return ids[:, :-1], ids[:, 1:]


def longer(step, microbatch, dp):
    ids = torch.arange(18).reshape(2, 9) % 16
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What a recording is of, and its tensors."""
    path = tmp_path_factory.mktemp("recording") / "stage.rec"
    stepper = Hands(Team(None, 2, 2, "1f1b", model=SPEC, data=tokens)).stepper()
    stepper.record(path, 1)
    stepper.finish()
    about, tensors = read_recording(path)
    assert rp.replay(path).ok
    return about, {name: tensor.clone() for name, tensor in tensors.items()}


def faults_of(path):
    start = time.process_time()
    with pytest.raises(rp.ConfigError) as caught:
        rp.replay(path)
    assert time.process_time() - start < 2
    assert all(len(fault) < 1000 for fault in caught.value.faults)
    return caught.value.faults


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": ()}, "layers []: the model has 4"),
        ({"layers": (-1,)}, "layers [-1]: the model has 4"),
        ({"layers": (2, 2, 2)}, "its layers are [2, 2, 2]"),
        ({"layers": tuple(range(50_000))}, "the model has 4"),
        ({"stage": -5}, "stage is -5"),
        ({"step": 10**30}, "step is 1000"),
        ({"threads": 10**9}, "threads is 1000000000"),
        pytest.param(
            {"device": "cuda"},
            "the recording is of a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ({"actions": ("F0",) * 200_000}, "its actions are ['F0', "),
        ({"actions": ("B0", "F0")}, "its actions are ['B0', 'F0']"),
        ({"actions": ("os.system", "F0")}, "its actions are ['os.system', "),
        ({"actions": ("F999999999",)}, "it has no inputs of F999999999"),
        ({"format": "raypar recording 9"}, "it is 'raypar recording 9'"),
        ({"model": {"heads": 0}}, "model.heads is 0: it must be at least 1"),
        ({"model": {"heads": 3}}, "set model.heads to 2"),
        ({"model": {"hidden": 10**7, "heads": 1}}, "float32[8] in the recording, float32[10000000] in the model"),
        ({"model": {"hidden": 10**30}}, "it must be at most 1e+07"),
        ({"model": {"layers": -4}}, "model.layers is -4"),
        ({"model": {"evil": 1}}, "model.evil is not a field"),
        ({"model": {"fn": "os.system", "loss": "os.system"}}, "of your own modules, 'os.system'"),
    ],
)
def test_what_no_stage_can_have_left_behind_is_told(recorded, tmp_path, change, says):
    about, tensors = recorded
    if "model" in change:
        change = {"model": about.model | change["model"]}
    write_recording(tmp_path / "forged", replace(about, **change), tensors)
    assert any(says in fault for fault in faults_of(tmp_path / "forged"))


def test_tensors_that_are_not_the_model_s_are_told(recorded, tmp_path):
    about, tensors = recorded
    odd = {name: torch.zeros(3) if name.startswith("state/") else tensor for name, tensor in tensors.items()}
    write_recording(tmp_path / "odd", about, odd)
    faults = faults_of(tmp_path / "odd")
    assert "is float32[3] in the recording, float32[8] in the model" in faults[0]
    assert "more" in faults[-1]
    write_recording(tmp_path / "less", about, {name: t for name, t in tensors.items() if "/inputs" not in name})
    assert "it has no inputs of F0" in faults_of(tmp_path / "less")[0]


@pytest.mark.parametrize(
    "raw",
    [b"", b"hello" * 9, (1 << 62).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"{}"],
)
def test_what_is_no_recording_is_told(raw, tmp_path):
    (tmp_path / "raw").write_bytes(raw)
    (fault,) = faults_of(tmp_path / "raw")
    assert fault.endswith(": give a file that rp.Stepper.record wrote")


def test_damage_anywhere_is_told(recorded, tmp_path):
    write_recording(tmp_path / "sound", *recorded)
    sound, draw = (tmp_path / "sound").read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(sound)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (tmp_path / "damaged").write_bytes(damaged)
        assert len(faults_of(tmp_path / "damaged")) == 1
    (tmp_path / "damaged").write_bytes(sound)
    assert rp.replay(tmp_path / "damaged").ok


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_is_not_run(tmp_path):
    (tmp_path / "pickle").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    torch.save(Canary(tmp_path / "canary"), tmp_path / "torch")
    for name in ("pickle", "torch"):
        assert faults_of(tmp_path / name)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "about",
    [
        torch.zeros(3),
        torch.zeros(0, dtype=torch.uint8),
        torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8),
        torch.frombuffer(bytearray(b'{"x":[' + b"1," * 3_000_000 + b"1]}"), dtype=torch.uint8),
    ],
)
def test_what_it_says_of_itself_has_to_be_json_and_short(about, tmp_path):
    write_shard(tmp_path, "odd", {"about": about, "sha256": _sha256({"about": about})})
    assert "is no recording" in faults_of(tmp_path / "odd")[0]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_pipes_links_and_folders_are_not_opened(make, tmp_path):
    make(tmp_path / "odd")
    assert "it is no plain file" in faults_of(tmp_path / "odd")[0]


def test_nothing_is_recorded_into_a_pipe_or_a_device(tmp_path):
    stepper = Hands(Team(None, 2, 2, "1f1b", model=SPEC, data=tokens)).stepper()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(rp.ConfigError, match="is a device or a pipe"):
            stepper.record(path, 0)
    stepper.abort()


@pytest.mark.parametrize(("axis", "part"), [("tp", "a stage"), ("cp", "the tokens")])
def test_a_part_of_a_stage_is_not_recorded(tmp_path, axis, part):
    stepper = Hands(Team(None, 1, 2, "1f1b", model=replace(SPEC, seq=8), data=longer, **{axis: 2})).stepper()
    with pytest.raises(
        rp.ConfigError, match=f"mesh.{axis}=2 divides {part} over actors, and a part .*can't be replayed"
    ):
        stepper.record(tmp_path / "part.rec", 0)
    stepper.abort()


def test_a_recording_of_a_home_that_nobody_has_is_not_there():
    assert len(faults_of("~nobody-of-this-name/x")) == 1
