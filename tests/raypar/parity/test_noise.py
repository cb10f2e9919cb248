"""Gradients that are 0 in exact arithmetic: verify judges their rounding noise, and what AdamW makes of it, as such."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.parity import verify as parity
from raypar.parity import verify as rounding
from raypar.parity.verify import DRIFTED, train_plainly, verify
from tests.support.thread_jobs import TeamJob


class Attend(nn.Module):
    """Attention whose keys have a bias: it adds the same to all scores of a query, which their softmax takes away."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def batch(step, microbatch, dp):
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp))
    return x, x.cumsum(1).sin()


def layers():
    return [Attend() for _ in range(2)]


RUN = rp.Run(
    model=rp.Layers(layers, nn.functional.mse_loss),
    mesh=rp.Mesh(dp=2),
    data=rp.Batches(batch),
    optim=rp.AdamW(lr=3e-2),
    steps=3,
    timeout=10.0,
)


@pytest.fixture
def job():
    one = TeamJob(RUN)
    yield one
    one.close()


def test_a_bias_of_keys_may_drift(job):
    verdict = verify(RUN, job)
    assert verdict.ok, str(verdict)
    plain = train_plainly(RUN)
    apart = {name: parity.relative_error(weight, plain.weights[name]) for name, weight in job.weights().items()}
    drifted = {name for name, error in apart.items() if error > DRIFTED}
    assert drifted == {"layers.0.k.bias", "layers.1.k.bias"}, "without them this proves nothing"
    assert {one.allowed for one in verdict.differences if one.what.endswith("k.bias")} == {1.0}
    gradients = [name for name in plain.gradients if name.endswith("k.bias")]
    assert max(parity.relative_error(job.grad(name), plain.gradients[name]) for name in gradients) > 1e-3


@pytest.mark.long
def test_nothing_else_may(job, monkeypatch):
    """Neither a bias of keys that has gone further than AdamW goes, nor one of queries that has gone as far."""
    for name, far in (("layers.1.k.bias", 1.0), ("layers.0.q.bias", 0.003)):

        def moved(*args, name=name, far=far, **how):
            plain = train_plainly(*args, **how)
            return replace(plain, weights=plain.weights | {name: plain.weights[name] + far})

        for module in parity, rounding:
            monkeypatch.setattr(module, "train_plainly", moved)
        verdict = verify(RUN, job)
        assert [one.what for one in verdict.differences if not one.ok] == [f"weight {name}"]


def test_without_adam_nothing_drifts(job):
    run = replace(RUN, optim=rp.SGD(lr=0.1))
    verdict = verify(run, job)
    assert verdict.ok, str(verdict)
    assert {one.allowed for one in verdict.differences} <= {1e-6, DRIFTED}


def test_what_muon_makes_of_noise_is_judged_as_such(job):
    """Its AdamW moves the biases of keys; a matrix it can move by its rate in every singular value."""
    run = replace(RUN, optim=rp.Muon(lr=3e-2, adamw=()))
    verdict = verify(run, job)
    assert verdict.ok, str(verdict)
    assert {one.allowed for one in verdict.differences if one.what.endswith("k.bias")} == {1.0}
    matrix, bias = torch.eye(16), torch.ones(16)
    assert parity._largest_drift(run, "layers.0.k.weight", matrix) == pytest.approx(3 * 2 * 3e-2 * 1.2 * 0.2 * 4 * 4)
    assert parity._largest_drift(run, "layers.0.k.bias", bias) == pytest.approx(3 * 2 * 3e-2 * 4)


def test_a_pipeline_has_the_same_bits():
    run = replace(RUN, mesh=rp.Mesh(pp=2))
    pipeline = TeamJob(run)
    assert verify(run, pipeline).bitwise
    pipeline.close()
