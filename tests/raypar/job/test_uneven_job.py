"""Pipelines of uneven ranks on Ray actors: steps, tasks, a dynamic order, evaluations, checkpoints, timelines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.specs.types import SEND_WINDOW
from raypar.parity.reference import train_plainly
from raypar.schedules import check

RUN = replace(rp.recipe("gpt-tiny", microbatches=4, steps=2), device="cpu")
RUN = replace(RUN, model=replace(RUN.model, tied=False), mesh=rp.Mesh(pp=2, rank_dp=(1, 2), rank_tp=(2, 1)))


@pytest.mark.long
def test_uneven_ranks_train_save_and_go_on_in_another_layout(job_of, tmp_path):
    plain, job = train_plainly(RUN), job_of(RUN)
    reports = job.train()
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-5)
    evaluation, weights = job.evaluate(1), dict(job.weights())
    assert evaluation.tokens == RUN.microbatches * RUN.micro_batch_size * RUN.model.seq
    labels = ["pp=0 tp=0", "pp=0 tp=1", "pp=1 dp=0", "pp=1 dp=1"]
    assert [*job.memory()] == [*job.ledger()] == labels
    timeline = job.timeline()
    assert {event.actor for event in timeline.events} == {labels[0], *labels[2:]}, "of a tensor group the first"
    assert "rank 1.1" in repr(timeline)
    saved = job.save(tmp_path)
    for executor in ("tasks", "dynamic"):
        run = replace(RUN, executor="tasks", order="dynamic" if executor == "dynamic" else "row")
        other = job_of(run)
        assert [report.loss for report in other.train()] == pytest.approx([r.loss for r in reports], rel=1e-6)
        if executor == "tasks":
            assert all(torch.equal(weight, weights[name]) for name, weight in other.weights().items())
        else:
            check(other.timeline().happened, send_capacity=SEND_WINDOW)
    whole = replace(RUN, mesh=rp.Mesh(pp=2), steps=3)
    job = job_of(whole)
    job.reset(whole, resume=saved)
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights().items())
    (after,) = job.train()
    back = replace(RUN, steps=3)
    job.reset(back, resume=saved)
    assert [report.loss for report in job.train()] == pytest.approx([after.loss], rel=1e-5)
