"""A job goes on in another layout: losses are those of the undisturbed run, and what does not fit moves nothing."""

from __future__ import annotations

import os
import pkgutil
import signal
from dataclasses import replace

import pytest
import ray

import raypar as rp
from raypar.actors.data.batches import Renumbered
from raypar.actors.models.skeleton import Skeleton
from raypar.checkpoint.find import newest
from raypar.config.run import check_run
from raypar.job.layout.elastic import Layout
from raypar.job.layout.other_layout import _layout_faults, other_layout
from raypar.job.recover.relayout import differences
from raypar.paths import CHECKPOINTS, LOG
from raypar.planner.resource_needs import sum_over_actors
from raypar.reporting.html.events import happenings
from raypar.reporting.run_folder.read import read
from tests.support.full_cluster import without_room
from tests.support.team import batch, linears, mse

MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=4, steps=12, timeout=20.0)
TP, ZERO = {"mesh": rp.Mesh(tp=2)}, {"mesh": rp.Mesh(dp=2), "zero": 3}


def layout_of(run, to=None, **changes):
    return other_layout(Layout(run, check_run(run)), to, changes, Skeleton(run.model, run.seed), "cpu")


def told(run, to=None, **changes):
    with pytest.raises(rp.ConfigError) as caught:
        layout_of(run, to, **changes)
    return caught.value.faults


def test_the_number_of_microbatches_follows_the_mesh_and_they_keep_their_numbers():
    assert layout_of(RUN, **ZERO).run.microbatches == 2
    assert layout_of(RUN, replace(RUN, mesh=rp.Mesh(dp=4), microbatches=1)).run.mesh.dp == 4


def test_functions_of_ones_own_are_asked_for_the_same_microbatches():
    own = replace(RUN, model=rp.Layers(linears(), mse), data=rp.Batches(batch))
    there = layout_of(own, mesh=rp.Mesh(dp=2)).run
    assert there.data.fn == Renumbered(batch, made_for=1, dp=2)
    back = layout_of(there, mesh=rp.Mesh(pp=2), microbatches=4).run
    assert back == own
    assert "data is another one" in told(own, replace(own, mesh=rp.Mesh(dp=2), microbatches=2, data=rp.Batches(mse)))[0]


def test_actors_keep_how_they_share_a_gpu():
    over_nccl = replace(RUN, device="cuda", shared_gpu="nccl")
    (fault,) = _layout_faults(over_nccl, check_run(RUN), Layout(RUN, check_run(RUN)), "cuda")
    assert fault == "shared_gpu must stay 'staged', as actors stay; launch anew for 'nccl'"


def test_all_faults_are_told_at_once():
    faults = told(RUN, mesh=rp.Mesh(tp=3), optim=rp.SGD(), seed=5, microbatches=3)
    assert len(faults) == 4, faults
    assert all(fault.startswith("relayout: ") for fault in faults)
    text = "\n".join(faults)
    assert "microbatches is 3 on each of 1 replicas, but a step of this run has 4: set it to 4" in text
    assert "optim is another one, and a relayout changes no number of the run: leave it as it is" in text
    assert "seed is 5 and was 0" in text and "mesh.tp" in text
    assert "4 is no multiple of 3: give another mesh.dp" in told(RUN, mesh=rp.Mesh(dp=3))[0]
    assert told(RUN, mesh="tp=2")[0].startswith("relayout: mesh is ")
    assert "asynchronous" in told(replace(RUN, clip=None), schedule="pipedream")[0]
    assert "zero" in told(RUN, mesh=rp.Mesh(tp=2), zero=3)[0]


