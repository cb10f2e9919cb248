"""Layers divided over real actors: verified against one plain process, looked into, saved and resumed."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.errors import ConfigError
from tests.support.plain import trained

pytestmark = pytest.mark.usefixtures("plain_once")


def tiny(tp, pp=1, dp=1, **changes):
    run = rp.recipe("gpt-tiny")
    assert run.model.dropout > 0, "its masks must not depend on the layout"
    text = rp.Text(argparse.__file__)  # opened by every actor for every run: one file and not the whole library
    return replace(run, **{"mesh": rp.Mesh(pp=pp, dp=dp, tp=tp), "steps": 3, "data": text} | changes)


LAYOUTS = [
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"tp": 2, "recompute": "selective"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_is_one_plain_process_within_the_bounds(job_on, layout):
    run = tiny(**layout)
    verdict = rp.verify(run, job_on(run.mesh.size))
    assert verdict.ok, str(verdict)
    assert not verdict.bitwise
    assert {one.allowed for one in verdict.differences} <= {1e-5, 5e-6, 1e-3}
    assert len(set(verdict.losses)) == 3, "a run whose loss never moves proves nothing"


@pytest.mark.long
@pytest.mark.long
def test_a_llama_too(job_on):
    model = replace(rp.recipe("llama-tiny").model, kv_heads=1, dropout=0.1)
    run = tiny(2, model=model, sequence_parallel=True)
    verdict = rp.verify(run, job_on(run.mesh.size))
    assert verdict.ok, str(verdict)
    assert not verdict.bitwise


@pytest.mark.long
@pytest.mark.long
def test_a_square_too(job_on):
    run = tiny("2d:2x2", model=replace(rp.recipe("gpt-tiny").model, layers=2), steps=2, recompute="full")
    verdict = rp.verify(run, job_on(run.mesh.size))
    assert verdict.ok, str(verdict)
    assert not verdict.bitwise


@pytest.mark.long
def test_a_lost_mask_is_found(job_on, monkeypatch):
    """The comparison can fail: one process with other dropout is not equal."""
    plain = trained(replace(tiny(2), seed=1))
    monkeypatch.setattr("raypar.parity.verify.train_plainly", lambda _: plain)
    assert not rp.verify(tiny(2), job_on(2)).ok


def test_what_is_divided_is_seen_whole(job_of):
    job, plain = job_of(tiny(2, steps=1)), trained(tiny(2, steps=1))
    job.step()
    assert job.parameters == {name: tuple(weight.shape) for name, weight in plain.weights.items()}
    name = "blocks.3.mlp.down.weight"
    torch.testing.assert_close(job.grad(name), plain.gradients[name])
    assert torch.equal(job.param(name), dict(job.weights())[name])
    assert job.parameters[name] == tuple(job.param(name).shape)
    assert list(job.ledger()) == ["pp=0 tp=0", "pp=0 tp=1"]
    assert job.evaluate(1).tokens == job.run.microbatches * job.run.micro_batch_size * job.run.model.seq


@pytest.mark.long
@pytest.mark.long
def test_a_step_by_hand_has_the_bits_of_a_compiled_one(job_of):
    run = tiny(2)
    job = job_of(run)
    compiled = [job.step() for _ in range(2)]
    job.reset(run)
    for wanted in compiled:
        stepper = job.stepper()
        stepper.next()
        seen = stepper.peek("0F0")
        stepper.rewind()
        assert stepper.finish().loss == wanted.loss
        assert seen.finite
    stepper = job.stepper()
    with pytest.raises(ConfigError, match=r"mesh\.tp=2 divides a stage over actors"):
        stepper.record("stage.rec", stage=0)
    stepper.abort()


@pytest.mark.long
def test_another_number_of_parts_resumes(job_of, tmp_path):
    """A run saved with tp=2 goes on alone as it would have gone on."""
    job = job_of(tiny(2, steps=5))
    job.train(steps=2)
    saved = job.save(tmp_path)
    wanted = [report.loss for report in job.train(steps=2)]
    job.reset(tiny(1, steps=5), resume=saved)
    assert job.next_step == 2
    assert [report.loss for report in job.train(steps=2)] == pytest.approx(wanted, rel=1e-5)


def samples(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    x_BSC = torch.randn(4, 6, 8, generator=generator)
    return x_BSC, x_BSC.sin().flip(-1)


def layers():
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8))
    return [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), mlp, torch.nn.Linear(8, 8)]


def test_what_a_search_divides_by_samples_and_features_too(job_on):
    """Dropout's masks are those of one process; what is annotated stays."""
    annotated = {"layers.0": "split0", "layers.2.0": "column", "layers.3": "split1"}
    model = rp.Layers(layers, torch.nn.functional.mse_loss, plan=annotated)
    run = rp.Run(model=model, data=rp.Batches(samples), mesh=rp.Mesh(tp=2), microbatches=2, steps=3)
    found = rp.plan(run, "semi").run
    assert [found.model.plan[name] for name in annotated] == ["split0 from R", "column from S0", "split1 to R"]
    verdict = rp.verify(found, job_on(2))
    assert verdict.ok, str(verdict)
    assert {one.allowed for one in verdict.differences} <= {1e-5, 5e-6, 1e-3}
