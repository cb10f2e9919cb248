"""What a job has besides the state of a step survives a failure too: its epoch, evaluations, checkpoints, files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import raypar as rp

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, steps=6, max_failures=9, timeout=20.0)
EXPERTS = replace(RUN, model=replace(MODEL, moe=rp.MoE(experts=4, top_k=2)), mesh=rp.Mesh(dp=2, ep=2))


def end_of(job, rank=1):
    """Kill an actor from outside, while nobody calls it."""
    address = next(
        one for one in job._loop.loaded.calls.some([rank], "snapshots", "addresses", what="a test")[0] if one.is_written
    )
    os.kill(address.process.pid, signal.SIGKILL)
    time.sleep(0.2)


def weights_of(job):
    return {name: weight.clone() for name, weight in job.weights().items()}


def alike(one, other):
    return all(torch.equal(other[name], weight) for name, weight in one.items())


def held(process="self"):
    """Return the memory files that a process has open; what it has mapped, it has open twice."""
    opened = Path(f"/proc/{process}/fd").iterdir()
    return {file.stat().st_ino for file in opened if "raypar-snapshot" in str(file.resolve())}


@pytest.mark.long
def test_steps_behind_a_refused_one_are_refused_after_a_recovery_too():
    def data(step, microbatch, dp):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
        return x / 0.0 if step in (1, 5) else x, x.sin()

    layers = rp.Layers(lambda: [nn.Linear(4, 8), nn.Linear(8, 4)], nn.functional.mse_loss)
    run = replace(RUN, model=layers, data=rp.Batches(data), steps=8)

    def trained(chaos):
        with rp.launch(run, chaos=chaos) as job:
            while job.next_step < 8:
                try:
                    job.train(ahead=1)
                except rp.NonFiniteError:
                    job.next_step += 1
            return weights_of(job)

    assert alike(trained([]), trained([rp.chaos.kill("pp=1", at="STEP", step=4)]))


@pytest.mark.long
def test_an_evaluation_and_a_checkpoint_are_of_the_step_in_which_an_actor_died(tmp_path):
    with rp.launch(replace(RUN, snapshot_every=3)) as job:
        job.train(5)
        before, weights = job.evaluate(), weights_of(job)
        end_of(job)
        after = job.evaluate()
        assert (before.step, before.loss) == (after.step, after.loss) == (5, before.loss)
        end_of(job, 0)
        assert job.save(tmp_path).name == "step-00000005"
        assert alike(weights, weights_of(job))
        assert [failure.back_to for failure in job.failures] == [3, 3]


@pytest.mark.long
def test_a_checkpoint_that_was_lost_with_an_actor_is_saved_again(tmp_path):
    run = replace(RUN, folder=str(tmp_path / "run"), save_every=2, steps=3)
    with rp.launch(run) as job:
        job.train(2)
        job._loop.saver.settle()
        lost = job.saved
        shutil.rmtree(lost)  # as if the actor had died while it wrote
        end_of(job)
        job.train()
    assert [path.name for path in sorted(lost.parent.glob("step-*"))] == ["step-00000002", "step-00000003"]


@pytest.mark.long
def test_a_run_whose_checkpoint_is_gone_goes_on_from_memory():
    """To rebalance, a job saves a checkpoint in a folder that is gone when the next failure comes."""
    with rp.launch(EXPERTS, chaos=[rp.chaos.kill("dp=1", at="STEP", step=3)]) as job:
        job.train(2)
        job.rebalance()
        job.train()
        assert [(failure.back_to, failure.source) for failure in job.failures] == [(2, "memory")]
        weights = weights_of(job)
    with rp.launch(EXPERTS) as job:
        job.train()
        assert alike(weights, weights_of(job))


@pytest.mark.long
def test_files_of_actors_that_were_replaced_are_let_go():
    """The driver has three files of each actor, and an actor those of the other: none more after two failures."""
    chaos = [rp.chaos.kill("pp=1", at=at, step=step) for step, at in ((1, "1F1"), (3, "snapshot"))]
    with rp.launch(replace(RUN, steps=4), chaos=chaos) as job:
        job.train()
        assert len(job.failures) == 2
        addresses = job._loop.loaded.calls.some([0], "snapshots", "addresses", what="a test")[0]
        pids = [one.process.pid for one in addresses if one.is_written]
        assert [len(held()), *[len(held(pid)) for pid in pids]] == [6, 6]


@pytest.mark.long
def test_steps_that_nobody_waits_for_any_more_survive_a_failure():
    class EnoughError(Exception):
        pass

    def leave(report):
        if report.step == 2:
            raise EnoughError

    with rp.launch(RUN, chaos=[rp.chaos.kill("pp=1", at="STEP", step=4)]) as job:
        with pytest.raises(EnoughError):
            job.train(on=leave, ahead=2)
        assert (job.next_step, len(job.failures)) == (3, 1)
        job.train()
        assert job.next_step == 6


@pytest.mark.long
def test_a_failure_between_two_steps_names_its_actor():
    points = ["end", "snapshot", "report"]
    with rp.launch(RUN, chaos=[rp.chaos.raise_("pp=1", at=at, step=step) for step, at in enumerate(points, 2)]) as job:
        job.train()
        for failure in job.failures:
            assert failure.reason.startswith("actor pp=1: action snapshot after the step failed: InjectedError")
            assert failure.replaced == ()
        assert [failure.back_to for failure in job.failures] == [1, 2, 3]
