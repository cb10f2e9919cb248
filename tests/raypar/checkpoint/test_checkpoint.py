"""Checkpoints as a user has them: saved, found, listed, thinned out; one save at a time."""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.checkpoint.shards import ShardFile, stored_in, write_shard
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.checkpoint import CheckpointError, Save, ls, manifest_of, newest, verified, verify
from raypar.checkpoint.manifest import decode, encode
from raypar.paths import aside_of, is_aside, step_folder_name, step_of
from tests.support.checkpoints import flip, holds, save_at, visible


def test_what_is_saved_is_found_and_sound(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    path = save_at(folder, 120)
    assert path == folder / "step-00000120"
    assert visible(folder) == ["step-00000120"]
    assert visible(path) == ["manifest.json", "pp0.safetensors", "pp1.safetensors"]
    assert verify(path) == []
    assert holds(path, 120)
    assert newest(folder).path == path


def test_a_manifest_says_what_another_layout_needs(tmp_path):
    plain = json.loads((save_at(tmp_path, 3) / "manifest.json").read_text())
    assert (plain["step"], plain["seed"], plain["run"]) == (3, 7, {"steps": 100, "mesh": {"pp": 2}})
    assert plain["tensors"]["w"] == {
        "dtype": "F32",
        "shape": [6, 4],
        "slices": [
            {"file": "pp0.safetensors", "key": "w", "offset": [0, 0], "shape": [4, 4]},
            {"file": "pp1.safetensors", "key": "w", "offset": [4, 0], "shape": [2, 4]},
        ],
    }
    assert plain["tensors"]["optim.b.step"]["shape"] == []


def test_an_empty_checkpoint_is_one_too(tmp_path):
    with Save(tmp_path, 0) as save:
        path = save.commit(manifest_of(0, 0, {}, []))
    assert verify(path) == []


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), plain_data, max_size=3), st.integers())
def test_any_plain_run_and_seed_come_back(run, seed):
    manifest = manifest_of(1, seed, run, [])
    read, faults = decode(encode(manifest))
    assert faults == []
    assert read == replace(manifest, sha256=read.sha256)


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "run", [{"a": float("nan")}, {"a": {1, 2}}, {"a": torch.ones(1)}, {"a": "\ud800"}, nested(250), nested(900)]
)
def test_a_run_that_can_not_be_read_back_is_refused(run, tmp_path):
    save_at(tmp_path, 1)
    with Save(tmp_path, 2) as save, pytest.raises(CheckpointError, match=r"the run can't be written|manifest.json"):
        save.commit(manifest_of(2, 0, run, []))
    assert visible(tmp_path) == ["step-00000001"]


def test_slices_that_do_not_agree_are_refused_all_at_once():
    half, two_of_nine = torch.ones(2), Shard((9,), Sharding({0: Pieces(9, (2, 3))}))
    parts = {"x": stored_in("b", "x", half.double()), "y": stored_in("b", "y", half, two_of_nine)}
    shards = [
        (ShardFile("a", 1, ""), {"x": stored_in("a", "x", half), "y": stored_in("a", "y", half)}),
        (ShardFile("b", 1, ""), parts),
    ]
    with pytest.raises(CheckpointError) as caught:
        manifest_of(1, 0, {}, shards)
    assert [fault[:38] for fault in caught.value.faults] == [
        "tensor 'x': its slices are of differen",
        "tensor 'y': its slices are of differen",
    ]
    with pytest.raises(CheckpointError, match="7 of its 9 elements are in no slice"):
        manifest_of(1, 0, {}, [(ShardFile("a", 1, ""), {"y": stored_in("a", "y", half, two_of_nine)})])


def test_shards_that_are_not_there_are_never_committed(tmp_path):
    """As when an actor's node does not share the folder."""
    save_at(tmp_path, 1)
    with Save(tmp_path, 2) as save:
        shard = write_shard(save.path, "a", {"x": torch.ones(2)})
        (save.path / "a").unlink()
        write_shard(save.path, "stray", {})
        with pytest.raises(CheckpointError) as caught:
            save.commit(manifest_of(2, 0, {}, [(shard, {"x": stored_in("a", "x", torch.ones(2))})]))
    assert caught.value.faults == ["'stray' is in the folder, but not in the manifest", "'a' is missing"]
    assert visible(tmp_path) == ["step-00000001"]
    assert holds(tmp_path / "step-00000001", 1)


# --- finding and listing ---------------------------------------------------------------------------------------------


def test_the_newest_sound_one_is_found_and_what_was_skipped_is_told(tmp_path, caplog):
    for step in (5, 90, 100):
        save_at(tmp_path, step)
    flip(tmp_path / "step-00000100" / "pp1.safetensors", random.Random(0))
    (tmp_path / "step-00000200").mkdir()
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).path == tmp_path / "step-00000090"
    assert [record.args[0].name for record in caplog.records] == ["step-00000200", "step-00000100"]
    assert "'pp1.safetensors' was changed" in caplog.text


def test_only_folders_that_are_named_as_checkpoints_count(tmp_path):
    real = save_at(tmp_path, 1)
    (tmp_path / "step-00000009").symlink_to(real)
    (tmp_path / "step-00000008").write_text("")
    for name in ("step-12.tmp", "step-000000012", "xstep-00000012", ".step-00000012.abc", "step-٠٠٠٠٠٠١٢"):
        (tmp_path / name).mkdir()
    assert [line.step for line in ls(tmp_path)] == [1]
    assert newest(tmp_path).path == real
    assert newest(real) is None


