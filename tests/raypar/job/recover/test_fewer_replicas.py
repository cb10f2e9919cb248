"""A run whose replicas are lost goes on with fewer, with the same samples, and with all when there is room again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.job.start.resume import find
from raypar.paths import LOG
from raypar.reporting.html.events import happenings
from raypar.reporting.html.page import page
from raypar.reporting.run_folder.read import read
from tests.support.full_cluster import wait_for_actors, without_room

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(dp=4), microbatches=2, steps=14, max_failures=9, timeout=20.0)


def kills(*actors, step=4):
    return [rp.chaos.kill(actor, at="STEP", step=step) for actor in actors]


@pytest.mark.long
def test_two_of_four_replicas_are_lost_and_come_back(tmp_path, caplog, monkeypatch):
    """One run: two die in step 4, there is room again after step 9, and the losses are those of all the time four."""
    monkeypatch.setattr("raypar.job.recover.restarts._LOOK", 0.0)
    run = replace(RUN, folder=str(tmp_path / "run"), eval_every=5, save_every=6)
    seen, losses, whole = [], [], []
    with rp.launch(run, chaos=kills("dp=1", "dp=3")) as job, without_room() as cluster:

        def watch(outcome):
            losses.append(outcome.loss)
            if isinstance(outcome, rp.Report):
                seen.append((job.schedule.num_microbatches, [row.action for row in job.who()].count("no room")))
                if outcome.step == 9:
                    cluster.make_room()
                    wait_for_actors(job, 4)

        job.train(on=watch)
        assert job.run.mesh.dp == 4 and job.run.microbatches == 2
        assert [rows for rows in seen if rows != (2, 0)] == [(4, 2)] * 7
        (failure,) = job.failures
        assert (failure.step, failure.back_to, failure.source, failure.replaced) == (4, 3, "memory", ())
        assert failure.size == "dp=2 instead of 4, 4 microbatches each instead of 2, without pp=0 dp=1 and pp=0 dp=3"
        job.reset(replace(RUN, eval_every=5))
        job.train(on=lambda outcome: whole.append(outcome.loss))
        assert losses == pytest.approx(whole, rel=1e-6), "of steps and of evaluations"
    assert "the run is whole again after step 10, with dp=4 of 4, in " in caplog.text
    marks = [(mark.step, mark.text) for mark in happenings(read(tmp_path / "run")) if mark.kind == "resume"]
    assert [step for step, _ in marks] == [3, 10]
    assert "the run goes on after step 3" in (tmp_path / "run" / LOG).read_text()


@pytest.mark.long
def test_a_replica_is_given_up_for_a_server_that_is_lost(tmp_path):
    run = replace(RUN, mesh=rp.Mesh(dp=2), steps=6, data_parallel="parameter_server")
    chaos = kills("server 0 of pp=0")
    with rp.launch(replace(run, folder=str(tmp_path / "run")), chaos=chaos) as job, without_room():
        losses = [report.loss for report in job.train()]
        assert job.failures[0].size.startswith("dp=1 instead of 2, 4 microbatches each instead of 2, without server 0")
        assert [row.actor for row in job.who()] == ["pp=0", "server 0 of pp=0", "missing"]
    past = read(tmp_path / "run")
    assert past.schedule.num_microbatches == 4 and past.timelines[0].events, "what is drawn is what was run at last"
    assert page(past)
    with rp.launch(run) as job:
        assert losses == pytest.approx([report.loss for report in job.train()], rel=1e-6)


@pytest.mark.long
def test_without_snapshots_it_goes_on_and_grows_from_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.job.recover.restarts._LOOK", 0.0)
    run = replace(RUN, mesh=rp.Mesh(dp=2), zero=3, steps=6)
    kept = {"snapshot_every": 0, "save_every": 2, "folder": str(tmp_path / "run")}
    with rp.launch(replace(run, **kept), chaos=kills("dp=0")) as job, without_room() as cluster:

        def watch(report):
            if report.step == 4:
                cluster.make_room()
                wait_for_actors(job, 2)

        first = job.train(2)  # it returns when the checkpoint is whole
        losses = [report.loss for report in (*first, *job.train(on=watch))]
        assert (job.failures[0].back_to, job.failures[0].source) == (2, "step-00000002")
        assert job.schedule.num_microbatches == 2
        assert find(job.saved.with_name("step-00000004")).manifest.run["mesh"]["dp"] == 2, "saved by one replica"
        job.reset(run)
        assert losses == pytest.approx([report.loss for report in job.train()], rel=1e-6)


def test_where_it_may_not_the_run_ends_with_that_reason():
    run, why = replace(RUN, mesh=rp.Mesh(dp=2), min_dp=2), "no node has room for another actor"
    with (
        rp.launch(run, chaos=kills("dp=1")) as job,
        without_room(),
        pytest.raises(rp.JobError, match=why) as caught,
    ):
        job.train()
    told = "in the place of pp=0 dp=1, and min_dp is 2, so it does not go on with fewer replicas"
    assert str(caught.value).endswith(told)
