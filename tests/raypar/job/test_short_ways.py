"""How many functions lie between what the user calls and what is computed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.worker.worker import Worker
from raypar.job.job import Job
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.steps.training_loop import TrainingLoop
from raypar.reporting.record import Record
from tests.support.team import Team, batch, linears, mse
from tests.support.thread_jobs import Handle, Lasting, ThreadCalls

ROOT = Path(__file__).parents[3]
OWN = tuple(str(ROOT / folder) for folder in ("actors", "schedules", "raypar"))
MOST = 8  # of a step, those of the driver and of an actor together, with the `perform` itself


def own_frames():
    """Count raypar's functions under way in this thread, without comprehensions: of Python 3.12 these have no frame."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        count += code.co_filename.startswith(OWN) and code.co_name != "<listcomp>"
    return count


class Counted(Handle):
    """A handle that notes how deep the driver is where it calls the actor."""

    def __init__(self, actor, depths):
        super().__init__(actor)
        self._depths = depths

    def __getattr__(self, name):
        method = super().__getattr__(name)

        def remote(*args):
            self._depths.append(own_frames())
            return method.remote(*args)

        return SimpleNamespace(remote=remote)


def job_of(run, depths):
    """A job of a run without Ray: its actors are threads, and none of them fails."""
    team = Team.of(run)
    handles = [Counted(actor, depths) for actor in team.all]
    calls = ThreadCalls(handles, team.world, 90.0)
    loaded = LoadedRun(run, team.programs["train"], team.world, calls, Skeleton(run.model, run.seed))
    starter = SimpleNamespace(
        is_due=lambda: False,
        lacks_copies=lambda stops: False,
        copy_due=lambda step: 0,
        learn=lambda *_: None,
        active=SimpleNamespace(utilisation=None),
    )
    job = Job.__new__(Job)
    job._loop = TrainingLoop(Lasting(), "cpu", loaded, Record(run), starter)
    return job, handles


def test_a_step_takes_few_calls_to_its_first_action(monkeypatch):
    sent, inside, perform = list[int](), list[int](), Worker.perform

    def counted(worker, action):
        inside.append(own_frames() + 1)
        return perform(worker, action)

    monkeypatch.setattr(Worker, "perform", counted)
    run = rp.Run(
        model=rp.Layers(linears(), mse), data=rp.Batches(batch), mesh=rp.Mesh(pp=2), microbatches=2, steps=1, clip=None
    )
    job, handles = job_of(run, sent)
    try:
        assert job.step().step == 0
    finally:
        for handle in handles:
            handle.close()
    assert 4 < max(sent) + max(inside) <= MOST
