"""A node is taken away with notice: the run goes on elsewhere, with fewer replicas, or is saved and ends."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.cluster.nodes import drain_notices as notices
from raypar.cluster.nodes.drain_notices import DrainNotices
from raypar.cluster.nodes.nodes import own_node
from raypar.paths import FAILURES
from raypar.reporting.html.events import happenings
from raypar.reporting.run_folder.read import read
from tests.support.full_cluster import wait_for_actors, without_room

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, steps=8, max_failures=1, timeout=20.0)


class TakenAway:
    """The nodes of some homes, which Ray drains from the call of ``now`` on."""

    def __init__(self, patch):
        self.homes, self.draining = [], {}
        patch.setattr(notices, "draining_nodes", lambda: dict(self.draining))
        patch.setattr(notices, "_LOOK", 0.0)
        patch.setattr("raypar.job.recover.restarts._LOOK", 0.0)
        for user in ("job.recover.restarts", "job.recover.active_layout", "cluster.lifecycle.actors"):
            patch.setattr(f"raypar.{user}.nodes_of", self.nodes_of)

    def nodes_of(self, homes):
        return ["gone" if home in self.homes else own_node() for home in homes]

    def now(self, job, *ranks, seconds=math.inf):
        self.homes = [job._lifetime.actors.bundles[rank] for rank in ranks]
        self.draining["gone"] = time.time() + seconds


@pytest.fixture
def taken(monkeypatch):
    return TakenAway(monkeypatch)


def losses_of(job, taken, *ranks, seconds=math.inf, come=0):
    """Train, let the nodes of these ranks be taken away in the fourth step, and return the losses.

    Args:
        job: The job.
        taken: Takes the nodes away.
        *ranks: The ranks.
        seconds: How long the nodes are still there.
        come: Number of actors that are waited for after the next step, so that it is long.
    """
    losses = []

    def watch(report):
        losses.append(report.loss)
        if report.step == 3:
            taken.now(job, *ranks, seconds=seconds)
        if report.step == 4:
            wait_for_actors(job, come)
        if report.step == 6:
            time.sleep(seconds if math.isfinite(seconds) else 0.4)

    job.train(on=watch)
    return losses


@pytest.mark.long
def test_the_run_moves_elsewhere_with_the_same_bits_and_no_failure(taken, tmp_path, caplog):
    run = replace(RUN, folder=str(tmp_path / "run"))
    with rp.launch(run) as job:
        pids = {row.actor: row.pid for row in job.who()}
        losses = losses_of(job, taken, 1, come=2)
        after = {row.actor: row.pid for row in job.who()}
        assert (job.failures, len(after)) == ((), 2), "the one that was left is gone"
        assert after["pp=0"] == pids["pp=0"] and after["pp=1"] != pids["pp=1"]
        taken.draining.clear()
        job.reset(RUN)
        assert losses == [report.loss for report in job.train()]
    assert "gone is taken away" in caplog.text
    (told,) = [line for line in caplog.messages if line.startswith("the run has moved")]
    assert ", with pp=1 elsewhere, in " in told
    assert not (tmp_path / "run" / FAILURES).exists()
    (mark,) = [mark for mark in happenings(read(tmp_path / "run")) if "has moved" in mark.text]
    assert mark.text == told


@pytest.mark.long
def test_without_room_it_goes_on_with_fewer_replicas_from_the_step_that_it_is_at(taken, tmp_path):
    """Without snapshots too: from a checkpoint that is saved for that."""
    run = replace(RUN, mesh=rp.Mesh(dp=2), max_failures=0)
    with rp.launch(replace(run, folder=str(tmp_path / "run"))) as job, without_room():
        losses = losses_of(job, taken, 0, seconds=0.4)
        assert job.failures == () and job.schedule.num_microbatches == 4
    taken.draining.clear()
    with rp.launch(run) as job:
        assert losses == pytest.approx([report.loss for report in job.train()], rel=1e-6)


def test_without_room_for_a_whole_replica_it_is_saved_and_ends(taken, tmp_path):
    run = replace(RUN, folder=str(tmp_path / "run"))
    with rp.launch(run) as job, without_room(), pytest.raises(rp.JobError, match="saved as step-0000000") as caught:
        losses_of(job, taken, 1)
    assert "gone is taken away, no node has room for another actor" in str(caught.value)
    assert "in the place of pp=1, and with mesh.dp 1 it has no replica that it could do without" in str(caught.value)
    assert f"launch the run again with resume='{tmp_path}/run" in caught.value.__notes__[-1]
    (line,) = (tmp_path / "run" / FAILURES).read_text().splitlines()
    saved = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert '"is_end": true' in line and f'"source": "{saved}"' in line


def test_what_can_be_neither_moved_nor_saved_goes_on(taken, caplog):
    with rp.launch(replace(RUN, max_failures=0)) as job:
        assert len(losses_of(job, taken, 1)) == 8
    assert [text for text in caplog.messages if "until then" in text] == [
        "the run goes on there until then: it has no folder to be saved in"
    ]


def test_the_drivers_own_node_is_left_with_all_saved(taken, tmp_path, monkeypatch):
    told = "gone is taken away, and the driver is on it: saved as step-00000004"
    with rp.launch(replace(RUN, folder=str(tmp_path / "run"))) as job, pytest.raises(rp.JobError, match=told):
        monkeypatch.setattr("raypar.job.recover.restarts.own_node", lambda: "gone")
        losses_of(job, taken)


@pytest.mark.long
def test_a_death_on_such_a_node_is_no_failure(taken, monkeypatch):
    """The node is gone before others have come: the second death alone counts, of the one that may be survived."""
    monkeypatch.setattr("raypar.job.recover.restarts.Restarts.is_due", lambda starter: starter._heed_notices() or False)
    chaos = [rp.chaos.kill("pp=1", at="1B0", step=5), rp.chaos.kill("pp=0", at="0B0", step=7)]
    with rp.launch(RUN, chaos=chaos) as job:
        losses = losses_of(job, taken, 1)
        assert [failure.step for failure in job.failures] == [5, 7]
        taken.draining.clear()
        job.reset(RUN)
        assert losses == [report.loss for report in job.train()]


def test_of_the_time_that_is_left_the_first_half_is_for_waiting(monkeypatch):
    now, found = [100.0], {"a": 20.0, "b": math.inf}
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(notices.time, "time", lambda: 10.0)
    monkeypatch.setattr(notices, "draining_nodes", lambda: found)
    monkeypatch.setattr(notices, "named", str.upper)
    heard = DrainNotices(SimpleNamespace(answers=lambda: True))
    assert heard.look() and str(heard) == "A and B" and not heard.is_urgent
    now[0] = 104.9
    assert not heard.look() and not heard.is_urgent
    now[0] = 105.1
    assert heard.is_urgent
    del found["a"]
    now[0] = 106.0
    assert not heard.look() and heard.names == {"b": "B"} and not heard.is_urgent
