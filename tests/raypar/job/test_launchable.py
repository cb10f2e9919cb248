"""One check of a run: what ``rp.faults`` lists is what a launch refuses, before anything else happens with the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cli.train import train as commands
from raypar.config.fields import field_faults, right_fields
from raypar.config.rules import Examined, UnsoundError, faults_by, guarded
from raypar.config.run import check_run
from raypar.job.launch import launch
from raypar.job.start.launchable import check_launch

LARGE = rp.GPT(layers=200, hidden=65536, heads=64)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return rp.Text(str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))


def test_a_run_that_is_too_large_for_this_machine_has_the_fault_that_a_launch_raises(text):
    run = rp.Run(model=LARGE, data=text, device="cpu")
    (fault,) = rp.faults(run)
    assert fault.startswith("memory: weights, gradients and optimizer state of all 1 actors take ")
    with pytest.raises(rp.ConfigError) as error:
        launch(run)
    assert error.value.faults == [fault]


@pytest.mark.parametrize("changes", [{"model": LARGE}, {"token_slices": 2, "compile": True}, {"steps": 0}])
def test_no_data_are_converted_for_a_run_that_is_refused(changes, text, tmp_path, monkeypatch):
    converted = []
    monkeypatch.setattr("raypar.job.launch.convert_on_cluster", converted.append)
    monkeypatch.setattr(commands, "convert_data", converted.append)
    run = replace(rp.recipe("gpt-tiny", data=text, device="cpu"), **changes)
    with pytest.raises(rp.ConfigError):
        launch(run)
    assert rp.faults(run)
    assert not converted and not (tmp_path / "cache").exists()


def test_data_are_converted_once_for_a_run_that_is_sound(text):
    converted = []
    check_launch(rp.recipe("gpt-tiny", data=text), convert=converted.append)
    assert len(converted) == 1


def test_the_functions_of_users_are_built_once():
    built = []

    def layers():
        built.append(1)
        return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]

    def batch(step, microbatch, dp):
        return torch.zeros(2, 4), torch.zeros(2, 4)

    model = rp.Layers(layers, nn.functional.mse_loss, skips=((0, 2),))
    check_run(rp.Run(model=model, data=rp.Batches(batch), mesh=rp.Mesh(pp=2), schedule="zb-1p"))
    assert len(built) == 1


def test_a_rule_ends_where_it_reads_a_wrong_field():
    run = rp.Run(model=rp.GPT(layers=-1, hidden=16, heads=2), steps="many", mesh=rp.Mesh(dp=2))
    right = right_fields([*field_faults(run)])
    seen = guarded(run, right)
    assert isinstance(seen.model, rp.GPT) and seen.model.hidden == 16 and seen.mesh is run.mesh
    for read in (lambda one: one.model.layers, lambda one: one.steps, lambda one: replace(one, seed=1)):
        with pytest.raises(UnsoundError):
            read(seen)

    def rule(examined):
        yield "before"
        yield f"{examined.run.steps} after"

    assert [*faults_by([rule, lambda examined: [examined.run.seed]], Examined(seen, right, None))] == ["before", 0]
