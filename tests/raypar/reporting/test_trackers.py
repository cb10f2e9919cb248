"""Trackers: what they are told, and that none of them can stop a run."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.record import Record, _without_secrets
from raypar.reporting.report import Report
from raypar.schedules import build, lower
from raypar.user_name import user_name

REPORT = Report(7, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.25, None, (2, 1), (5, 6), samples=8)
EVALUATION = Evaluation(8, 1.0, 64, 0.5)
SCALARS = {
    "train/loss": 2.5,
    "train/grad_norm": 1.0,
    "train/lr": 1e-3,
    "train/tokens": 256.0,
    "time/tokens_per_s": 1e3,
    "time/step_ms": 256.0,
    "time/bubble": 0.25,
    "time/communication": 0.0,
    "memory/in_flight/pp0": 2.0,
    "memory/in_flight/pp1": 1.0,
    "memory/peak_memory/pp0": 5.0,
    "memory/peak_memory/pp1": 6.0,
    "train/samples": 8.0,
    "train/skipped": 0.0,
}


def told(**changes):
    """Tell a run's trackers of a step and an evaluation."""
    record = Record(run := Run(mesh=Mesh(pp=2), **changes))
    record.begin(run, lower(build("1f1b", 2, 4)), 7, "a-job")
    record.write(REPORT)
    record.write(EVALUATION)
    record.close()
    record.close()


class Calls:
    """A module that writes down what is called; ``wrong`` raises."""

    def __init__(self, wrong=None):
        self.calls, self._wrong = [], wrong

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, kwargs) if kwargs else (name, *args))
            if name == self._wrong:
                raise RuntimeError("no luck with api_key=sk-12 for https://me:pw@host/x\nand more")
            return self

        return call


def test_wandb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Calls())
    told(track=("wandb",), folder=str(tmp_path / "run"))
    (init, options), step, evaluation, finish = wandb.calls
    assert (init, options["name"], options["dir"], options["config"]["mesh"]["pp"]) == (
        "init", "run", str(tmp_path / "run"), 2,
    )  # fmt: skip
    assert step == ("log", {"step": 8, **SCALARS})
    assert evaluation[1]["step"] == 8
    assert evaluation[1]["eval/loss"] == 1.0
    assert set(evaluation[1]) & set(step[1]) == {"step"}, "training and evaluation are never in one tag"
    assert finish == ("finish",)


def test_mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", mlflow := Calls())
    told(track=("mlflow",))
    assert [call[0] for call in mlflow.calls] == [
        "start_run", "log_params", "log_metrics", "log_metrics", "flush_async_logging", "end_run",
    ]  # fmt: skip
    assert mlflow.calls[0] == ("start_run", {"run_name": "a-job"})
    assert mlflow.calls[1][1]["mesh.pp"] == 2
    assert mlflow.calls[2] == ("log_metrics", SCALARS, {"step": 8, "synchronous": False})


def test_the_gauges_of_ray(monkeypatch):
    gauges = remembered_gauges(monkeypatch)
    told(track=("ray",))
    its = {"run": "a-job", "job": "a-job", "user": user_name()}
    assert {name: values for name, values in gauges.items() if values} == {  # without experts: none of theirs
        "raypar_loss": [(2.5, its)],
        "raypar_grad_norm": [(1.0, its)],
        "raypar_tokens_per_s": [(1e3, its)],
        "raypar_bubble": [(0.25, its)],
        "raypar_peak_memory_bytes": [(5, its | {"pp": "0"}), (6, its | {"pp": "1"})],
    }


@pytest.mark.parametrize(("address", "has"), [("10.0.0.1:6379", True), (None, False)])
def test_in_a_cluster_rays_metrics_are_told_of_every_run_and_those_of_one_name_are_kept_apart(
    monkeypatch, tmp_path, address, has
):
    gauges = remembered_gauges(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    told(folder=str(tmp_path / "first"))
    assert [its["job"] for _, its in gauges.get("raypar_loss", ())] == ["a-job"] * has
    assert [its["run"] for _, its in gauges.get("raypar_loss", ())] == ["first"] * has


def remembered_gauges(monkeypatch):
    """Gauges that only remember."""
    import raypar.reporting.trackers.gauges as module

    found = {}

    def gauge(name, what, tags):
        sets = found.setdefault(name, [])

        def put(value, its_tags):
            assert set(its_tags) == set(tags)
            sets.append((value, dict(its_tags)))

        return SimpleNamespace(set=put)

    monkeypatch.setattr(module, "gauge", gauge)
    return found


def test_ray_itself_takes_them(cluster, caplog):
    told(track=("ray",))
    assert not caplog.records


def test_tensorboard(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = set(sys.modules)
    told(track=("tensorboard",), folder=str(tmp_path / "run"))
    assert not caplog.records
    assert not {"torch._dynamo", "sympy"} & (set(sys.modules) - before)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(8, 1.0)]
    assert set(SCALARS) <= set(events.Tags()["scalars"])


# --- none of them can stop a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["start_run", "log_metrics", "flush_async_logging"])
def test_one_that_fails_is_a_warning_and_told_no_more(monkeypatch, caplog, tmp_path, wrong):
    monkeypatch.setitem(sys.modules, "mlflow", mlflow := Calls(wrong))
    monkeypatch.setitem(sys.modules, "wandb", wandb := Calls())
    told(track=("mlflow", "wandb"), folder=str(tmp_path / "run"))
    said = "mlflow gets no more of this run (no luck with api_key=*** for https://***@host/x)"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert sum(call[0] == "log_metrics" for call in mlflow.calls) == {"start_run": 0, "log_metrics": 1}.get(wrong, 2)
    assert len(wandb.calls) == 4, "the other one is told all"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert said in log
    assert "sk-12" not in log


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("WANDB_API_KEY=abc def", "WANDB_API_KEY=*** def"),
        ("{'token': 'abc', 'x': 1}", "{'token': '***', 'x': 1}"),
        ("password : abc", "password : ***"),
        ("client_secret_v2=abc", "client_secret_v2=***"),
        ("http://host:5000/path", "http://host:5000/path"),
        ("https://abc@host/path", "https://***@host/path"),
        ("12 tokens/s", "12 tokens/s"),
    ],
)
def test_no_secret_is_said(text, hidden):
    assert _without_secrets(text) == hidden


# --- before a run starts ---------------------------------------------------------------------------------------------


def test_what_is_missing_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("raypar.config.conflicts.outputs.find_spec", lambda name: None)
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError) as caught:
        check_run(Run(track=("tensorboard", "wandb", "mlflow", "ray")))
    assert caught.value.faults == [
        "track has 'tensorboard', but there is no package tensorboard: pip install tensorboard",
        "track has 'wandb', but there is no package wandb: pip install wandb",
        "track has 'mlflow', but there is no package mlflow: pip install mlflow",
        "track has 'tensorboard', which writes into the run's folder: give a folder",
    ]


def test_a_folder_that_a_tracker_left_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("raypar.config.conflicts.outputs._PACKAGES", {"wandb": "wandb"})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no package wandb"):
        check_run(Run(track=("wandb",)))


def test_an_unknown_one_is_told():
    with pytest.raises(ConfigError, match=r"track\.0 is 'tensorbord'"):
        check_run(Run(track=("tensorbord",)))


def test_nothing_is_imported_that_was_not_asked_for():
    code = (
        "import sys, raypar.reporting.record, raypar.config.run\n"
        "print(*sorted({'torch', 'ray', 'wandb', 'mlflow', 'tensorboard'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "\n"), run.stderr
