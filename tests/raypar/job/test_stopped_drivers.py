"""Ctrl-C and SIGTERM in a driver: the run is saved, whether it trains by ``job.train`` or takes its steps itself."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

import raypar as rp
from raypar.cluster.interrupts import Sigterm
from raypar.cluster.ray_cluster import _own_sigterm

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
RUN = rp.Run(rp.GPT(layers=2, hidden=16, heads=2, seq=8), mesh=rp.Mesh(pp=2), microbatches=2, steps=8, timeout=20.0)


def saved(folder):
    """The names of a run's checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoints/step-*"))


@pytest.fixture
def sigterm():
    """The handler that a launch installs where the driver has none."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _own_sigterm():
        pass
    assert isinstance(signal.getsignal(signal.SIGTERM), Sigterm)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_job_train_saves_the_step_that_it_is_at_when_it_is_stopped(tmp_path, sigterm, number, error, caplog):
    def on(report):
        if report.steps_taken == 3:
            signal.raise_signal(number)

    with rp.launch(replace(RUN, folder=str(tmp_path / "run"))) as job:
        with pytest.raises(error) as caught:
            job.train(on=on)
        assert caught.value.__notes__ == [
            f"To go on, launch the run again with resume='{tmp_path}/run' (step-00000003)."
        ]
        assert saved(tmp_path / "run") == ["step-00000003"]
        assert "saved as step-00000003" in caplog.messages
        assert len(job.train()) == 5, "it can go on"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_steps_of_the_drivers_own_are_saved_too(tmp_path, sigterm, number, error):
    with pytest.raises(error) as caught, rp.launch(replace(RUN, folder=str(tmp_path / "run"))) as job:
        job.step()
        job.step()
        signal.raise_signal(number)
    assert saved(tmp_path / "run") == ["step-00000002"]
    assert len(caught.value.__notes__) == 1
    with rp.launch(replace(RUN, folder=None), resume=str(tmp_path / "run")) as job:
        assert job.next_step == 2


def test_what_has_no_folder_or_no_step_is_not_saved(tmp_path):
    with pytest.raises(KeyboardInterrupt), rp.launch(replace(RUN, folder=str(tmp_path / "run"))):
        raise KeyboardInterrupt
    assert saved(tmp_path / "run") == []
    with pytest.raises(KeyboardInterrupt), rp.launch(RUN) as job:
        job.step()
        raise KeyboardInterrupt


def test_a_driver_s_own_handler_stays():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with _own_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray replaces it
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
