"""Initial values on real actors: sent once when a run begins, and never when trained weights are loaded."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from tests.support.full_cluster import wait_for_actors, without_room

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=8)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(dp=2), zero=3, microbatches=2, steps=9, max_failures=9, timeout=20.0)
COMPARED = {"all_gather"}  # digests of weights


def launched(job):
    """The operations with which the actors of a job have launched."""
    return {op for table in job.ledger().values() for axis, op in table if axis == "launch"}


@pytest.mark.long
def test_a_launch_sends_values_and_a_recovery_a_relayout_and_a_resumed_run_none(tmp_path):
    with rp.launch(RUN, chaos=[rp.chaos.kill("dp=1", at="0F0", step=2)]) as job:
        assert launched(job) == {"all_to_all"} | COMPARED, "spans, of which no digests are compared"
        losses = [report.loss for report in job.train(3)]
        assert [failure.back_to for failure in job.failures] == [1]
        assert launched(job) == COMPARED
        job.relayout(zero=1)
        assert launched(job) == COMPARED
        saved = job.save(tmp_path / "saved")
        more = [report.loss for report in job.train(2)]
        job.reset(RUN, resume=saved)
        assert launched(job) == COMPARED
        assert [report.loss for report in job.train(2)] == more
        job.reset(replace(RUN, zero=1))
        assert launched(job) == {"broadcast"} | COMPARED
        assert [report.loss for report in job.train(3)] == losses


@pytest.mark.long
def test_a_run_whose_snapshots_are_lost_begins_with_its_initial_values_again(monkeypatch):
    monkeypatch.setattr("raypar.job.recover.snapshots.Snapshots.common", lambda *_: None)
    with rp.launch(RUN, chaos=[rp.chaos.kill("dp=1", at="0F0", step=3)]) as job:
        losses = [report.loss for report in job.train(4)]
        assert [failure.back_to for failure in job.failures] == [0]
        assert launched(job) == {"all_to_all"} | COMPARED
        job.reset(RUN)
        assert [report.loss for report in job.train(4)] == losses


@pytest.mark.long
def test_replicas_that_are_lost_and_come_back_are_sent_none(monkeypatch):
    monkeypatch.setattr("raypar.job.recover.restarts._LOOK", 0.0)
    seen = []
    with rp.launch(RUN, chaos=[rp.chaos.kill("dp=1", at="STEP", step=3)]) as job, without_room() as cluster:

        def watch(report):
            if report.step == 5:
                cluster.make_room()
                wait_for_actors(job, 2)
            seen.append((job.run.mesh.dp, job.schedule.num_microbatches, launched(job)))

        job.train(on=watch)
    assert seen[0] == (2, 2, {"all_to_all"} | COMPARED)
    assert (2, 4, set()) in seen, "one replica is left, with all microbatches"
    assert seen[-1] == (2, 2, COMPARED)


def batch(step, microbatch, dp):
    return torch.ones(2, 4), torch.ones(2, 4)


def test_an_actor_that_dies_before_it_has_sent_its_values_ends_the_launch_and_is_named(tmp_path):
    driver, marker = os.getpid(), str(tmp_path / "dead")

    def layers():
        with suppress(FileExistsError):
            if os.getpid() != driver:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))  # the first actor; the other one waits for it
                os.kill(os.getpid(), signal.SIGKILL)
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    model = rp.Layers(layers, nn.functional.mse_loss)
    with pytest.raises(rp.JobError, match=r"dp=[01]\b.* died"):
        rp.launch(replace(RUN, model=model, data=rp.Batches(batch), max_failures=0))
