"""What verify does with a difference beyond its bound: it asks float64."""

from __future__ import annotations

import logging
import random
import threading

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.parity.reference import in_float64, train_plainly
from raypar.parity.verify import verify
from tests.support.own_models import fault_missed, run_of, wrongly_judged
from tests.support.thread_jobs import TeamJob


class Addends:
    """Targets whose sum over microbatches is little, unless some ``more`` is added."""

    def __init__(self, more=0.0):
        self._more = more

    def __call__(self, step, microbatch, dp):
        x = torch.rand(3, 4, generator=torch.Generator().manual_seed(10 * step + 4 * dp + microbatch))
        return x, torch.full((3, 1), (100.1, 33.37, -77.7, -55.76)[2 * microbatch + dp] + self._more)


def run_with(fn, loss=nn.functional.mse_loss, data=None, **changes):
    fields = {"model": rp.Layers(fn, loss), "mesh": rp.Mesh(pp=2, dp=2), "data": rp.Batches(data or Addends())}
    return rp.Run(**fields | {"optim": rp.SGD(lr=1e-6), "microbatches": 2, "steps": 1, "timeout": 20.0} | changes)


def cancelling():
    return [nn.Linear(4, 4), nn.Linear(4, 1)]


def judged(run):
    job = TeamJob(run)
    try:
        return verify(run, job)
    finally:
        job.close()


def test_addends_that_cancel_are_no_fault():
    verdict = judged(run_with(cancelling))
    assert verdict.ok, str(verdict)
    beside = [one for one in verdict.differences if one.beside]
    assert beside, "without a difference beyond its bound this proves nothing"
    assert "by float32's rounding alone; nearest to being wrong: " in str(verdict)
    assert "from float64, and rounding is " in str(verdict)


class Loses(nn.Linear):
    """A layer that is wrong by little where it is not in the plain process."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.dtype == torch.float64 or not threaded() else y * (1 + 3e-5)


def threaded():
    """Whether an actor calls, and not the plain process, which computes each replica in a thread of that name."""
    now = threading.current_thread()
    return now is not threading.main_thread() and not now.name.startswith("replica ")


def test_a_small_fault_is_one():
    verdict = judged(run_with(lambda: [nn.Linear(4, 4), Loses(4, 1)], data=Addends(50.0)))
    assert not verdict.ok
    assert str(verdict).count("of its norm from float64, and rounding is ") == 1
    assert verdict.diagnosis.place == "output of layers.1 in microbatch 0, forward"


def test_what_cannot_run_in_float64_keeps_the_bounds(caplog):
    caplog.set_level(logging.INFO, "raypar")

    class Single(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    verdict = judged(run_with(lambda: [Single(4, 4), nn.Linear(4, 1)]))
    assert not verdict.ok
    assert not any(one.beside for one in verdict.differences)
    assert "the model can't run in float64 (RuntimeError: " in caplog.text


class Counts(nn.Module):
    """What it returns depends on how often it was called: another order of microbatches is another run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


def test_an_order_that_changes_a_state_is_no_rounding():
    run = run_with(lambda: [nn.Linear(4, 4), Counts(), nn.Linear(4, 1)], mesh=rp.Mesh())
    assert train_plainly(run).forwards != train_plainly(run, [1, 0]).forwards
    assert judged(run).bitwise


def test_random_numbers_are_the_same():
    def drawn():
        torch.manual_seed(3)
        like = torch.zeros(4, 5, dtype=torch.get_default_dtype())
        yield torch.rand(5)
        yield torch.empty(4).normal_()
        yield torch.rand_like(like)
        yield nn.functional.dropout(like + 1, 0.5)
        yield nn.functional.scaled_dot_product_attention(*[like[None] + 1] * 3, dropout_p=0.5)
        yield torch.distributions.Gamma(like + 1, like + 1).rsample()
        yield torch.randperm(9)
        yield torch.multinomial(like + 1, 3)

    single = [*drawn()]
    with in_float64():
        double = [*drawn()]
    assert torch.get_default_dtype() == torch.float32
    for one, other in zip(single, double, strict=True):
        assert other.dtype == (torch.float64 if one.is_floating_point() else torch.int64)
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=0)


def test_layers_with_dropout_compute_the_same_in_float64():
    run = run_with(lambda: [nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)], mesh=rp.Mesh(), data=Addends(50.0))
    single, double = train_plainly(run), train_plainly(run, exact=True)
    assert double.weights["layers.0.weight"].dtype == torch.float64
    assert single.forwards == pytest.approx(double.forwards, rel=1e-5)
    assert single.forwards != double.forwards


@pytest.mark.parametrize("seed", range(8))
def test_no_random_model_is_called_wrong(seed):
    draw = random.Random(seed)
    assert wrongly_judged(run_of(draw), draw)[0] is None


@pytest.mark.parametrize("seed", range(4))
def test_no_random_fault_is_missed(seed):
    draw = random.Random(seed)
    assert fault_missed(run_of(draw, dropout=False), draw)[0] is None
