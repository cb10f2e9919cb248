"""Replicas and parameter servers on real actors."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import raypar as rp
from raypar.reporting.summary import closing_rows
from raypar.schedules import chrome_trace, text
from raypar.schedules.action import Action
from raypar.schedules.simulation.simulate import simulate
from tests.support.plain import trained
from tests.support.thinned import thinned

MESH = rp.Mesh(pp=2, dp=2)

pytestmark = pytest.mark.usefixtures("plain_once")


def tiny(**changes):
    run = rp.recipe("gpt-tiny")
    assert run.model.dropout > 0, "its seeds must not depend on the layout"
    text = rp.Text(argparse.__file__)  # opened by every actor for every run: one file and not the whole library
    return replace(run, **{"mesh": MESH, "steps": 3, "bucket_mb": 0.05, "data": text} | changes)


MODES = {"zero": {}, "all_reduce": {"zero": 0}, "parameter_server": {"data_parallel": "parameter_server"}}


@pytest.fixture(scope="module", params=thinned(MODES, lambda mode: mode != "all_reduce"))
def job(request, job_on, job_of):
    job_on(6)  # as many as the last mode needs: they are launched once
    return job_of(tiny(**MODES[request.param]))


def run_of(job, **changes):
    return tiny(data_parallel=job.run.data_parallel, zero=job.run.zero, **changes)


@pytest.mark.parametrize("schedule", thinned(["gpipe", "1f1b"], lambda name: name == "1f1b"))
def test_one_microbatch_a_replica_is_bitwise(job, schedule):
    verdict = rp.verify(run_of(job, schedule=schedule, microbatches=1), job)
    assert verdict.bitwise, str(verdict)
    assert (verdict.steps, verdict.gradients, verdict.weights) == (3, 109, 109)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", thinned(["naive", "gpipe", "1f1b", "interleaved"], lambda name: name == "interleaved")
)
def test_more_microbatches_are_one_process_within_rounding(job, schedule):
    verdict = rp.verify(run_of(job, schedule=schedule), job)
    assert verdict.ok, str(verdict)
    close = [difference for difference in verdict.differences if not difference.what.startswith("weight")]
    assert all(difference.allowed == 1e-6 for difference in close)
    assert len(set(verdict.losses)) == 3, "a run whose loss never moves proves nothing"


@pytest.mark.long
def test_a_changed_replica_is_found(job_on, monkeypatch):
    """The comparison can fail: one process with other seeds for dropout is not equal."""
    run = tiny(microbatches=1)
    plain = trained(replace(run, seed=1))
    monkeypatch.setattr("raypar.parity.verify.train_plainly", lambda _: plain)
    verdict = rp.verify(run, job_on(4))
    assert not verdict.ok
    assert "differences in 3 losses" in str(verdict)


@pytest.mark.long
def test_tied_embeddings(job):
    run = run_of(job)
    verdict = rp.verify(replace(run, model=replace(run.model, tied=True)), job)
    assert verdict.ok, str(verdict)


@pytest.mark.sampled
def test_replicas_stay_equal_and_a_stepped_step_is_a_compiled_one(job):
    job.reset(run_of(job))
    compiled = [job.step() for _ in range(2)]
    first, second = dict(job.weights(0)), dict(job.weights(1))
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    job.reset(run_of(job))
    stepped = []
    for _ in range(2):
        stepper = job.stepper()
        stepper.next()
        assert Action.parse("0REDUCE_GRAD") in stepper.run_to("0REDUCE_GRAD")
        stepped.append(stepper.finish())
    assert [(r.loss, r.grad_norm) for r in stepped] == [(r.loss, r.grad_norm) for r in compiled]
    assert all(torch.equal(weight, first[name]) for name, weight in job.weights(1).items())


@pytest.mark.long
def test_reports_evaluation_and_looking_inside(job):
    job.reset(run_of(job, steps=5))
    before = job.evaluate()
    reports = job.train(4)
    after = job.evaluate()
    assert after.loss < before.loss
    assert after.tokens == 2 * 2 * 4 * 2 * 32
    assert [report.tokens for report in reports] == [2 * 4 * 2 * 32] * 4
    assert all(report.in_flight == simulate(job.schedule).in_flight for report in reports)
    assert all(len(report.peak_memory) == 2 for report in reports)
    assert all(0 < report.bubble < 1 for report in reports)
    served = job.run.data_parallel == "parameter_server"
    assert all(report.overlap is None if served else 0 <= report.overlap <= 1 for report in reports)
    closing = dict(closing_rows(job.run, job.schedule, reports, after, 1.0, 2.0, {}))
    assert ("reduction hidden" in closing) != served, "with servers the weights are waited for too"
    assert served or closing["reduction hidden"].endswith("% under compute (median)")
    norms = torch.stack([torch.linalg.vector_norm(job.grad(name)) for name in job.parameters])
    clipped = min(reports[-1].grad_norm, job.run.clip)
    assert float(torch.linalg.vector_norm(norms)) == pytest.approx(clipped, rel=1e-4)
    assert torch.equal(job.param("blocks.3.mlp.up.weight"), dict(job.weights(1))["blocks.3.mlp.up.weight"])
    with pytest.raises(KeyError, match="did you mean"):
        job.grad("blocks.3.mlp.up.wieght")


def test_a_timeline_shows_one_replica_and_the_trace_all_actors(job):
    job.reset(run_of(job))
    job.step()
    for dp in range(2):
        timeline = job.timeline(dp)
        assert {event.actor for event in timeline.events} == {f"pp={pp} dp={dp}" for pp in range(2)}
        assert timeline.in_flight == simulate(job.schedule).in_flight
        assert "B3" in text(timeline, width=None)
        assert job.overlay(dp).measured == timeline
        assert "bucket 0" in rp.schedules.svg(timeline)
    with pytest.raises(ValueError, match=r"no replica dp=2: the mesh has 2"):
        job.timeline(2)
    events = json.loads(json.dumps(chrome_trace(*job.timelines())))["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    servers = {"server 0 of pp=0", "server 0 of pp=1"} if job.run.data_parallel == "parameter_server" else set()
    assert named == {f"pp={pp} dp={dp}" for pp in range(2) for dp in range(2)} | servers
    assert len({event["pid"] for event in events}) == len(named)
    slices = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in slices) == 0
    lanes = {}
    for event in slices:
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) > len(named), "buckets have lanes of their own"
    for spans in lanes.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        outer = [span for span in spans if not any(one != span and _is_within(span, one) for one in spans)]
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(outer)), "slices of a track overlap"
    buckets = [event for event in slices if "bucket" in event["name"]]
    assert min(event["tid"] for event in buckets) == 1
    assert all(event["cat"] == "communication" and event["args"]["bytes"] > 0 for event in buckets)
    assert {event["tid"] for event in slices if "bucket" not in event["name"]} == {0}
    arrows = [event for event in events if event["ph"] == "s"]
    assert len({event["id"] for event in arrows}) == len(arrows) == 2 * 2 * 4


def _is_within(span, other):
    """Whether a slice is inside of another one, as communication is inside of its action."""
    return other[0] - 1e-3 <= span[0] and span[1] <= other[1] + 1e-3


@pytest.mark.long
def test_actors_take_any_part_in_the_runs_that_they_are_enough_for(job_on):
    """A server of one run is a worker of the next, and idle in that after it."""
    job, served = job_on(4), tiny(mesh=rp.Mesh(dp=3), data_parallel="parameter_server")
    for run, labels in (
        (served, 4),
        (tiny(), 4),
        (tiny(mesh=rp.Mesh()), 1),
        (tiny(mesh=rp.Mesh(tp=4)), 4),
        (served, 4),
    ):
        job.reset(run)
        assert job.step().step == 0
        assert len(job.ledger()) == labels
    with pytest.raises(rp.ConfigError, match=r"reset: mesh: 32 actors are needed, \d+ more than there are, and no"):
        job.reset(tiny(mesh=rp.Mesh(pp=4, dp=8)))
    assert job.step().step == 1, "it goes on"