def test_ls_tells_sizes_and_what_can_not_be_read(tmp_path):
    small, odd = save_at(tmp_path, 1), save_at(tmp_path, 2)
    (odd / "manifest.json").write_text("{}")
    size = 110  # of its tensors: 6 x 4 and 1 of fp32, 5 of bf16
    assert [(line.path, line.step, line.size, line.tensors) for line in ls(tmp_path)] == [
        (odd, 2, 0, 0),
        (small, 1, size, 3),
    ]
    assert [len(line.faults) for line in ls(tmp_path)] == [1, 0]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    for look in (ls, newest):
        with pytest.raises(CheckpointError, match="No such file"):
            look(tmp_path / "gone")
    assert len(verify(tmp_path / "gone")) == len(verify(tmp_path / "a\0b")) == 1
    with pytest.raises(CheckpointError, match="is no folder"):
        verified(tmp_path / "gone")


@given(st.integers(0, 10**15 - 1))
def test_names_and_steps_are_one_to_one(step):
    assert step_of(step_folder_name(step)) == step
    assert step_of(aside_of(step)) is None
    assert is_aside(aside_of(step))
    assert not is_aside(step_folder_name(step))


# --- keeping the last n ----------------------------------------------------------------------------------------------


def test_only_the_last_n_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_at(tmp_path, step, keep_last=2)
    assert visible(tmp_path) == ["step-00000003", "step-00000004"]
    save_at(tmp_path, 5, keep_last=1)
    assert visible(tmp_path) == ["step-00000005"]


def test_later_ones_are_not_counted(tmp_path):
    """A run that was resumed from step 2 must not lose what it saves next to a stale step 9."""
    for step in (1, 2, 9):
        save_at(tmp_path, step)
    save_at(tmp_path, 3, keep_last=1)
    assert visible(tmp_path) == ["step-00000003", "step-00000009"]


def test_nothing_is_removed_for_a_save_that_fails(tmp_path):
    for step in (1, 2):
        save_at(tmp_path, step)
    with Save(tmp_path, 3) as save, pytest.raises(CheckpointError):
        save.commit(manifest_of(3, 0, {}, [(ShardFile("a", 1, ""), {})]), keep_last=1)
    assert visible(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path):
    path = save_at(tmp_path, 1)
    (path / "manifest.json").write_text("damaged")
    assert save_at(tmp_path, 1) == path
    assert holds(path, 1)
    assert visible(tmp_path) == ["step-00000001"]


# --- one save at a time ----------------------------------------------------------------------------------------------


def test_a_save_is_given_up_unless_it_is_committed(tmp_path):
    with pytest.raises(KeyError), Save(tmp_path, 1) as save:
        write_shard(save.path, "a", {"x": torch.ones(2)})
        raise KeyError
    assert visible(tmp_path) == []
    save.abort()


def test_a_second_save_waits_its_turn_and_the_first_is_unharmed(tmp_path):
    with Save(tmp_path, 1) as save:
        with pytest.raises(CheckpointError, match=r"another save to .* is under way"):
            Save(tmp_path, 2)
        write_shard(save.path, "a", {})
    assert holds(save_at(tmp_path, 2), 2)


def test_what_a_killed_process_left_is_removed_but_not_while_it_lives(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from raypar.checkpoint import Save;"
        "s = Save(Path(sys.argv[1]), 7);"
        "(s.path / 'half').write_text('x'); print('torch' in sys.modules, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "False\n", "import raypar.checkpoint brings torch in"
        with pytest.raises(CheckpointError, match="under way"):
            save_at(tmp_path, 8)
        (left,) = visible(tmp_path)
        assert is_aside(left)
        assert visible(tmp_path / left) == ["half"]
        process.send_signal(signal.SIGKILL)
    save_at(tmp_path, 8)
    assert visible(tmp_path) == ["step-00000008"]


def test_only_leftovers_are_swept(tmp_path):
    mine = [".step-00000001.mine", ".hidden", "notes", "step-1"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / aside_of(3)).mkdir()
    (tmp_path / aside_of(4)).symlink_to(tmp_path / "notes")
    save_at(tmp_path, 1)
    assert set(mine) < set(visible(tmp_path))
    assert len(visible(tmp_path)) == len(mine) + 2  # the link, which no save has made, and the checkpoint


# --- folders that can't be written -----------------------------------------------------------------------------------


def test_a_folder_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    places = {
        "file": "give a path that is a folder",
        "file/x": "give a path that is a folder",
        "n" * 300: "give a shorter path",
        "a\0b": "give another path",
    }
    for name, says in places.items():
        with pytest.raises(CheckpointError, match=says):
            Save(tmp_path / name, 1)
    with pytest.raises(CheckpointError, match="no checkpoint can be written to '/proc/"):
        save_at(type(tmp_path)("/proc/raypar"), 1)


def test_what_stands_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000001").symlink_to("notes")
    (tmp_path / "step-00000002").write_text("mine")
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="Not a directory"):
            save_at(tmp_path, step)
    assert visible(tmp_path) == ["notes", "step-00000001", "step-00000002"]
