"""Experts on real actors of their own."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

import raypar as rp

TINY = rp.recipe("moe-tiny")
SMALL = replace(TINY, model=replace(TINY.model, layers=2), microbatches=2, steps=2)


@pytest.mark.long
def test_verify_finds_them_equal_with_dropout_and_recomputation(job_on):
    run = replace(SMALL, mesh=rp.Mesh(dp=2, expert_actors=2), recompute="full")
    verdict = rp.verify(run, job_on(4))
    assert verdict.ok, str(verdict)
    assert run.model.dropout > 0


def test_a_killed_one_is_named_as_are_all_in_a_repl(kept_actors):
    from raypar.cluster.calls.calls import ray

    def pid(worker):
        return os.getpid()

    with rp.launch(replace(SMALL, mesh=rp.Mesh(expert_actors=1), steps=10_000)) as job:
        assert list(job.memory()) == list(job.ledger()) == ["pp=0", "pp=0 expert=0"]
        victim = ray.get(job._loop.loaded.handles[1].__ray_call__.remote(pid))
        threading.Timer(0.5, lambda: os.kill(victim, signal.SIGKILL)).start()
        with pytest.raises(rp.ActorDiedError, match=r"actor pp=0 expert=0 died during step"):
            job.train()
