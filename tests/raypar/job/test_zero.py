"""ZeRO on real actors."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

import raypar as rp


def tiny(**changes):
    text = rp.Text(argparse.__file__)  # one file and not the whole library
    fields = {"mesh": rp.Mesh(pp=2, dp=2), "steps": 3, "bucket_mb": 0.05, "zero": 1, "data": text}
    return replace(rp.recipe("gpt-tiny"), **(fields | changes))


def test_tied_weights_whose_ends_have_owners_in_different_replicas(job_on):
    run = tiny(schedule="interleaved", microbatches=2)
    verdict = rp.verify(replace(run, model=replace(run.model, tied=True)), job_on(4))
    assert verdict.ok, str(verdict)


def test_a_gradient_comes_from_the_owner_of_its_weight(job_of):
    job = job_of(tiny())
    clipped = min(job.run.clip, job.step().grad_norm)
    norms = {name: gradient.norm() for name, gradient in job.gradients().items()}
    assert norms.keys() == set(job.parameters)
    total = sum(float(norm) ** 2 for norm in norms.values()) ** 0.5
    assert total == pytest.approx(clipped, rel=1e-5), "a gradient is missing, or is there twice"


def test_servers_hold_the_optimizer_already():
    with pytest.raises(rp.ConfigError) as caught:
        rp.launch(tiny(data_parallel="parameter_server"))
    assert caught.value.faults == [
        "zero is 1, but data_parallel is 'parameter_server': servers hold the optimizer, leave zero out"
    ]


@pytest.mark.parametrize("zero", [2, -1, "1"])
def test_there_are_stages_0_and_1(zero):
    with pytest.raises(rp.ConfigError, match="zero"):
        rp.launch(tiny(zero=zero))
