"""What tests on real actors share: jobs, and what one plain process has computed. A launch takes seconds, a reset does
not."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def forecasts_of_any_build(torch_for_cpus):
    """All tests here take forecasts of memory for those of a torch for CPUs."""


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Run a command line; returns exit code, standard output, standard error. Run folders are not in the checkout."""

    def run(*words):
        from raypar.cli.main import run_command

        for place in ("raypar.job.start.run_folders.RUNS", "raypar.config.conflicts.outputs.RUNS"):
            monkeypatch.setattr(place, str(tmp_path / "runs"))
        capsys.readouterr()
        code = run_command([str(word) for word in words])
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
def job_on(pool):
    """A function from a number to a job that has as many actors at least: one for all tests, while it can go on."""
    import raypar as rp

    held = []

    def job(actors):
        ended = bool(held) and held[0]._lifetime.failure is not None  # the next test may end it too
        if not held or ended or held[0].num_actors < actors:
            close()
            with pool.serving():
                held.append(rp.launch(rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=max(4, actors)))))
            pool.standing = close
        return held[0]

    def close():
        while held:
            held.pop().close()
        pool.standing = lambda: None

    yield job
    close()


@pytest.fixture(scope="session")
def job_of(job_on):
    """A function from a run to its job, on actors that are there if possible: a launch takes seconds, a reset does
    not."""
    from raypar.actors.specs.worlds import world_of

    def job(run, **words):
        job = job_on(world_of(run).size)
        job.reset(run, **words)
        return job

    return job


@pytest.fixture
def plain_once(monkeypatch):
    """``verify`` trains in a plain process once for all layouts of a run."""
    from tests.support.plain import trained

    monkeypatch.setattr("raypar.parity.verify.train_plainly", trained)
