"""Saving and resuming on real actors; what is saved on which layout is in tests/actors/test_copies.py."""

from __future__ import annotations

import argparse
import logging
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.snapshot import logical_name
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.optim.groups import is_matrix
from raypar.actors.optim.optimizer import STATE_KEYS
from raypar.checkpoint import verified
from raypar.config.toml import as_begun, plain_of, recorded_run
from raypar.job.start.resume import _of_own_layers, _tensor_faults, demand_resumable, find, prepared, rate_jumps
from raypar.paths import CHECKPOINTS, checkpoints
from raypar.reporting.run_folder.read import read
from tests.support.checkpoints import flip

STEPS = 6


def tiny(**changes):
    text = rp.Text(argparse.__file__)
    optim = rp.AdamW(lr=1e-3, warmup=2, decay="cosine")
    return replace(
        rp.recipe("gpt-tiny"), **{"steps": STEPS, "data": text, "optim": optim, "mesh": rp.Mesh(pp=2)} | changes
    )


def skeleton_of(run):
    return Skeleton(run.model, run.seed)


def outcome(job, steps=None):
    reports = job.train(steps)
    return [(report.step, report.loss, report.grad_norm, report.lr) for report in reports], dict(job.weights())


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


def steps_in(folder):
    return [step for step, _ in checkpoints(folder)]


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A run that saved beside its training: its checkpoints, its second half and its weights at the end."""
    folder = tmp_path_factory.mktemp("run") / "a-run"
    with pool.serving():
        job = rp.launch(tiny(folder=str(folder), save_every=1, keep_last=4))
    with job:
        job.train(STEPS // 2)
        yield folder / "checkpoints", outcome(job), job


@pytest.mark.long
def test_the_newest_stay_and_are_there_when_train_returns(trained):
    folder, _, job = trained
    assert steps_in(folder) == [6, 5, 4, 3]
    manifest = verified(folder / "step-00000003")
    assert (manifest.step, manifest.seed, manifest.run["steps"]) == (3, 0, STEPS)
    weights = {name for name in manifest.tensors if not name.startswith("optim.")}
    assert weights == set(job.parameters)
    assert len(manifest.tensors) == 4 * len(weights)
    assert {file.name for file in manifest.files} == {"pp0.safetensors", "pp1.safetensors"}


def test_a_fresh_job_goes_on_bitwise(trained, kept_actors):
    folder, wanted, _ = trained
    with rp.launch(tiny(), resume=folder / "step-00000003") as job:
        assert job.next_step == 3
        same(outcome(job), wanted)


def test_steps_one_by_one_are_saved_too(pool, tmp_path):
    with pool.serving(), rp.launch(tiny(folder=str(tmp_path / "run"), save_every=2, steps=5)) as job:
        for _ in range(5):
            job.step()
    assert steps_in(tmp_path / "run" / CHECKPOINTS) == [5, 4, 2]


@pytest.mark.long
def test_so_does_a_reset_one_with_another_schedule_and_mesh(trained, job_of):
    folder, wanted, _ = trained
    run = tiny(mesh=rp.Mesh(pp=4), schedule="gpipe", optim=replace(tiny().optim))
    same(outcome(job_of(run, resume=str(folder / "step-00000003"))), wanted)


def test_save_now_and_one_that_fails(trained, tmp_path):
    *_, job = trained
    path = job.save(tmp_path / "a")
    assert (path.name, verified(path).step) == ("step-00000006", job.next_step)
    assert job.save(tmp_path / "a", keep_last=1) == path
    (tmp_path / "file").touch()
    with pytest.raises(rp.CheckpointError, match="no checkpoint can be written"):
        job.save(tmp_path / "file")
    with pytest.raises(ValueError, match="keep_last is 0"):
        job.save(tmp_path / "a", keep_last=0)
    assert steps_in(tmp_path / "a") == [6]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"zero": 1, "optim": rp.SGD(lr=1e-2)},
        {"data_parallel": "parameter_server", "servers": 2},
    ],
    ids=["zero", "servers"],
)
def test_replicas_go_on_bitwise(job_of, tmp_path, changes):
    run = tiny(mesh=rp.Mesh(dp=2), model=replace(tiny().model, tied=True), **changes)
    job = job_of(run)
    job.train(2)
    job.save(tmp_path)
    wanted = outcome(job, 2)
    job.reset(replace(run, folder=str(tmp_path / "run")), resume=tmp_path)
    same(outcome(job, 2), wanted)
    job.reset(run)
    past = read(tmp_path / "run")
    assert [line["loss"] for line in past.metrics] == [loss for _, loss, *_ in wanted[0]]
    servers = run.servers if run.data_parallel == "parameter_server" else 0
    assert (past.step, len(past.timelines), past.checkpoints) == (3, 2 + servers, []), "written by the reset"


def test_a_disk_that_fails_warns_and_training_goes_on(trained, monkeypatch, tmp_path, caplog):
    *_, job = trained
    real = job._loop.saver
    monkeypatch.setattr(real, "_run", replace(job.run, folder=str(tmp_path), steps=100))
    calls = job._loop.loaded.calls
    submit = calls.submit

    def elsewhere(method, *args, **more):
        return submit(method, *((f"{args[0]}/gone", *args[1:]) if method == "write" else args), **more)

    monkeypatch.setattr(calls, "submit", elsewhere)
    with caplog.at_level(logging.WARNING):
        reports = job.train(2)
        real.settle()
    assert [report.step for report in reports] == [6, 7]
    assert re.search(r"no checkpoint of step [78] was saved; the newest is step-00000006:\n- actor pp=0: ", caplog.text)
    assert "give a path that is there, and that every node sees" in caplog.text
    assert not steps_in(tmp_path / "checkpoints")
    monkeypatch.undo()
    assert job.save(tmp_path / "checkpoints").name == "step-00000008", "the next one can be saved"


# --- before any actor starts -----------------------------------------------------------------------------------------


def faults_of(run, **words):
    with pytest.raises(rp.ConfigError) as caught:
        rp.launch(run, **words)
    return caught.value.faults


def test_a_checkpoint_of_another_run_is_told_with_all_differences(trained):
    folder = trained[0]
    other = tiny(seed=1, optim=rp.SGD(), model=replace(tiny().model, layers=9, tied=True))
    where = f"resume {str(folder / 'step-00000006')!r}:"
    assert sorted(faults_of(other, resume=folder)) == [
        f"{where} model.layers is 9, but {tiny().model.layers} in the checkpoint: give the same",
        f"{where} model.tied is True, but False in the checkpoint: give the same",
        f"{where} optim.kind is 'sgd', but 'adamw' in the checkpoint: give the same",
        f"{where} seed is 1, but 0 in the checkpoint: give the same",
    ]
    assert faults_of(tiny(optim=rp.SGD()), resume=folder) == [
        f"{where} optim.kind is 'sgd', but 'adamw' in the checkpoint: give the same",
    ], "once, and not for every tensor that an optimizer keeps"
    llama = rp.recipe("llama-tiny").model
    assert faults_of(tiny(model=llama), resume=folder) == [
        f"{where} model.positions is 'rope', but 'learned' in the checkpoint: give the same",
        f"{where} model.kind is 'llama', but 'gpt' in the checkpoint: give the same",
    ]


def test_the_users_own_modules_are_told_apart_by_their_weights(trained):
    folder = trained[0]
    tensors = dict(verified(folder / "step-00000003").tensors)
    assert not list(_tensor_faults(tiny(), skeleton_of(tiny()), tensors))
    up = tensors.pop("blocks.0.mlp.up.weight")
    tensors["optim.nobody.exp_avg"] = tensors["extra"] = up
    assert sorted(_tensor_faults(tiny(), skeleton_of(tiny()), tensors)) == [
        f"'optim.nobody.exp_avg', F32 {list(up.shape)}, belongs to another model or optimizer",
        "weight 'blocks.0.mlp.up.weight' is not in it",
        "weight 'extra' is in it, but not in the model",
    ]
    tensors = dict(verified(folder / "step-00000003").tensors)
    del tensors["optim.blocks.0.mlp.up.weight.exp_avg"]
    down = tensors["blocks.0.mlp.up.weight"] = tensors["blocks.0.mlp.down.weight"]
    faults = list(_tensor_faults(tiny(), skeleton_of(tiny()), tensors))
    assert faults[0] == (
        f"weight 'blocks.0.mlp.up.weight' is F32 {list(up.shape)}, but F32 {list(down.shape)} in the checkpoint"
    )
    assert len(faults) == 3, "what is left of the optimizer's state is of no use"


def test_other_layers_of_the_users_own_are_told_in_one_sentence():
    one = "weight 'layers.0.bias' is not in it"
    faults = _of_own_layers([one, "weight 'layers.0.weight' is not in it", "'optim.x' belongs to another model"])
    fix = "give the layers that were saved, or leave resume out to begin anew"
    reported = f"your own layers are not those that were saved: {one}, and so on, 2 weights in all: {fix}"
    assert faults == [reported]
    assert _of_own_layers(["'buffers.x' is not in it"]) == ["'buffers.x' is not in it"]


def test_a_weight_that_goes_over_from_muon_to_its_adamw_is_told():
    run = replace(tiny(), optim=rp.Muon())
    weights = {name: (tuple(weight.shape), weight.dim()) for name, weight in skeleton_of(run).weights.items()}
    stored = {name: Logical("F32", shape, ()) for name, (shape, _) in weights.items()}
    for name, (shape, dims) in weights.items():
        for key in STATE_KEYS["muon" if is_matrix(run.optim, name, dims) else "adamw"]:
            stored[logical_name(name, key)] = Logical("F32", () if key == "step" else shape, ())
    assert not list(_tensor_faults(run, skeleton_of(run), stored))
    (fault,) = _tensor_faults(
        replace(run, optim=rp.Muon(adamw=("embed.*", "head.*", "blocks.0.mlp.up.*"))), skeleton_of(run), stored
    )
    assert fault.startswith("'optim.blocks.0.mlp.up.weight.momentum_buffer', F32 ")


@pytest.mark.parametrize(
    ("field", "value", "was"), [("attention", "materialised", "blocks"), ("linear", "torch", "auto")]
)
def test_how_a_model_computes_may_change(trained, caplog, field, value, was):
    run = tiny(model=replace(tiny().model, **{field: value}))
    demand_resumable(run, skeleton_of(run), find(trained[0]))
    assert caplog.messages == [f"resumed with model.{field} '{value}', which was '{was}'"]


def test_what_may_change_is_said(trained, caplog):
    folder = trained[0]
    with caplog.at_level(logging.WARNING):
        run = tiny(mesh=rp.Mesh(pp=4), optim=replace(tiny().optim, lr=0.5))
        demand_resumable(run, skeleton_of(run), find(folder))
    assert [record.getMessage() for record in caplog.records] == ["resumed with optim.lr 0.5, which was 0.001"]


@pytest.mark.parametrize(
    ("taken", "before", "steps", "reported"),
    [
        (30, 30, 60, ["jumps from 0.000103 in step 30 to 0.000574 in step 31: its curve is that of 60 steps now, and"]),
        (15, 30, 60, ["jumps from 0.00065 in step 15 to 0.000893 in step 16"]),
        (30, 60, 61, []),
        (30, 60, 60, []),
        (0, 30, 60, []),
    ],
)
def test_a_rate_that_jumps_is_said(taken, before, steps, reported):
    run = tiny(optim=rp.AdamW(lr=1e-3, warmup=2, decay="cosine", final=0.1), steps=steps)
    found = [*rate_jumps(run, taken, before)]
    assert len(found) == len(reported) and all(text in fault for text, fault in zip(reported, found, strict=True)), (
        found
    )


def test_more_steps_say_so_where_a_run_goes_on(trained, caplog):
    run = tiny(steps=60)
    demand_resumable(run, skeleton_of(run), find(trained[0]))
    assert "resumed with steps 60, which was 6" in caplog.text and "the learning rate jumps from" in caplog.text


def test_the_newest_sound_one_is_found(trained, tmp_path, caplog):
    for step in (3, 4):
        shutil.copytree(trained[0] / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    flip(tmp_path / "step-00000004" / "pp1.safetensors", random.Random(0))
    assert find(tmp_path).manifest.step == 3
    assert "step-00000004 is skipped:\n'pp1.safetensors'" in caplog.text
    assert "'pp1.safetensors' was changed" in faults_of(tiny(), resume=tmp_path / "step-00000004")[0]


def test_a_run_that_is_finished_is_told_before_its_actors_start(trained, caplog):
    prepared(tiny(), trained[0] / "step-00000006")
    says = "train() has nothing to do; for more, give steps=9"
    assert caplog.messages == [f"step-00000006 has taken all 6 steps of this run: {says}"]


def test_a_run_goes_on_with_the_rates_and_the_validation_that_it_began_with(trained, caplog):
    other = tiny(optim=rp.AdamW(lr=1e-3, warmup=2, decay="cosine", decay_end="last"))
    other = replace(other, data=replace(other.data, val_from="end"), steps=9)
    begun = prepared(other, trained[0] / "step-00000004").run
    assert (begun.optim.decay_end, begun.data.val_from) == ("after", "blocks")
    assert "decay_end" not in caplog.text and "val_from" not in caplog.text


@pytest.mark.parametrize("data", [rp.Text(), rp.Examples("/a.jsonl")])
def test_a_record_of_before_these_were_fields_means_what_runs_did_then(data):
    record = plain_of(tiny(data=data))
    del record["optim"]["decay_end"]
    record["data"].pop("val_from", None)
    old, begun = recorded_run(record), as_begun(tiny(data=data), record)
    assert old == begun
    assert old.optim.decay_end == "last"
    assert getattr(old.data, "val_from", "end") == "end"
    assert (
        as_begun(tiny(data=data), plain_of(tiny(data=data)))
        == tiny(data=data)
        == recorded_run(plain_of(tiny(data=data)))
    )


def test_there_has_to_be_one(tmp_path):
    assert faults_of(tiny(), resume=tmp_path) == [
        f"resume {str(tmp_path)!r}: there is no sound checkpoint in it: give another folder, or start anew, without "
        "resume"
    ]
    (tmp_path / "run.toml").touch()
    (fault,) = faults_of(tiny(), resume=tmp_path)
    command = f"raypar train {tmp_path}/run.toml --folder {tmp_path} --overwrite"
    assert fault.endswith(f"or begin its run anew with {command} (in Python launch(run, overwrite=True))")
    assert faults_of(tiny(), resume=tmp_path / "nowhere") == [
        f"resume: there is no '{tmp_path}/nowhere': correct the path"
    ]


def test_a_run_does_not_save_below_checkpoints_of_another_one(trained):
    run = trained[0].parent
    steps, taken = faults_of(tiny(folder=str(run), steps=0))
    assert steps == "steps is 0: it must be at least 1"
    reported = (
        "that is under way: end that one first, or give another folder",  # by the job of these tests
        f"already (run.toml): go on with it by raypar train --resume {run} (in Python launch(run, "
        f"resume={str(run)!r})), replace it with "
        "--overwrite (overwrite=True), or give another folder",
    )
    assert taken in [f"folder {str(run)!r} holds a run {rest}" for rest in reported]
    assert faults_of(tiny(folder=str(run)), resume=trained[0] / "step-00000003") in (
        [f"folder {str(run)!r} holds a run {reported[0]}"],
        [
            f"folder {str(trained[0])!r} has 'step-00000006', and this run begins at step 4: resume from it "
            "(end the run that writes there first, if one does), or give another folder"
        ],
    )


def test_a_folder_that_can_not_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    assert "is no folder: give another path" in faults_of(tiny(folder=str(tmp_path / "file")))[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert "has checkpoints, which is no folder: remove it" in faults_of(tiny(folder=str(tmp_path / "run")))[0]
    assert faults_of(tiny(save_every=3)) == [
        "save_every is 3, but there is no folder for checkpoints: leave save_every out, or give folder"
    ]
