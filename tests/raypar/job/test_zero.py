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


def test_tied_weights_whose_ends_are_in_parts(job_on):
    run = tiny(schedule="interleaved", microbatches=2)
    verdict = rp.verify(replace(run, model=replace(run.model, tied=True)), job_on(4))
    assert verdict.ok, str(verdict)


def test_a_gradient_comes_from_all_that_have_parts_of_it(job_of):
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
    served = tiny(zero=None, data_parallel="parameter_server", zero_reduce="microbatch", zero_units=2)
    assert rp.faults(served) == [
        "zero_reduce is 'microbatch', but data_parallel is 'parameter_server': servers shard nothing, leave it out",
        "zero_units is 2, but data_parallel is 'parameter_server': servers shard nothing, leave it out",
    ]


@pytest.mark.parametrize("zero", [4, -1, "1"])
def test_there_are_levels_0_to_3(zero):
    with pytest.raises(rp.ConfigError, match="zero"):
        rp.launch(tiny(zero=zero))


def test_what_has_nothing_to_do_is_refused_with_all_that_is_wrong():
    run = tiny(mesh=rp.Mesh(pp=2), zero=3, zero_resident=1)
    assert rp.faults(run) == [
        "zero is 3, but there is one replica to share out to: set mesh.dp (or mesh.cp) to 2 or more, or leave zero out",
        "zero_resident is 1, but zero_gather is 'microbatch', which frees weights after every action: leave "
        "zero_resident out, or set zero_gather to 'step'",
    ]
    assert rp.faults(tiny(zero=1, zero_units=2)) == [
        "zero_units is 2, but zero is 1: only zero 3 and offload 'parameters' gather weights, leave it out"
    ]
    assert rp.faults(tiny(mesh=rp.Mesh(dp=4, shard=3), zero=2)) == [
        "mesh.shard is 3, which does not divide 4 replicas (dp x cp): set it to 2, say"
    ]


@pytest.mark.long
def test_sharded_weights_are_stepped_by_hand_saved_and_resumed(job_of, tmp_path):
    """On real actors, which hold only what they own; the numbers are those of level 1 to the bit."""
    run = tiny(zero=3, zero_reduce="step")
    job = job_of(run)
    by_hand = job.stepper()
    by_hand.run(7)
    by_hand.rewind()
    by_hand.finish()
    saved = job.save(tmp_path / "saved")
    losses = [job.step().loss, job.step().loss]
    weights = {name: weight.clone() for name, weight in job.weights().items()}
    assert weights.keys() == set(job.parameters)
    assert all(job.param(name).equal(weights[name]) for name in list(weights)[:3])
    for changes in ({"zero": 1, "zero_reduce": None}, {"mesh": rp.Mesh(pp=2, dp=2, shard=None), "zero": 2}):
        job.reset(replace(run, **changes), resume=saved)
        assert [job.step().loss, job.step().loss] == losses
        assert all(weight.equal(weights[name]) for name, weight in job.weights().items())


@pytest.mark.sampled
@pytest.mark.parametrize("changes", [{"zero": 3, "schedule": "interleaved"}, {"zero": 2, "offload": "optimizer"}])
def test_verify_says_that_what_is_sharded_or_offloaded_computes_what_one_process_does(job_on, changes):
    verdict = rp.verify(tiny(**changes), job_on(4))
    assert verdict.ok, str(verdict)


@pytest.mark.long
def test_a_schedule_that_takes_over_gathers_and_reduces_what_is_left(job_of):
    """The new rows get the run's gathers and reductions, and know what the step has gathered and reduced already."""
    job = job_of(tiny(zero=3, backward="whole"))
    stepper = job.stepper()
    stepper.run_to("0B0")
    stepper.swap("gpipe")
    assert {"1UNSHARD", "1RESHARD", "0REDUCE_GRAD"} <= set(map(str, stepper.left))
    swapped = stepper.finish()
    job.reset(tiny(zero=3, backward="whole"))
    assert job.step().loss == swapped.loss