def test_a_layout_for_which_there_is_no_memory_is_refused(monkeypatch):
    big = replace(RUN, model=replace(MODEL, hidden=256), device="cpu")
    there = layout_of(big, mesh=rp.Mesh(tp=2))
    state = sum_over_actors(there.run, there.programs["train"], None, lambda memory: memory.state)
    for known in ("raypar.planner.resource_needs", "raypar.job.layout.other_layout"):
        monkeypatch.setattr(f"{known}.total_memory", lambda: state * 3 // 2)
    (fault,) = told(big, mesh=rp.Mesh(tp=2))
    assert fault.startswith("relayout: memory: copies of the state take ")
    assert fault.endswith("job.reset(run, resume=job.save(folder)) goes through the disk")
    monkeypatch.setattr("raypar.planner.resource_needs.total_memory", lambda: state - 1)
    (fault,) = told(big, mesh=rp.Mesh(tp=2))
    assert "weights, gradients and optimizer state of all 2 actors take" in fault
    monkeypatch.setattr("raypar.planner.resource_needs.total_memory", lambda: 4 * state)
    monkeypatch.setattr("raypar.job.layout.other_layout.total_memory", lambda: 4 * state)
    assert layout_of(big, mesh=rp.Mesh(tp=2)).run.mesh.tp == 2


def test_layouts_are_told_by_what_differs():
    other = replace(RUN, mesh=rp.Mesh(dp=2), zero=3, precision=rp.Precision(compute="bf16"))
    assert differences(RUN, other) == ("pp=2 fp32", "dp=2 zero=3 bf16")
    assert differences(RUN, replace(RUN, mesh=rp.Mesh())) == ("pp=2", "one replica of one stage")
    assert differences(RUN, replace(RUN, bucket_mb=1.0)) == ("those before", "other settings")


@pytest.fixture(scope="module")
def undisturbed(pool):
    with pool.serving(), rp.launch(RUN) as job:
        return [report.loss for report in job.train(8)]


@pytest.mark.usefixtures("cluster", "kept_actors")
class TestOnActors:
    def test_layouts_in_turn_and_what_is_saved_is_of_the_last(self, undisturbed, tmp_path, caplog):
        folder = str(tmp_path / "run")
        with rp.launch(replace(RUN, folder=folder)) as job:
            moved = []
            change = lambda report: report.step == 1 and moved.append(job.relayout(**TP))  # noqa: E731
            losses = [report.loss for report in job.train(3, on=change)]
            moved.append(job.relayout(**ZERO))
            assert str(job.relayout(**ZERO)) == "the run has this layout already, after step 3: nothing has moved"
            losses += [report.loss for report in job.train(1)]
            step = job.stepper()
            step.next()
            with pytest.raises(rp.JobError, match="in the middle of this step"):
                job.relayout(mesh=rp.Mesh(pp=2))
            step.abort()
            moved.append(job.relayout(mesh=rp.Mesh(pp=2, dp=2), zero=None, eval_every=1))
            seen = []
            losses += [report.loss for report in job.train(2, on=seen.append)]
            assert sum(isinstance(one, rp.Evaluation) for one in seen) == 2, "settings of evaluations may change too"
            assert len(job.who()) == 4 and job.run.microbatches == 2
            with (
                without_room(),
                pytest.raises(rp.ConfigError, match="relayout: mesh: 8 actors are needed, 4 more than there are"),
            ):
                job.relayout(mesh=rp.Mesh(pp=2, dp=2, tp=2))
            job.save(tmp_path / "run" / CHECKPOINTS)
        assert losses == pytest.approx(undisturbed[:6], rel=1e-5)
        assert all(one.sent == one.least > 0 for one in moved) and moved[0].sent < moved[0].needed
        past = read(tmp_path / "run")
        assert past.config["mesh"] == {**past.config["mesh"], "pp": 2, "dp": 2} and past.schedule.num_microbatches == 2
        marks = [(mark.step, mark.text) for mark in happenings(past) if mark.kind == "resume"]
        assert [step for step, _ in marks] == [2, 3, 4] and "tp=2 instead of pp=2" in marks[0][1]
        assert "has another layout after step 3, dp=2 zero=3 instead of" in (tmp_path / "run" / LOG).read_text()
        found = newest(tmp_path / "run" / CHECKPOINTS)
        assert found.manifest.run["mesh"]["dp"] == 2
        with rp.launch(replace(RUN, mesh=rp.Mesh(tp=2)), resume=found) as job:
            assert [report.loss for report in job.train(2)] == pytest.approx(undisturbed[6:], rel=1e-5)

    @pytest.mark.long
    @pytest.mark.parametrize(
        "place",
        [
            pytest.param(
                "raypar.job.recover.active_layout.plans_of", marks=pytest.mark.long
            ),  # it is to join the new layout
            pytest.param(
                "raypar.job.recover.relayout.moves_between", marks=pytest.mark.long
            ),  # others wait for its part
            "raypar.job.recover.active_layout.ActiveLayout.share",  # all have what they need, but no snapshot of it
        ],
    )
    def test_an_actor_that_is_killed_leaves_the_layout_before(self, undisturbed, monkeypatch, place):
        """The next try succeeds, and then the new layout survives as much."""
        killed, real = [], pkgutil.resolve_name(place.replace(".Standing", ":Standing"))
        with rp.launch(replace(RUN, max_failures=2)) as job:
            job.train(2)

            def kill(*args, **named):
                if not killed:
                    killed.append(ray.get(job._lifetime.actors.handles[1].located.remote()).process.pid)
                    os.kill(killed[0], signal.SIGKILL)
                return real(*args, **named)

            monkeypatch.setattr(place, kill)
            with pytest.raises(
                rp.RelayoutLostError, match=r"goes on after step 2 \(from memory\), with .*pp=1 replaced"
            ):
                job.relayout(**TP)
            assert job.run.mesh == RUN.mesh and job.next_step == 2
            losses = [report.loss for report in job.train(1)]
            job.relayout(**TP)
            losses += [report.loss for report in job.train(1)]
            os.kill(ray.get(job._lifetime.actors.handles[0].located.remote()).process.pid, signal.SIGKILL)
            losses += [report.loss for report in job.train(2)]
            assert [failure.back_to for failure in job.failures] == [2, 4], "the second one in the new layout"
            assert job.failures[1].replaced == ("pp=0 tp=0",) and job.run.mesh.tp == 2
        assert losses == pytest.approx(undisturbed[2:6], rel=1e-5)
