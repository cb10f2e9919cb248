"""What was predicted of a run is held against what it took: in the summary, in the folder, in the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.cli.main import run_command
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.paths import FORECAST
from raypar.planner.calibrated.calibration_file import VARIABLE, write_calibration
from raypar.planner.prediction import FROM_CALIBRATION, FROM_FLOPS, why_uncalibrated
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.forecasting import forecast_and_measured, forecast_of
from raypar.reporting.html.page import page
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import read
from raypar.reporting.run_folder.write import Folder
from raypar.reporting.summary import closing_rows, plan_rows
from tests.support.calibrations import known

MIB = 2**20
RUN = Run(
    model=GPT(layers=4, hidden=64, heads=2, seq=64), mesh=Mesh(pp=2), microbatches=4, micro_batch_size=1, device="cpu"
)


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    write_calibration(known(), tmp_path / "calibration.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.json"))


def forecast(run=RUN, step=0):
    return forecast_of(run, check_run(run)["train"], None, step)


def report(step, ms, peaks=(300 * MIB, 200 * MIB)):
    return Report(step, 2.5, 1.0, 1e-3, 256, 1e3, ms, 0.2, None, (2, 1), peaks)


def written(folder, run, *reports, step=0):
    """A run folder with these steps, of which the last one took what was predicted, twice as slowly."""
    schedule = check_run(run)["train"]
    made = Folder(str(folder))
    made.begin(replace(run, folder=str(folder)), schedule, step, found := forecast_of(run, schedule, None, step))
    for one in reports:
        made.write(one.to_dict())
    if found.timeline is not None:
        slow = [event._replace(end=2 * event.end, start=2 * event.start) for event in found.timeline.events]
        made.measured(reports[-1].step, [replace(found.timeline, events=tuple(slow), measured=True)], {})
    made.close()
    return found


def test_the_error_is_in_percent_of_what_was_measured():
    found = replace(forecast(), step=0.09, peaks=(330 * MIB, 200 * MIB))
    time, *peaks = map(str, forecast_and_measured(found, [100.0, 110.0, 90.0], (300 * MIB, 200 * MIB)))
    assert time == "100 ms measured, 90.0 ms predicted (-10%)"
    assert peaks == ["300 MiB measured, 330 MiB predicted (+10%)", "200 MiB measured, 200 MiB predicted (+0%)"]
    assert str(forecast_and_measured(replace(found, step=None), [100.0], ())[0]) == "100 ms measured"
    assert str(forecast_and_measured(found, [], ())[0]) == "90.0 ms predicted"
    assert forecast_and_measured(replace(found, since=20), [], ())[0].name == "step time after step 20"
    assert [str(one) for one in forecast_and_measured(found, [], (0, MIB))[1:]] == [
        "330 MiB predicted",
        "1 MiB measured, 200 MiB predicted (+19900%)",
    ]
    assert str(forecast_and_measured(replace(found, peaks=()), [], (MIB,))[1]) == "1 MiB measured"


def test_a_summary_has_step_and_peak_beside_their_predictions(calibrated):
    found, schedule = forecast(), check_run(RUN)["train"]
    assert (found.source, found.better) == (FROM_CALIBRATION, "")
    reports = [report(step, 2e3 * found.step) for step in range(3)]
    rows = dict(closing_rows(RUN, schedule, reports, Evaluation(3, 2.5, 64, 0.5), 1.0, 2.0, {}))
    assert rows["step time"].endswith("predicted (-50%), from the calibration")
    assert rows["peak memory"].startswith("pp=0 300 MiB measured, ")
    assert rows["peak memory"].count("predicted (") == 2
    assert "calibration" not in rows


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"threads": 2},
            "the calibration is of threads=1 an actor, and the run has 2: threads=1 is predicted in seconds",
        ),
        ({"precision": Precision(compute="bf16")}, "a calibration is of fp32, and the run computes in bf16"),
        ({"token_slices": 2}, "a calibration is of whole sequences, and the run has token_slices=2"),
        ({"device": "cuda"}, "of device 'cpu', and the run is for 'cuda': raypar calibrate measures anew"),
    ],
)
def test_a_calibration_that_does_not_fit_says_why(calibrated, changed, why):
    run = replace(RUN, **changed)
    assert why in why_uncalibrated(run)
    assert forecast(run).source == FROM_FLOPS
    assert why in dict(plan_rows(run, check_run(run)["train"]))["calibration"]
    assert "calibration" not in dict(plan_rows(RUN, check_run(RUN)["train"]))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"load": 99.0}, "it was measured on a busy machine (load 99.0 on "),
        ({"versions": {"torch": "1.0"}}, "it is of torch 1.0, and here is 2."),
        ({"load": 99.0, "versions": {"torch": "1.0"}}, ", and it is of torch 1.0, and here is 2."),
    ],
    ids=["busy", "torch", "both"],
)
def test_a_calibration_that_may_be_wrong_says_why(tmp_path, monkeypatch, changed, why):
    """It is used all the same; the head and the summary say the same of it."""
    one = known()
    write_calibration(replace(one, origin=replace(one.origin, **changed)), tmp_path / "calibration.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.json"))
    found = forecast(RUN)
    assert found.source == FROM_CALIBRATION
    assert why in found.better and found.better.endswith(": raypar calibrate measures anew")
    assert dict(plan_rows(RUN, check_run(RUN)["train"]))["calibration"] == found.better


def test_without_a_calibration_it_says_how_to_get_one(tmp_path, monkeypatch):
    assert why_uncalibrated(RUN).startswith(f"{VARIABLE} is empty")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "calibration.json: raypar calibrate measures this machine or cluster in a minute" in why_uncalibrated(RUN)
    rows = dict(closing_rows(RUN, check_run(RUN)["train"], [report(0, 1.0)], Evaluation(1, 2.5, 64, 0.5), 1.0, 2.0, {}))
    assert rows["calibration"] == why_uncalibrated(RUN)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    assert "can't be read" in why_uncalibrated(RUN)


def test_own_layers_have_no_prediction_in_seconds(tmp_path):
    layers = Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss)
    run = Run(model=layers, data=Batches(lambda *_: (torch.ones(2, 4), torch.ones(2, 4))), mesh=Mesh(pp=2))
    found = written(tmp_path / "run", run, report(0, 1.0))
    assert (found.step, found.peaks, found.timeline) == (None, (), None)
    assert "not layers of your own" in found.better
    assert "Predicted before the run" in page(read(tmp_path / "run"))


def test_a_folder_keeps_its_forecast_and_the_report_shows_it(calibrated, tmp_path, capsys):
    folder = tmp_path / "run"
    step = forecast().step
    found = written(folder, RUN, *(report(number, 2e3 * step) for number in range(4)))
    assert read(folder).forecast == found
    text = page(read(folder))
    assert "Predicted before the run" in text
    assert ">-50%<" in text
    assert "the predicted makespan is off by -50%" in text
    run_command(["report", str(folder)])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("step time: ") and told[0].endswith("predicted (-50%)")
    assert told[1].startswith("peak memory, pp=0: 300 MiB measured, ")
    assert told[3] == "predicted from the calibration"


def test_steps_of_another_layout_are_not_held_against_a_forecast(calibrated, tmp_path):
    folder, slow = tmp_path / "run", [report(number, 1e9) for number in range(2)]
    later = [report(number, 2e3 * forecast().step) for number in range(2, 5)]
    written(folder, RUN, *slow)
    written(folder, RUN, *later, step=2)
    text = page(read(folder))
    assert ">-50%<" in text
    assert "of the steps after step 2" in text


@pytest.mark.parametrize("text", ["[]", "{}", '{"since": -1}', "nan", ""])
def test_a_damaged_forecast_is_told(calibrated, tmp_path, text):
    written(tmp_path / "run", RUN, report(0, 1.0))
    (tmp_path / "run" / FORECAST).write_text(text)
    with pytest.raises(ConfigError, match=FORECAST):
        read(tmp_path / "run")


def test_a_folder_of_before_has_none(tmp_path):
    written(tmp_path / "run", RUN, report(0, 1.0))
    (tmp_path / "run" / FORECAST).unlink()
    assert read(tmp_path / "run").forecast is None
    assert "The folder has no prediction" in page(read(tmp_path / "run"))


@pytest.mark.parametrize(
    ("set_to", "folder", "is_advised"),
    [(None, "runs/a", True), ("5", "runs/a", True), ("900", "runs/a", False), ("5", None, False)],
)
def test_a_job_of_long_steps_is_advised_to_be_given_time_when_it_is_stopped(monkeypatch, set_to, folder, is_advised):
    run = replace(RUN, model=replace(RUN.model, layers=400, hidden=2048, heads=16), folder=folder)

    def advised():
        rows = plan_rows(run, check_run(run)["train"])
        return [text for name, text in rows if name == "advice" and text.startswith("ray job stop kills after")]

    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert not advised(), "this is no job of ray job submit"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    if set_to is not None:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", set_to)
    assert len(advised()) == is_advised
    for text in advised():
        assert f"after {set_to or 3} s" in text
        setting = text.partition("--runtime-env-json '")[2].partition("'")[0]
        assert int(json.loads(setting)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
