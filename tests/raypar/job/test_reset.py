"""Another run on the same actors: in the folder of the one before, and after an actor has died between the two."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import raypar as rp


def batch(step, microbatch, dp):
    x = torch.ones(2, 4)
    return x, x


def run_in(folder, **changes):
    model = rp.Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss)
    fields = {"model": model, "mesh": rp.Mesh(pp=2), "data": rp.Batches(batch), "steps": 4, "timeout": 20.0}
    return rp.Run(**fields | {"folder": None if folder is None else str(folder)} | changes)


def test_the_folder_of_the_run_that_is_replaced_is_not_taken_for_another_one_under_way(job_on, tmp_path):
    job, run = job_on(2), run_in(tmp_path / "run", save_every=2)
    job.reset(run)
    job.train(2)
    with pytest.raises(rp.ConfigError, match=r"holds a run already .*: go on with it by raypar train"):
        job.reset(run)
    with pytest.raises(rp.ConfigError, match=r"another job writes to it|holds a run that is under way"):
        rp.launch(run)
    job.reset(run, resume=run.folder)
    assert job.next_step == 2
    job.train(2)
    assert len((Path(run.folder) / "metrics.jsonl").read_text().splitlines()) == 4
    job.reset(run_in(None))


@pytest.mark.long
def test_an_actor_that_has_died_since_the_last_step_is_replaced(cluster, caplog):
    with rp.launch(run_in(None, max_failures=1)) as job:
        job.train(1)
        where = job._loop.loaded.calls.all("located", what="a test")
        os.kill(where[0].process.pid, signal.SIGKILL)
        job.reset(replace(job.run, steps=2))
        assert job.next_step == 0
        assert len(job.train()) == 2
    assert "died during a reset: it was ended by SIGKILL" in caplog.text
