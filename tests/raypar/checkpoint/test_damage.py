"""Checkpoints that were damaged or made up: all that is wrong is told, and nothing else happens."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from raypar.checkpoint import CheckpointError, check, verified, verify
from tests.support.checkpoints import flip, forge, forge_shard, holds, misplace, save_at, shorten, sign


@pytest.fixture
def path(tmp_path):
    return save_at(tmp_path, 1)


@pytest.fixture
def other(tmp_path):
    return save_at(tmp_path, 2)


def copies(path, count):
    """(copy, draw) of a checkpoint, again and again, under its own name."""
    for seed in range(count):
        copy = path.parent / "copies" / path.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        yield copy, random.Random(seed)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_any_single_bit_that_is_flipped_is_seen(path):
    for copy, draw in copies(path, 300):
        flip(draw.choice(sorted(copy.iterdir())), draw)
        assert verify(copy), f"seed {draw}"


def test_any_file_that_is_cut_off_is_seen(path):
    for copy, draw in copies(path, 100):
        shorten(draw.choice(sorted(copy.iterdir())), draw)
        assert verify(copy)


def test_any_file_that_is_lost_or_in_the_wrong_place_is_seen(path, other):
    for copy, draw in copies(path, 60):
        misplace(draw.choice(sorted(copy.iterdir())), other, draw)
        assert verify(copy)


def test_a_copy_is_as_sound_as_the_original_but_not_under_another_step(path):
    for copy, _ in copies(path, 1):
        assert holds(copy, 1)
        assert verify(copy.rename(copy.with_name("step-00000009"))) == [
            "the folder is named 'step-00000009', but it was saved after step 1"
        ]


def test_all_that_is_wrong_is_told(path):
    (path / "pp0.safetensors").unlink()
    flip(path / "pp1.safetensors", random.Random(1))
    (path / "stray").write_text("")
    forge(path, lambda plain: plain["tensors"]["w"]["slices"][1].update(offset=[1, 0]))
    assert verify(path) == [
        "tensor 'w': 'w' of 'pp0.safetensors' and 'w' of 'pp1.safetensors' overlap",
        "'stray' is in the folder, but not in the manifest",
        "'pp0.safetensors' is missing",
        "'pp1.safetensors' was changed: its sha256 is another one",
    ]
    with pytest.raises(CheckpointError) as caught:
        verified(path)
    assert caught.value.faults == verify(path)


# --- manifests that somebody made up ---------------------------------------------------------------------------------


def slices(plain):
    return plain["tensors"]["w"]["slices"]


def add_file(name):
    def change(plain):
        plain["files"].append({**plain["files"][0], "name": name})

    return change


FORGED = {
    "another version": (lambda plain: plain.update(version=3), "has version 3, this raypar reads 1 and 2"),
    "another program": (lambda plain: plain.update(format="DCP"), "not that of a raypar checkpoint"),
    "a field too few": (lambda plain: plain.pop("seed"), "seed is .*: Field required"),
    "a field too many": (lambda plain: plain.update(code="import os"), "its text does not match"),
    "a step that is text": (lambda plain: plain.update(step="1"), "step is '1': Input should be a valid integer"),
    "a step that is true": (lambda plain: plain.update(step=True), "step is True: Input should be a valid integer"),
    "a huge step": (lambda plain: plain.update(step=10**15), "step is 1000000000000000: Input should be less"),
    "a negative size": (lambda plain: slices(plain)[0].update(shape=[-4, 4]), "shape.0 is -4: "),
    "a broken size": (lambda plain: slices(plain)[0].update(shape=[4.0, 4]), r"shape.0 is 4.0: "),
    "a huge size": (lambda plain: slices(plain)[0].update(shape=[1 << 60, 4]), "shape.0 is 1152921504606846976: "),
    "a larger tensor": (lambda plain: plain["tensors"]["w"].update(shape=[1 << 40, 4]), "elements are in no slice"),
    "a slice outside": (lambda plain: slices(plain)[1].update(offset=[5, 0]), "leaves the tensor's shape"),
    "a hole": (lambda plain: slices(plain).pop(), "8 of its 24 elements are in no slice"),
    "no slices": (lambda plain: slices(plain).clear(), "it has 0 slices"),
    "dims too few": (lambda plain: slices(plain)[1].update(offset=[4]), "leaves the tensor's shape"),
    "another dtype": (lambda plain: plain["tensors"]["w"].update(dtype="I32"), "is F32 .*, but I32 .* in the manifest"),
    "no dtype": (lambda plain: plain["tensors"]["w"].update(dtype="code"), "its dtype 'code' is none of"),
    "another shape": (
        lambda plain: plain["tensors"]["b"].update(
            shape=[1], slices=[{**plain["tensors"]["b"]["slices"][0], "shape": [1]}]
        ),
        r"is BF16 \[5\], but BF16 \[1\] in the manifest",
    ),
    "another key": (lambda plain: slices(plain)[0].update(key="v"), "has no tensor 'v'"),
    "a tensor left out": (lambda plain: plain["tensors"].pop("b"), "has a tensor 'b', but the manifest takes it"),
    "one tensor twice": (
        lambda plain: plain["tensors"].update(c=plain["tensors"]["b"]),
        "'b' of 'pp1.safetensors' is taken for 2 slices",
    ),
    "a file that is not listed": (
        lambda plain: slices(plain)[0].update(file="pp9"),
        "'pp9' is not in the list of files",
    ),
    "a file listed twice": (add_file("pp0.safetensors"), "'pp0.safetensors' is listed 2 times"),
    "a path upward": (add_file("../step-00000002/pp0.safetensors"), "it might lead out of the folder"),
    "a path from the root": (add_file("/etc/passwd"), "it might lead out of the folder"),
    "a hidden name": (add_file(".."), "it might lead out of the folder"),
    "a name with a NUL": (add_file("a\0b"), "it might lead out of the folder"),
    "the manifest as a shard": (add_file("manifest.json"), "it might lead out of the folder"),
}


@pytest.mark.parametrize(("change", "says"), FORGED.values(), ids=FORGED)
def test_a_manifest_that_was_made_up_is_told(change, says, path, other):
    forge(path, change)
    assert any(re.search(says, fault) for fault in verify(path)), verify(path)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "X", "shape": [4], "slices": []},
        {"dtype": 5, "shape": "x", "slices": 7},
        {
            "dtype": "F32",
            "shape": [1],
            "slices": [{"file": "pp0.safetensors", "key": "k", "offset": [0], "shape": [1]}],
        },
    ],
)
def test_of_very_many_faults_the_first_are_told_and_at_once(tensor, path):
    forge(path, lambda plain: plain["tensors"].update({f"t{number}": tensor for number in range(10_000)}))
    start = time.process_time()
    faults = verify(path)
    assert len(faults) < 30
    assert re.fullmatch(r"\.\.\. and [0-9]+ more", faults[-1]) or len(faults) < 10
    assert sum(map(len, faults)) < 10_000
    assert time.process_time() - start < 3


def test_no_file_is_read_but_those_in_the_folder(path, other, monkeypatch):
    read = []
    for name in ("plain_size", "sha256_of"):
        real = getattr(check, name)
        monkeypatch.setattr(check, name, lambda file, real=real: read.append(file) or real(file))
    for name in (
        "../step-00000002/pp0.safetensors",
        str(other / "pp0.safetensors"),
        "../../x",
        "a\0b",
        "manifest.json",
    ):
        forge(path, add_file(name))
    assert len(verify(path)) == 10
    assert {file.parent for file in read} == {path}
    assert {file.name for file in read} == {"pp0.safetensors", "pp1.safetensors"}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 1_000_000, "recursion limit"),
        (b'{"a":' * 100_000, "recursion limit"),
        (b"9" * 10_000, "is not JSON"),
        (b"[1, 2]", "not that of a raypar checkpoint"),
        (pickle.dumps({"step": 1}), "is not JSON"),
    ],
)
def test_what_is_no_manifest_is_told(raw, says, path):
    (path / "manifest.json").write_bytes(raw)
    (fault,) = verify(path)
    assert says in fault


@pytest.mark.parametrize("edit", ["twice", "spaces", "infinite"])
def test_a_manifest_that_reads_the_same_but_is_written_otherwise_is_told(edit, path):
    raw = (path / "manifest.json").read_bytes()
    changed = {
        "twice": raw.replace(b'{"step": 1', b'{"step": 99, "step": 1', 1),
        "spaces": raw + b" ",
        "infinite": sign({**json.loads(raw), "run": {"a": float("inf")}}),
    }[edit]
    assert changed != raw
    (path / "manifest.json").write_bytes(changed)
    assert len(verify(path)) == 1


def test_a_manifest_has_a_bound_and_is_a_plain_file(path, tmp_path):
    manifest, kept = path / "manifest.json", tmp_path / "kept"
    shutil.copy(manifest, kept)
    os.truncate(manifest, 1 << 40)
    assert "more than" in verify(path)[0]
    for make in (lambda: manifest.symlink_to(kept), lambda: os.mkfifo(manifest), lambda: manifest.mkdir()):
        manifest.unlink()
        make()
        assert verify(path) == ["manifest.json can't be read (it is no plain file)"]


def test_a_shard_is_a_plain_file(path, tmp_path):
    shard = path / "pp0.safetensors"
    shutil.copy(shard, tmp_path / "kept")
    for make in (lambda: shard.symlink_to(tmp_path / "kept"), lambda: os.mkfifo(shard)):
        shard.unlink()
        make()
        assert verify(path) == ["'pp0.safetensors' can't be read (it is no plain file)"]


def test_a_linked_checkpoint_is_none(path, tmp_path):
    (tmp_path / "step-00000009").symlink_to(path)
    assert "is no folder" in verify(tmp_path / "step-00000009")[0]


# --- shards that somebody made up, with the right size and digest ----------------------------------------------------


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_runs(path, tmp_path):
    sprung = tmp_path / "sprung"
    for raw in (pickle.dumps(Trap(sprung)), pickle.dumps(Trap(sprung), protocol=0)):
        forge_shard(path, "pp0.safetensors", raw)
        assert "can't be read as safetensors" in verify(path)[0]
    torch.save({"w": Trap(sprung)}, tmp_path / "torch")
    forge_shard(path, "pp0.safetensors", (tmp_path / "torch").read_bytes())
    assert "can't be read as safetensors" in verify(path)[0]
    assert not sprung.exists()


@pytest.mark.parametrize("length", [1 << 62, 1 << 31, 10, 0])
def test_a_header_that_claims_more_than_there_is_is_told(length, path):
    forge_shard(path, "pp0.safetensors", length.to_bytes(8, "little") + b"{}" * 4)
    assert "can't be read as safetensors" in verify(path)[0]


def test_a_header_that_says_otherwise_is_told(path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 80]}}).encode()
    forge_shard(path, "pp0.safetensors", len(header).to_bytes(8, "little") + header + bytes(80))
    assert verify(path) == ["'w' of 'pp0.safetensors' is F32 [4, 5], but F32 [4, 4] in the manifest"]
