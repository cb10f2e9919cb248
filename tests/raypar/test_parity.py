"""The layout computes what one plain process computes: bitwise where the additions happen in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.parity import relative_error, train_plainly
from raypar.schedules.catalog import build

STEPS = 5
MICROBATCHES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def jobs(cluster):
    """One job a pipeline depth; the tests give its actors one run after the other."""
    open_jobs = {}

    def job(pp):
        for other in [depth for depth in open_jobs if depth != pp]:
            open_jobs.pop(other).close()
        if pp not in open_jobs:
            open_jobs[pp] = rp.launch(tiny(pp))
        return open_jobs[pp]

    yield job
    for one in open_jobs.values():
        one.close()


def tiny(pp, **changes):
    run = rp.recipe("gpt-tiny")
    assert run.model.dropout > 0
    assert run.clip is not None
    assert isinstance(run.optim, rp.AdamW)
    return replace(run, mesh=rp.Mesh(pp=pp), steps=STEPS, **changes)


def allowed(schedule, pp):
    for m in MICROBATCHES:
        try:
            build(schedule, pp, m)
        except ValueError:
            continue
        yield m


CASES = [
    (pp, schedule, m)
    for pp in (1, 2, 3, 4)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    for m in allowed(schedule, pp)
]


def test_the_cases_cover_what_the_schedules_allow():
    assert len(CASES) == 57
    assert {(pp, m) for pp, schedule, m in CASES if schedule == "1f1b"} == {
        (p, m) for p in (1, 2, 3, 4) for m in MICROBATCHES
    }


@pytest.mark.parametrize(("pp", "schedule", "m"), CASES)
def test_bitwise_equal_to_one_plain_process(jobs, pp, schedule, m):
    verdict = rp.verify(tiny(pp, schedule=schedule, microbatches=m), jobs(pp))
    assert verdict.bitwise, str(verdict)
    assert verdict.steps == STEPS
    assert verdict.weights == 93
    assert len(set(verdict.losses)) == STEPS, "a run whose loss never moves proves nothing"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_recomputing_changes_no_bit(jobs, schedule):
    verdict = rp.verify(tiny(2, schedule=schedule, recompute="full"), jobs(2))
    assert verdict.bitwise, str(verdict)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved"])
def test_stepped_equals_compiled(jobs, schedule):
    job, run = jobs(2), tiny(2, schedule=schedule)
    job.reset(run)
    compiled = [job.step() for _ in range(3)]
    weights = dict(job.weights())
    job.reset(run)
    stepped = []
    for _ in range(3):
        stepper = job.stepper()
        stepper.next()
        stepper.run_to("1B0")
        stepped.append(stepper.finish())
    assert [(r.loss, r.grad_norm) for r in stepped] == [(r.loss, r.grad_norm) for r in compiled]
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights())


@pytest.mark.parametrize("pp", [2, 3])
def test_tied_embeddings(jobs, pp):
    run = tiny(pp)
    run = replace(run, model=replace(run.model, tied=True))
    verdict = rp.verify(run, jobs(pp))
    assert verdict.worst <= 1e-6, str(verdict)
    weights = {}
    for name, weight in jobs(pp).weights():
        assert torch.equal(weights.setdefault(name, weight), weight), f"the two ends of {name} drifted apart"


@pytest.mark.parametrize(("schedule", "bitwise"), [("1f1b", True), ("interleaved", False)])
def test_tied_embeddings_on_one_rank_are_one_parameter(jobs, schedule, bitwise):
    """In one stage autograd adds as one process does; in two, the head's gradient is added before the embedding's."""
    run = tiny(1, schedule=schedule)
    run = replace(run, model=replace(run.model, tied=True))
    verdict = rp.verify(run, jobs(1))
    assert verdict.bitwise == bitwise
    assert verdict.worst <= 1e-6, str(verdict)
    assert "head.out.weight" not in dict(jobs(1).weights())


def test_the_layout_does_not_change_the_initial_weights(jobs):
    first = {}
    for pp, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "interleaved"), (4, "1f1b")):
        job = jobs(pp)
        job.reset(tiny(pp, schedule=schedule))
        weights = dict(job.weights())
        first = first or weights
        assert weights.keys() == first.keys()
        assert all(torch.equal(weight, first[name]) for name, weight in weights.items())


@pytest.mark.parametrize("split", ["balanced", (1, 7), (5, 3)])
def test_any_split_of_the_layers(jobs, split):
    verdict = rp.verify(tiny(2, split=split), jobs(2))
    assert verdict.bitwise, str(verdict)


def test_a_changed_weight_is_found(jobs, monkeypatch):
    """The comparison can fail: a plain process with another seed for dropout is not equal."""
    run = tiny(2)
    plain = train_plainly(replace(run, seed=1))
    monkeypatch.setattr("raypar.parity.train_plainly", lambda _: plain)
    verdict = rp.verify(run, jobs(2))
    assert not verdict.bitwise
    assert verdict.worst > 1e-3
    assert "loss of step 0" in str(verdict)


def test_sgd_without_clipping(jobs):
    verdict = rp.verify(tiny(2, optim=rp.SGD(lr=0.1, weight_decay=0.01), clip=None), jobs(2))
    assert verdict.bitwise, str(verdict)


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
