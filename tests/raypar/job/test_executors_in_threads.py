"""Tasks in the order of the rows and as values arrive, over actors in threads: all schedules, skips and slices."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.parity.verify import CLOSE
from raypar.schedules.catalog import CATALOG
from tests.actors.pipeline.test_skips import UNET, batch, net
from tests.support.plain import trained
from tests.support.schedules import SYNCHRONOUS
from tests.support.team import mse
from tests.support.thread_jobs import TeamJob

STREAMS = [name for name, entry in CATALOG.items() if entry.is_stream]
GPT = rp.GPT(layers=4, hidden=16, heads=2, seq=12, vocab=256)


def agrees(run, bound=0.0, *, by_hand=False):
    """Train the run over threads and in one plain process, and compare losses, norms and weights."""
    plain, job = trained(run), TeamJob(run)
    reports = [job.stepper().finish() if by_hand else job.step() for _ in range(run.steps)]
    for report, loss, norm in zip(reports, plain.losses, plain.grad_norms, strict=True):
        assert (report.loss, report.grad_norm) == pytest.approx((loss, norm), rel=bound, abs=0)
    for name, weight in job.weights().ends():
        error = float(torch.linalg.vector_norm(weight - plain.weights[name]))
        assert error <= bound * float(torch.linalg.vector_norm(plain.weights[name])), name
    job.close()


def run_of(name, **changes):
    model = rp.Layers(net(UNET), mse, skips=UNET, halves=True)
    fields = {"model": model, "data": rp.Batches(batch), "mesh": rp.Mesh(pp=4), "microbatches": 5, "schedule": name}
    fields |= {"steps": 2, "optim": rp.SGD(lr=0.1), "clip": None, "executor": "tasks", "timeout": 20.0}
    if name == "dualpipe":  # whose two replicas of a stage sum its gradients
        fields |= {"mesh": rp.Mesh(pp=2, rank_dp=(2, 2)), "microbatches": 6}
    return rp.Run(**fields | changes)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("order", ["row", "dynamic"])
def test_skips_have_the_numbers_of_one_process(name, order):
    backward = ("whole", "auto", "split")[SYNCHRONOUS.index(name) % 3]
    is_bitwise = order == "row" and name != "dualpipe"
    agrees(run_of(name, order=order, backward=backward), bound=0.0 if is_bitwise else CLOSE)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("order", ["row", "dynamic"])
@pytest.mark.parametrize(
    "changes",
    [{"recompute": "full"}, {"mesh": rp.Mesh(pp=2, dp=2), "zero": 2}, {"mesh": rp.Mesh(pp=2, rank_dp=(2, 1))}],
    ids=str,
)
def test_skips_combine(order, changes):
    fields = {"microbatches": 4} | changes
    agrees(run_of("1f1b", order=order, **fields), bound=CLOSE)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*STREAMS, "zb-h2"])
def test_streams_have_the_bits_of_compiled_ones(name):
    found, clip = {}, None if name in STREAMS else 0.1  # of which updates are taken back
    for executor in ("compiled", "tasks"):
        job = TeamJob(run_of(name, executor=executor, flush_every=3, steps=5, clip=clip))
        results = [*job.stream(0, 3), *job.stream(3, 2)]  # the second one is flushed early
        told = [(result.losses, result.updates, result.in_flight) for result in results]
        found[executor] = told, dict(job.weights().ends())
        job.close()
    assert len(found["tasks"][0][3][0]) == 15, "each microbatch of the last stage"
    assert found["tasks"][0] == found["compiled"][0]
    assert all(torch.equal(weight, found["compiled"][1][name]) for name, weight in found["tasks"][1].items())


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("name", [*STREAMS, "zb-h2"])
@pytest.mark.parametrize("executor", ["compiled", "tasks"])
def test_the_gradients_of_a_stream_are_those_of_its_last_step(name, executor):
    changes = {"executor": executor, "backward": "whole", "clip": None if name in STREAMS else 0.1}
    once, every = (TeamJob(run_of(one, **changes, **more)) for one, more in (("1f1b", {}), (name, {"flush_every": 1})))
    once.step()
    every.stream(0, 1)
    wanted, found = once.gradients(), every.gradients()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    longer = TeamJob(run_of(name, **changes, flush_every=3))
    longer.stream(0, 3)
    found = longer.gradients()
    assert all(found[key] is not None and not torch.equal(found[key], value) for key, value in wanted.items())
    for job in (once, every, longer):
        job.close()


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("order", ["row", "dynamic"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_slices_have_the_numbers_of_whole_sequences(name, order):
    changes = {"model": GPT, "data": rp.Text(), "token_slices": 3, "mesh": rp.Mesh(pp=2), "microbatches": 2}
    agrees(run_of(name, order=order, **changes), bound=CLOSE)
