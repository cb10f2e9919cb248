"""Snapshots are copied to buddies while a run trains, and anew after a failure; the numbers stay the same.

All actors are on one node here, so the tests say who is whose buddy; tests/long/two_hosts.py loses nodes.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.checkpoint.memory_snapshot import SnapshotFiles
from raypar.job.recover.transfers import SnapshotTransfer

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, steps=7, max_failures=9, timeout=20.0, buddy_every=2)


@pytest.fixture
def elsewhere(monkeypatch):
    """The other actor counts as one of another node, and each gets the snapshots that it needs from the other one."""

    def sent(places, steps, needed, step):
        assert needed == [[share] for share in sorted(steps[0])], "a stage has nothing of the other one"
        return [SnapshotTransfer(share, 1 - rank, rank) for rank, shares in enumerate(needed) for share in shares]

    monkeypatch.setattr("raypar.job.recover.snapshots.buddies_of", lambda places: (1, 0))
    monkeypatch.setattr("raypar.job.recover.snapshots.has_all", lambda *_: False)
    monkeypatch.setattr("raypar.job.recover.snapshots.transfers", sent)


def files_of(job, which):
    """What the driver holds: of each actor first its own three files, then those that copies arrive in."""
    held = job._starter.active.snapshots._held.files()
    return SnapshotFiles({share: files[which] for share, files in held.items()})


def content(files, share, step):
    file = files.file(share, step)
    return os.pread(file, os.fstat(file).st_size, 0)


def copies(job):
    """By rank, the steps of which there are whole copies."""
    return {share.rank: steps for share, steps in files_of(job, slice(3, None)).steps().items()}


@pytest.mark.long
def test_copies_are_made_beside_the_steps_and_begin_anew_after_a_failure(elsewhere):
    with rp.launch(RUN, chaos=[rp.chaos.kill("pp=1", at="1F1", step=6)]) as job:
        losses = [report.loss for report in job.train(5)]
        assert copies(job) == {0: (2, 4), 1: (2, 4)}
        losses += [report.loss for report in job.train(2)]
        assert [(failure.back_to, failure.replaced) for failure in job.failures] == [(5, ("pp=1",))]
        assert copies(job) == {0: (5, 6), 1: (5, 6)}, "that of step 5 was the first of the new ones"
        job.reset(replace(RUN, max_failures=0))
        assert [report.loss for report in job.train()] == losses


def test_a_rewind_begins_copies_anew(elsewhere, tmp_path):
    """Old copies of later steps would be taken for those of the steps that are computed from other data then."""

    def data(step, microbatch, dp):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
        return x / 0.0 if step == 5 else x, x.sin()

    layers, folder = (
        rp.Layers(lambda: [nn.Linear(4, 8), nn.Linear(8, 4)], nn.functional.mse_loss),
        str(tmp_path / "run"),
    )
    run = replace(RUN, model=layers, data=rp.Batches(data), nonfinite="rewind", save_every=3, folder=folder)
    with rp.launch(run) as job:
        job.train(5)
        share = job._starter.active.snapshots.source[0]
        before = content(files_of(job, slice(3, None)), share, 4)
        job.train(1)  # its data is not finite: back to the checkpoint of step 3, and on to step 6 with other data
        job.train(1)
        assert copies(job) == {0: (4, 6), 1: (4, 6)}
        own, copied = files_of(job, slice(3)), files_of(job, slice(3, None))
        assert before != content(copied, share, 4)
        assert content(copied, share, 6) == content(own, share, 6)


def test_on_one_node_there_are_no_copies():
    with rp.launch(RUN) as job:
        job.train(2)
        assert (job._starter.active.snapshots.pace, copies(job)) == (None, {})
