"""Ctrl-C and SIGTERM in a driver: the run is saved, whether it trains by ``job.train`` or takes its steps itself."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cluster.interrupts import Sigterm
from raypar.cluster.lifecycle.ray_cluster import _own_sigterm
from raypar.job.recover import stops
from raypar.planner.hardware import stop_wait
from raypar.planner.hardware.stop_wait import SAVE_SECONDS

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


def slow(seconds):
    """A run whose third step takes long in each stage."""

    class Slow(nn.Linear):
        def forward(self, x):
            if self.training and float(x.detach().abs().max()) > 3.5:  # in step 3 the inputs say so
                time.sleep(seconds)
            return super().forward(x)

    def batch(step, microbatch, dp):
        generator = torch.Generator().manual_seed(100 * step + microbatch)
        x = torch.rand(4, 4, generator=generator) + (4.0 if step == 2 else 0.0)
        return x, x.sum(1, keepdim=True)

    model = rp.Layers(lambda: [Slow(4, 4), nn.Linear(4, 1)], loss=nn.functional.mse_loss)
    optim = rp.SGD(lr=1e-3)
    return rp.Run(model, data=rp.Batches(batch), mesh=rp.Mesh(pp=2), microbatches=2, steps=5, optim=optim, timeout=60.0)


@pytest.mark.parametrize("how", ["sigterm", pytest.param("two ctrl-c", marks=pytest.mark.long)])
def test_a_run_that_is_stopped_in_a_long_step_is_saved_at_once_as_it_was_before(
    tmp_path, sigterm, monkeypatch, how, caplog
):
    """Whoever stops it would kill it before the step has ended."""
    with rp.launch(slow(0.0)) as job:
        whole = [report.loss for report in job.train()]
    monkeypatch.setattr(stop_wait, "_OF_OTHERS", SAVE_SECONDS)  # so that each step is too long
    number = signal.SIGTERM if how == "sigterm" else signal.SIGINT
    sent = list[float]()

    def stop():
        for _ in range(1 if how == "sigterm" else 2):
            time.sleep(1.0)
            sent.append(time.time())
            os.kill(os.getpid(), number)

    def on(report):
        if report.steps_taken == 2:
            threading.Thread(target=stop).start()

    folder = str(tmp_path / "run")
    with (
        caplog.at_level(logging.INFO, "raypar"),
        pytest.raises(SystemExit if how == "sigterm" else KeyboardInterrupt) as caught,
        rp.launch(replace(slow(8.0), folder=folder)) as job,
    ):
        job.train(on=on)
    assert any("actors keep copies of their state" in text for text in caplog.messages)
    (saved_at,) = [one.created for one in caplog.records if one.message == "saved as step-00000002, from memory"]
    assert saved_at - sent[-1] < 4.0, "the step itself takes 8 s and more"
    assert f"resume={folder!r} (step-00000002)" in "".join(caught.value.__notes__)
    with rp.launch(replace(slow(0.0), folder=None), resume=folder) as job:
        assert [report.loss for report in job.train()] == whole[2:]


def test_where_copies_have_no_room_the_run_goes_on_without(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stop_wait, "_OF_OTHERS", SAVE_SECONDS)
    monkeypatch.setattr(stops, "facts_of", lambda nodes, collector: {node.id: {"free": 10} for node in nodes})
    with rp.launch(replace(RUN, steps=3, folder=str(tmp_path / "run"))) as job:
        assert len(job.train()) == 3
    (told,) = [text for text in caplog.messages if "copies" in text]
    assert "it would lose all since its last checkpoint; copies (" in told and told.endswith("have no room")


def test_short_steps_keep_no_copies(tmp_path):
    with rp.launch(replace(RUN, steps=3, folder=str(tmp_path / "run"))) as job:
        job.train()
        assert not job._loading.starter.active.snapshots.are_taken(job.run)


@pytest.mark.parametrize(
    ("is_job", "setting", "wait"), [(False, "60", 10.0), (True, None, 3.0), (True, "60", 60.0), (True, "soon", 3.0)]
)
def test_how_long_whoever_stops_a_run_waits(monkeypatch, is_job, setting, wait):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    if is_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    if setting is not None:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", setting)
    assert stop_wait.stop_wait() == wait
    assert stop_wait.outlasts(wait - SAVE_SECONDS + 0.1) and not stop_wait.outlasts(wait - SAVE_SECONDS - 0.1)


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
