"""An actor that dies while nobody takes a compiled step: in a step by hand, before a read, before the next step."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import raypar as rp
from raypar.errors import StepLostError

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, steps=6, max_failures=9, timeout=20.0)


def end_of(job, rank=1):
    """Kill an actor from outside, while nobody calls it."""
    os.kill(job.who()[rank].pid, signal.SIGKILL)
    time.sleep(0.2)


@pytest.mark.long
def test_reads_and_steps_by_hand_survive_and_change_no_bit():
    with rp.launch(RUN) as job:
        losses = [report.loss for report in job.train()]
        whole = {name: weight.clone() for name, weight in job.weights().items()}
    found, seen = [], []

    def look(report):
        found.append(report.loss)
        if report.step == 1:
            end_of(job)
            name = [*job.parameters][-1]  # of the last stage
            seen.append((name, job.param(name).shape))  # while the next step is under way

    with rp.launch(RUN) as job:
        job.train(3, on=look, ahead=1)
        stepper = job.stepper()
        stepper.run(3)
        end_of(job, 0)
        with pytest.raises(
            StepLostError, match=r"pp=0 died .* pp=0 replaced.*; job.stepper\(\) begins step 4$"
        ) as lost:
            stepper.finish()
        with pytest.raises(StepLostError) as again:
            stepper.next()
        assert again.value is lost.value
        found.append(job.stepper().finish().loss)
        found.append(job.stepper().finish().loss)
        found.append(job.step().loss)
        end_of(job, 0)
        weights = dict(job.weights().items())
        assert [failure.back_to for failure in job.failures] == [2, 3, 6]
    assert found == losses
    assert [shape for name, shape in seen] == [whole[name].shape for name, _ in seen]
    assert all(torch.equal(weights[name], weight) for name, weight in whole.items())
