"""Half precision on real actors: masters, checkpoints with the scale, and steps that are skipped or rewound."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp

pytestmark = pytest.mark.usefixtures("by_value")


def tiny(**changes):
    fields = {"mesh": rp.Mesh(pp=2), "steps": 4, "microbatches": 2, "data": rp.Text(argparse.__file__)}
    return replace(rp.recipe("gpt-tiny"), **(fields | changes))


def test_masters_come_from_their_owners_and_layers_from_a_replica(job_of):
    job = job_of(tiny(mesh=rp.Mesh(dp=2), precision=rp.Precision("bf16")))
    job.step()
    masters, layers = dict(job.weights().items()), dict(job.weights(1).items())
    assert masters.keys() == layers.keys() == set(job.parameters)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), layers[name])
        assert torch.equal(job.param(name), master)


@pytest.mark.long
def test_a_resumed_run_has_the_bits_and_the_scale_and_any_precision_reads_it(job_on, tmp_path):
    scale = rp.LossScale(init=4.0, window=1)
    run = tiny(precision=rp.Precision("fp16"), loss_scale=scale, mesh=rp.Mesh(pp=2, dp=2))
    job = job_on(4)
    job.reset(run)
    job.train(2)
    saved = job.save(tmp_path / "checkpoints")
    rest = job.train()
    assert [report.loss_scale for report in rest] == [16.0, 32.0]
    whole = dict(job.weights().items())
    job.reset(replace(run, mesh=rp.Mesh(dp=2)), resume=saved)
    again = job.train()
    assert [report.loss_scale for report in again] == [16.0, 32.0]
    assert [report.loss for report in again] == pytest.approx([report.loss for report in rest], rel=1e-3)
    job.reset(run, resume=saved)
    assert [report.loss for report in job.train()] == [report.loss for report in rest]
    assert all(torch.equal(weight, whole[name]) for name, weight in job.weights().items())
    job.reset(tiny(), resume=saved)
    assert job.step().loss == pytest.approx(rest[0].loss, rel=0.01)


BAD = 3


def data_of(bad, left_out=None):
    def data(step, microbatch, dp):
        if left_out is not None and step >= left_out.start:
            step += len(left_out)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
        return x / 0.0 if step == bad else x, x.sin()

    return rp.Batches(data)


def own(data, **changes):
    model = rp.Layers(lambda: [nn.Linear(4, 8), nn.Linear(8, 4)], nn.functional.mse_loss)
    fields = {"model": model, "data": data, "mesh": rp.Mesh(pp=2), "microbatches": 2, "steps": 6}
    return rp.Run(optim=rp.SGD(lr=0.1), **fields, **changes)


def test_a_bad_step_is_skipped(job_of):
    reports = job_of(own(data_of(BAD), nonfinite="skip")).train()
    assert [report.skipped for report in reports] == [number == BAD for number in range(6)]
    assert reports[BAD].lr == 0.0


def test_a_bad_step_is_rewound_and_the_data_since_the_checkpoint_left_out(job_of, tmp_path):
    job = job_of(own(data_of(BAD), nonfinite="rewind", folder=str(tmp_path / "run"), save_every=2))
    reports = job.train()
    assert [report.step for report in reports] == [0, 1, 2, 3, 4, 5]
    found = dict(job.weights().items())
    job.reset(own(data_of(None, left_out=range(2, 4))))
    job.train()
    assert all(torch.equal(weight, found[name]) for name, weight in job.weights().items())
