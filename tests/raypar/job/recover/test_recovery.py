"""Runs that go on after actors have died, hung and failed, with the same bits as if nothing had happened."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raypar as rp
from raypar.paths import LOG
from tests.support.full_cluster import without_room
from tests.support.kernel import TELLS_EXITS

pytestmark = pytest.mark.usefixtures("cluster")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=4, steps=6, max_failures=9, timeout=20.0)


def trained(run, chaos=(), **launch):
    with rp.launch(run, chaos=chaos, **launch) as job:
        reports = job.train()
        weights = {name: weight.clone() for name, weight in job.weights().items()}
        return [report.loss for report in reports], weights, job.failures


def alike(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], weight) for name, weight in other[1].items())


@pytest.fixture(scope="module")
def undisturbed(pool):
    with pool.serving():
        return trained(replace(RUN, max_failures=0))


def test_kills_and_an_exception_change_no_bit(undisturbed, kept_actors):
    """One run survives them: in a forward, between copy and mark of a snapshot, before the report, in a backward."""
    disturbed = trained(
        RUN,
        [
            rp.chaos.kill("pp=1", at="1F2", step=1),
            rp.chaos.kill("pp=0", at="snapshot", step=3),
            rp.chaos.raise_("pp=1", at="1B3", step=3),
            rp.chaos.kill("pp=0", at="report", step=5),
        ],
    )
    assert alike(disturbed, undisturbed)
    survived = disturbed[2]
    death = survived[0].death
    assert (death.signal, death.last_action) == ("SIGKILL" * TELLS_EXITS, "1F2 of step 1")
    assert survived[1].death is None
    assert [(failure.step, failure.back_to) for failure in survived] == [(1, 0), (3, 2), (3, 2), (5, 4)]
    assert [failure.replaced for failure in survived] == [("pp=1",), (), ("pp=0",), ("pp=0",)]
    assert str(survived[2]).startswith("the run goes on after step 2 (from memory), with pp=0 replaced, ")
    held = [file for file in Path("/proc/self/fd").iterdir() if "raypar-snapshot" in str(file.resolve())]
    assert not held, "the driver lets go of snapshots"


@pytest.mark.long
def test_a_stopped_actor_is_replaced(undisturbed, monkeypatch, kept_actors):
    monkeypatch.setattr("raypar.cluster.calls.deadline._LOST", 3.0)
    monkeypatch.setattr("raypar.job.recover.restarts.HEARD", 1.0)
    disturbed = trained(RUN, [rp.chaos.stop("pp=0", at="0B0", step=5)])
    assert alike(disturbed, undisturbed)
    assert disturbed[2][0].replaced == ("pp=0",)
    assert disturbed[2][0].reason == "actor pp=0 was silent for 3 s during step 5"


@pytest.mark.long
def test_a_failure_in_the_recovery_and_a_spare(undisturbed, kept_actors):
    """Both actors die at once, and one fails again while it joins; a spare is there. Kills: tests/long."""
    chaos = [rp.chaos.kill(f"pp={pp}", at="STEP", step=4) for pp in (0, 1)]
    chaos += [rp.chaos.raise_("pp=0", at="start", step=2)]
    assert alike(disturbed := trained(replace(RUN, spares=1), chaos), undisturbed)
    assert {label for failure in disturbed[2] for label in failure.replaced} == {"pp=0", "pp=1"}


@pytest.mark.long
def test_an_actor_that_does_not_start_where_it_was_gets_a_home_elsewhere(undisturbed, kept_actors, monkeypatch):
    """As if its node were gone: nobody waits for the one in the old home."""
    monkeypatch.setattr("raypar.cluster.lifecycle.replacement_actors._STARTED", 0.0)
    disturbed = trained(RUN, [rp.chaos.kill("pp=1", at="STEP", step=3)])
    assert alike(disturbed, undisturbed) and disturbed[2][0].replaced == ("pp=1",)


@pytest.mark.long
def test_without_room_elsewhere_the_run_waits_for_nodes_and_ends_with_that_reason_at_last(
    undisturbed, kept_actors, monkeypatch, tmp_path
):
    """There is room as soon as it says that it waits for it, in step 2; in step 4 there is none; step 3 is saved."""
    waits, chaos = [], [rp.chaos.kill("pp=1", at="STEP", step=step) for step in (2, 4)]
    run = replace(RUN, folder=str(tmp_path / "run"))
    with rp.launch(run, chaos=chaos, wait_for_nodes=60.0) as job:
        with without_room() as cluster:

            def warned(text, *values):
                if "waits" in text:
                    waits.append(text % values)
                    cluster.make_room()

            monkeypatch.setattr("raypar.job.recover.restarts.log.warning", warned)
            job.train(2)
        job._lifetime.actors.wait_for_nodes = 0.5
        why = r"no node has room for another actor .* place of pp=1"
        with without_room(), pytest.raises(rp.JobError, match=why) as caught:
            job.train()
    assert [text.partition(": ")[2] for text in waits] == ["the run waits up to 60 s in all for room for pp=1"]
    assert [failure.replaced for failure in job.failures] == [("pp=1",)]
    notes = "\n".join(caught.value.__notes__)
    assert "It was lost so: actor pp=1 died during step 4." in notes
    assert "wait_for_nodes (--wait-for-nodes), which was 0.5 s, lets" in notes and "(--save-every)" in notes
    assert "(step-00000003)" in notes
    losses, weights, _ = trained(run, resume=tmp_path / "run")
    assert alike((undisturbed[0][:3] + losses, weights), undisturbed), "from what was in memory"


@pytest.mark.long
def test_without_snapshots_it_goes_back_to_a_checkpoint(undisturbed, tmp_path, kept_actors):
    run = replace(RUN, snapshot_every=0, save_every=2, folder=str(tmp_path / "run"))
    disturbed = trained(
        run, [rp.chaos.delay("pp=0", at="0F0", step=4, seconds=1), rp.chaos.kill("pp=1", at="1F2", step=4)]
    )
    assert alike(disturbed, undisturbed)
    assert (disturbed[2][0].back_to, disturbed[2][0].source) == (2, "step-00000002")
    text = (tmp_path / "run" / LOG).read_text()
    assert "the run goes on after step 2 (from step-00000002), with pp=1 replaced" in text


def test_the_same_fault_thrice_ends_the_run_with_its_reason(kept_actors):
    start = time.monotonic()
    with rp.launch(RUN, chaos=[rp.chaos.raise_("pp=0", at="0F1", step=2, times=99)]) as job:
        with pytest.raises(rp.JobError, match="injected on purpose") as caught:
            job.train()
        assert len(job.failures) == 2
    assert "The same happened 3 times in step 2, so another try would not help." in caught.value.__notes__
    assert time.monotonic() - start < 30


@pytest.mark.long
def test_a_flipped_bit_is_found_named_and_undone(kept_actors):
    run = replace(RUN, mesh=rp.Mesh(dp=3), microbatches=1, max_failures=0)
    whole = trained(run)
    flips = [
        rp.chaos.corrupt("dp=1", at="STEP", step=4),
        rp.chaos.corrupt("dp=2", at="0F0", step=6, of="activation"),
    ]
    healed = trained(replace(run, max_failures=2, snapshot_every=2, check_every=2, recheck_every=3), flips)
    assert alike(healed, whole)
    failure, other = healed[2]
    assert "in step 6 the " in other.reason  # the outputs of 0F0 are the loss, in which a flip may be rounded away
    assert " on pp=0 dp=2 are not those of all others that computed the same microbatch" in other.reason
    assert (other.back_to, other.replaced) == (4, ())
    assert "in step 4 the weights of pp=0 dp=1 are not those of all others: a bit has flipped" in failure.reason
    assert (failure.back_to, failure.replaced) == (2, ())


def test_settings_that_would_do_nothing_are_told():
    for changes, why in (
        (
            {"check_every": 3},
            "there is one replica (dp x cp), so nothing to compare: set it to 0",
        ),
        ({"check_every": 3, "mesh": rp.Mesh(dp=2), "zero": 3}, "but zero is 3, so no two actors hold the same"),
        ({"check_every": 3, "mesh": rp.Mesh(dp=2)}, "so set snapshot_every to 3 or a multiple"),
    ):
        assert why in "\n".join(rp.faults(replace(RUN, **changes)))
