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


@pytest.fixture(scope="module")
def job_of(cluster):
    """A function from a run to its job: on the actors of the test before if they fit and can go on, else a new one."""
    import raypar as rp
    from raypar.config import world_of

    held = []

    def job(run):
        if held and held[0]._failure is None and world_of(held[0].run) == world_of(run):
            held[0].reset(run)
        else:
            close()
            held.append(rp.launch(run))
        return held[0]

    def close():
        while held:
            held.pop().close()

    yield job
    close()


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
