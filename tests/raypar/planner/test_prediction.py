"""One prediction before a run and one from its steps, and each says which it is."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.prediction import IN_SLOTS, from_flops, from_steps
from raypar.planner.sizes.sized_run import SizedRun
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.forecasting import forecast_and_measured, forecast_of
from raypar.reporting.report import Report
from raypar.reporting.summary import _passes, closing_rows, log_plan, plan_rows, planned_grid
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.formatting import milliseconds
from raypar.schedules.schedule import Schedule


def predicted(run, schedule):
    return from_flops(SizedRun.of(run, schedule))


REPORT = Report(0, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.2, None, (2, 1), (5, 6))


def test_a_dry_run_has_one_bubble():
    run = recipe("gpt-small")
    schedule = check_run(run)["train"]
    told = dict(plan_rows(run, schedule))["bubble"]
    assert told == predicted(run, schedule).bubble == "8.5% predicted from FLOPs and bytes"
    *_, last = planned_grid(schedule, told).splitlines()
    assert last == f"1f1b: bubble {told}; the grid shows the order, a slot for each action"


def test_a_dry_run_advises_against_a_long_bubble_and_fewer_microbatches_than_ranks():
    def advised(**changes):
        run = replace(recipe("gpt-small"), **changes)
        return [told for name, told in plan_rows(run, check_run(run)["train"]) if name == "advice"]

    assert not advised()
    (text,) = advised(microbatches=1)
    few = "1 microbatch is fewer than the 2 pipeline ranks, and the bubble takes 42% of a step"
    assert text == f"{few}: with 2 microbatches it would take 18%"
    (text,) = advised(microbatches=3)
    assert re.fullmatch(r"the bubble takes 1\d% of a step: with 6 microbatches it would take \d+%", text)
    assert not advised(mesh=Mesh(dp=2), microbatches=1)


def test_more_microbatches_are_advised_only_where_they_help():
    def advised(**changes):
        run = replace(recipe("gpt-tiny"), **changes)
        return [text for name, text in plan_rows(run, check_run(run)["train"]) if name == "advice"]

    instead = "with schedule 1f1b, which may hold more activations, it would take"
    (text,) = advised(schedule="naive", microbatches=16)
    assert text.startswith("the bubble takes 5") and instead in text
    fixed = Schedule.of("fixed", [[f"{rank}{op}{at}" for at in range(4) for op in "FB"] for rank in range(2)])
    (text,) = advised(schedule=fixed, microbatches=4)
    assert instead in text
    assert not advised(schedule="naive", microbatches=1), "neither more microbatches nor 1f1b help"
    (text,) = advised(schedule="v-min", mesh=Mesh(pp=4), microbatches=32)
    assert instead in text


def test_of_own_layers_the_bubble_is_in_slots():
    layers = Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss)
    run = Run(model=layers, data=Batches(lambda *_: (torch.ones(2, 4), torch.ones(2, 4))), mesh=Mesh(pp=2))
    told = dict(plan_rows(run, check_run(run)["train"]))
    assert told["bubble"].endswith("predicted in slots")
    assert told["layers of each stage"] == "1 1" and "time" not in told, "of own layers no FLOPs are known"
    assert "weights 80 B, gradients 80 B" in told["memory, pp=0"]


def test_a_summary_names_both_predictions():
    run = recipe("gpt-small")
    schedule = check_run(run)["train"]
    measured = predicted(run, schedule).timeline  # for want of a step
    prediction = from_steps(measured, [measured])
    overlay = Overlay(measured, prediction.timeline, prediction.source)
    rows = dict(closing_rows(run, schedule, [REPORT], Evaluation(1, 2.5, 64, 0.5), 1.0, 2.0, {}, overlay))
    assert rows["bubble"] == (
        "20.0% measured (median), 8.5% predicted from FLOPs and bytes; "
        "8.5% predicted from the measured costs of steps before"
    )
    assert rows["why they differ"] == "FLOPs and bytes leave out the optimizer, and other programs on these cores"
    assert replace(prediction, source=IN_SLOTS).leaves_out.startswith("slots take all stages to be as long")
    assert overlay.titles[1].endswith("(from the measured costs of steps before)")
    assert from_steps(measured, []).source == "from the measured costs of the step itself"


def test_a_log_begins_with_what_the_run_needs(caplog):
    run = recipe("gpt-tiny")
    with caplog.at_level(logging.INFO):
        log_plan(run, check_run(run)["train"], Skeleton(run.model, run.seed))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("raypar.reporting")]
    assert lines[0] == "actors: 2 = pp 2"
    told = "time: 0:00:00 and more: 20 steps of 23.6 ms and more, "
    told += "predicted from FLOPs and bytes, and at least 1 ms for each block and microbatch"
    assert told in lines, "4 x 4 ms, and a bubble of 32.3 %"
    assert {"parameters", "memory, pp=0", "memory, pp=1", "memory in all", "bubble"} <= {
        line.partition(":")[0] for line in lines
    }


def test_a_step_of_large_blocks_lasts_as_long_as_its_flops():
    run = recipe("gpt-small", device="cpu")
    schedule = check_run(run)["train"]
    step = milliseconds(predicted(run, schedule).timeline.makespan)
    assert dict(plan_rows(run, schedule))["time"].endswith(
        f"100 steps of {step} and more, predicted from FLOPs and bytes"
    )


def test_a_plan_says_that_stages_have_tied_weights_once_and_long_steps_in_seconds():
    run = recipe("gpt-124m", device="cpu")
    rows = dict(plan_rows(run, check_run(run)["train"]))
    told = "124,412,160; a stage has 7.1 M to 60.6 M with tied weights at their home alone; an actor holds 28.3 M"
    assert rows["parameters"] == f"{told} to 60.6 M"
    assert re.search(r"2,000 steps of \d+\.\d s and more", rows["time"])
    assert "tied" not in dict(plan_rows(recipe("gpt-tiny"), check_run(recipe("gpt-tiny"))["train"]))["parameters"]


def test_a_plan_says_how_often_it_passes_over_its_text(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(64, 96)) * 32)
    run = recipe("gpt-tiny", data=Text(str(tmp_path / "text.txt"), val_fraction=0.25, cache=str(tmp_path)))
    rows = dict(plan_rows(run, check_run(run)["train"]))
    # 20 steps of 8 samples, of windows of 32 tokens: 23 fit among 768 tokens with the one that follows each
    assert rows["data"] == "768 tokens to train with, 256 to validate (a part of it); the run makes 7 passes over them"
    often = dict(plan_rows(replace(run, steps=2000), check_run(run)["train"]))["data"]
    assert often.endswith("the run makes 696 passes over them")
    assert _passes(1.0) == "the run makes 1 pass over them"


def test_the_head_the_summary_and_the_record_have_the_same_step():
    """Small blocks take longer than their FLOPs, wherever the step is shown."""
    run = recipe("gpt-tiny")
    schedule = check_run(run)["train"]
    found = forecast_of(run, schedule, None)
    shown = f"{1e3 * found.step:.1f} ms"
    assert any(name == "time" and f"steps of {shown} and more" in told for name, told in plan_rows(run, schedule))
    assert str(forecast_and_measured(found, [133.0], [])[0]).startswith(f"133 ms measured, {shown} predicted")
