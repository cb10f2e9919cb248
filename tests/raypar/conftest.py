"""What tests on real actors share: jobs, and what one plain process has computed. A launch takes seconds, a reset does
not."""

from __future__ import annotations

from functools import cache

import pytest


@pytest.fixture
def said(capsys):
    """Run a command line; returns exit code, standard output, standard error."""

    def run(*words):
        from raypar.cli import main

        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def by_value(request):
    """Actors can't import a test module."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def job_on(cluster):
    """A function from a number to a job that has as many actors at least: one for all tests, while it can go on."""
    import raypar as rp

    held = []

    def job(actors):
        if held and (held[0]._failure is not None or held[0].num_actors < actors):
            size = actors if held[0]._failure is not None else max(4, actors)
            close()
        else:
            size = actors
        if not held:
            held.append(rp.launch(rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=size))))
        return held[0]

    def close():
        while held:
            held.pop().close()

    yield job
    close()


@pytest.fixture(scope="session")
def job_of(job_on):
    """A function from a run to its job, on actors that are there if possible: a launch takes seconds, a reset does
    not."""
    from raypar.config import world_of

    def job(run, **words):
        job = job_on(world_of(run).size)
        job.reset(run, **words)
        return job

    return job


@pytest.fixture(scope="session")
def trained():
    from raypar.parity import train_plainly

    return cache(train_plainly)


@pytest.fixture
def plain_once(monkeypatch, trained):
    """``verify`` trains in a plain process once for all layouts of a run: that process is told nothing of a layout."""
    import raypar as rp

    told = ("model", "microbatches", "micro_batch_size", "data", "optim", "clip", "seed", "steps", "threads")

    def train(run):
        return trained(rp.Run(mesh=rp.Mesh(dp=run.mesh.dp), **{name: getattr(run, name) for name in told}))

    monkeypatch.setattr("raypar.parity.train_plainly", train)
