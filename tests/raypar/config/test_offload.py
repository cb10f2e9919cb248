"""Runs that can't be offloaded, or cut into tiles, as they say: all faults at once, before any actor starts."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

import raypar as rp


def tiny(**changes):
    return replace(rp.recipe("gpt-tiny"), **{"mesh": rp.Mesh()} | changes)


@pytest.fixture(autouse=True)
def own_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_all_faults_of_offload_come_at_once(tmp_path):
    folder = str(tmp_path / "gone")
    run = tiny(offload="optimizer", offload_folder=folder, data_parallel="parameter_server", zero_units=2)
    fix = "give the path of a folder of a fast disk"
    assert rp.faults(run) == [
        "zero_units is 2, but data_parallel is 'parameter_server': servers shard nothing, leave it out",
        "offload is 'optimizer', but parameter servers hold the optimizer: leave offload out, or set data_parallel to "
        "'all_reduce'",
        f"offload_folder {folder!r} is not there: make it, or {fix}",
    ]
    told = rp.faults(replace(run, data_parallel="all_reduce", offload_folder=None, tile=5))
    unit, *tiles = told
    assert (
        unit == "zero_units is 2, but zero is None: only zero 3 and offload 'parameters' gather weights, leave it out"
    )
    cut = "blocks.0.mlp.up", "blocks.0.mlp.down", "head.out"
    assert [f"tile cuts {path} into 5, which does not divide its" in one for path, one in zip(cut, tiles, strict=True)]


def test_experts_are_offloaded_and_not_cut():
    model = replace(rp.recipe("gpt-tiny").model, moe=rp.MoE(experts=4))
    run = tiny(model=model, tile=2, mesh=rp.Mesh(dp=2, ep=2), offload="optimizer")
    why = "tile is 2, but the model has experts, whose matrices are not cut"
    assert f"{why}: set tile to 1, or set model.moe to None" in rp.faults(run)
    assert not [one for one in rp.faults(replace(run, tile=1)) if "offload" in one or "expert" in one]


@pytest.mark.parametrize("where", ["", "  ", "a\0b", "file", "file/inside", "x" * 300])
def test_a_folder_that_can_not_be_used_is_told_with_its_fix(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (fault,) = rp.faults(tiny(offload="parameters", offload_folder=where))
    assert fault.startswith(f"offload_folder {where!r} ")
    assert fault.endswith("give the path of a folder of a fast disk")


def test_a_folder_without_offload_has_no_use(tmp_path):
    assert rp.faults(tiny(offload_folder=str(tmp_path))) == [
        f"offload_folder is {str(tmp_path)!r}, but offload is 'none': leave offload_folder out, or set offload to "
        "'optimizer' or 'parameters'"
    ]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_disk_that_takes_no_file_is_told(number, tmp_path, monkeypatch):
    def refuse(*args, **words):
        raise OSError(number, os.strerror(number))

    run = tiny(offload="parameters", offload_folder=str(tmp_path))
    assert not rp.faults(run)
    assert not list(tmp_path.iterdir()), "the check leaves nothing"
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    (fault,) = rp.faults(run)
    assert f"offload_folder {str(tmp_path)!r} can't be used ({os.strerror(number)}): give the path" in fault
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not rp.faults(run), "the actors' nodes have other disks"


@pytest.mark.parametrize("changes", [{"offload": "weights"}, {"offload": 1}, {"offload_folder": 3}])
def test_a_wrong_word_is_told(changes):
    (name,) = changes
    assert [name in fault for fault in rp.faults(tiny(**changes))] == [True]


def test_faults_of_tiles_and_offload_come_together(tmp_path):
    run = tiny(tile=4, mesh=rp.Mesh(tp=2), optim=rp.Muon(), offload="parameters", offload_folder=str(tmp_path / "no"))
    told = rp.faults(run)
    for says in ("mesh.tp is 2, which divides the same layers", "Muon updates as a whole", "is not there: make it"):
        assert sum(says in fault for fault in told) >= 1, told
