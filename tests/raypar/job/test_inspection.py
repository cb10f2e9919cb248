"""Looking at weights by name, over actors that are threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from tests.support.thread_jobs import TeamJob


def frozen(width):
    layer = nn.Linear(4, width)
    layer.bias.requires_grad_(False)
    return layer


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


RUN = rp.Run(
    model=rp.Layers(lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4), frozen(2)], loss=nn.functional.mse_loss),
    mesh=rp.Mesh(pp=3, dp=2),
    data=rp.Batches(batch),
    steps=2,
)
TIED = replace(rp.recipe("gpt-tiny"), model=rp.GPT(layers=2, hidden=16, heads=2, seq=16, tied=True), steps=1)


@pytest.fixture(scope="module")
def job():
    one = TeamJob(RUN)
    one.step()
    yield one
    one.close()


def test_weights_are_a_mapping(job):
    weights = job.weights()
    assert [*weights] == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.weight"]
    assert len(weights) == 5 and "layers.0.bias" in weights and "layers.2.bias" not in weights
    assert dict(weights).keys() == dict(weights.items()).keys() == set(weights)
    assert all(torch.equal(weight, job.param(name)) for name, weight in weights.items())
    assert [weight.shape for weight in weights.values()] == [job.parameters[name] for name in weights]
    assert "layers.2.weight (2, 4)" in repr(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights(1).items()), "replicas are the same"


def test_a_look_shows_the_weights_of_now(job):
    weights = job.weights()
    before = weights["layers.0.weight"].clone()
    job.step()
    assert not torch.equal(weights["layers.0.weight"], before)


def test_a_tied_weight_has_one_name_and_two_ends(job):
    tied = TeamJob(TIED)
    try:
        weights = tied.weights()
        ends = [name for name, _ in weights.ends()]
        assert "head.out.weight" not in weights
        assert sorted({*ends}) == sorted(weights) and len(ends) == len(weights) + 1
        assert len([*weights.items()]) == len(weights) == len([*weights.values()])
    finally:
        tied.close()


def test_a_frozen_parameter_and_a_buffer_can_be_seen(job):
    assert job.param("layers.2.bias").shape == (2,)
    assert job.param("layers.1.running_mean").abs().sum() > 0
    assert job.param("layers.1.num_batches_tracked") > 0


@pytest.mark.parametrize(
    ("look", "says"),
    [
        (lambda job: job.param("layers.0.wieght"), "did you mean layers.0.weight or .*[?]"),
        (lambda job: job.param("layers.1.runing_mean"), "did you mean layers.1.running_mean.*[?]"),
        (lambda job: job.weights()["layers.0.wieght"], "did you mean layers.0.weight.*[?]"),
        (lambda job: job.weights()["zzz"], "see job.parameters"),
        (lambda job: job.grad("layers.1.running_mean"), "is a frozen parameter or a buffer: it has no gradient"),
    ],
)
def test_a_name_that_is_not_there_is_guessed(job, look, says):
    with pytest.raises(KeyError, match=says):
        look(job)


def test_a_replica_that_is_not_there_is_told(job):
    with pytest.raises(ValueError, match="there is no replica dp=2: the mesh has 2"):
        job.weights(2)
