"""What the report draws and tells of a run beside its losses: curves, marks, provenance, figures in the user's unit."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import Listed
from raypar.config.toml import plain_of, toml_of
from raypar.errors import Death, JobError
from raypar.job.recover.failures import Failure
from raypar.planner.cost_model import costs_on_paper
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.html.charts import ChartLine, Mark, line_chart
from raypar.reporting.html.compare import comparison
from raypar.reporting.html.events import happenings
from raypar.reporting.html.figures import History, actors_of, exp, flops_per_token, rate, significant, smoothed
from raypar.reporting.html.page import page, titled
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import Past, read
from raypar.schedules.action import Op
from raypar.schedules.formatting import duration
from tests.raypar.reporting.html.test_report import Reader

OWN = {"fn": "mine.layers", "loss": "torch.nn.functional.mse_loss", "seq": "none"}


def past(steps=3, lines=(), **changes):
    reports = [
        Report(step, 2.0, 1.0, 1e-3, 512, 1000.0, 512.0, 0.1, None, (1,), (5 << 20,)).to_dict() for step in range(steps)
    ]
    config = plain_of(Run(steps=steps))
    return replace(Past(Path("/runs/a"), config, [*reports, *lines], None, None, [], {}, []), **changes)


def own(**changes):
    return past(config=plain_of(Run()) | {"model": {**OWN, **changes}})


def log(*texts):
    return [f"2026-11-24T09:54:26+0000 {text}" for text in texts]


def texts(page):
    return " | ".join(Reader(page).texts)


def test_a_loss_that_is_no_cross_entropy_has_no_perplexity():
    assert "| perplexity |" in texts(page(past(lines=[Evaluation(3, 1.0, 9, 0.1).to_dict()])))
    assert "exp(loss) says nothing" in texts(page(own()))
    for loss in ("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"):
        assert "exp(loss) says nothing" not in texts(page(own(loss=loss, seq=32)))
        assert "exp(loss) says nothing" in texts(page(own(loss=loss))), "classes, of images say"
    assert (exp(0.0), exp(1e6), math.isnan(exp(math.nan))) == (1.0, math.inf, True)


def test_tokens_are_counted_over_the_steps_of_the_folder_and_others_are_told():
    assert History.of(past()).seen() == [(1, 512), (2, 1024), (3, 1536)]
    later = past()
    assert History.of(replace(later, metrics=later.metrics[2:])).seen() == [(3, 512)]
    assert "tokens seen since step 2" in texts(page(replace(later, metrics=later.metrics[2:])))
    assert "tokens seen" in texts(page(past()))


def test_what_has_no_tokens_is_counted_in_samples_and_else_in_targets():
    assert History.of(past()).unit == "tokens"
    assert History.of(own(seq=32)).unit == "tokens"
    run = own()
    assert "Targets/s" in texts(page(run))
    counted = replace(run, metrics=[{**line, "samples": 64} for line in run.metrics])
    assert History.of(counted).throughput() == [(step, 125.0) for step in (1, 2, 3)]
    assert {"Samples/s", "Samples seen"} <= set(Reader(page(counted)).texts)


def test_the_users_unit_is_counted_in_samples_or_in_elements():
    run = own()
    counted = replace(run, metrics=[{**line, "samples": 64} for line in run.metrics])
    named = replace(counted, config={**counted.config, "unit": "images"})
    assert History.of(named).throughput() == [(step, 125.0) for step in (1, 2, 3)]
    assert {"Images/s", "Images seen", "images/s, median"} <= set(Reader(page(named)).texts)
    assert History.of(replace(run, config=named.config)).unit == "targets", "an older folder does not have samples"
    assert History.of(replace(run, config={**run.config, "unit": "tokens"})).throughput()[0] == (1, 1000.0)


def test_steps_by_hand_have_no_times():
    lines = [
        line | {"by_hand": True, **dict.fromkeys(("tokens_per_s", "step_ms", "bubble"))} for line in past().metrics
    ]
    some = past(lines=[])
    some = replace(some, metrics=[*some.metrics[:2], lines[2]])
    assert [step for step, _ in History.of(some).throughput()] == [1, 2]
    reported = texts(page(some))
    assert "1 stepped by hand, whose times say nothing of a run" in reported
    assert "time in steps" in reported
    reported = texts(page(replace(some, metrics=lines)))
    assert "time in steps" not in reported
    assert "bubble, median" not in reported


def test_memory_is_told_by_kind():
    kinds = {"weights": [1 << 20], "gradients": [1 << 20], "optimizer": [2 << 20]}
    run = past()
    reported = Reader(page(replace(run, metrics=[{**line, "memory": kinds} for line in run.metrics]))).tips
    rest = "activations, process"
    assert {"pp=0: weights 1.0 MiB", "pp=0: optimizer 2.0 MiB", f"pp=0: {rest} 1.0 MiB"} <= set(reported)


def test_the_process_is_apart_and_what_is_not_in_the_peak_is_left_out():
    kinds = {"weights": [1 << 20], "process": [3 << 20], "offloaded": [9 << 20]}
    run = past()
    reported = Reader(page(replace(run, metrics=[{**line, "memory": kinds} for line in run.metrics])))
    bars = [tip for tip in reported.tips if tip.startswith("pp=0: ")]
    assert bars == ["pp=0: weights 1.0 MiB", "pp=0: activations 1.0 MiB"]
    assert any("with Python and torch, up to 3.0 MiB" in text for text in reported.texts)
    figures = reported.texts[reported.texts.index("Figures", reported.texts.index("Peak memory")) + 1 :]
    columns = dict(zip(figures[: figures.index("pp=0")], figures[figures.index("pp=0") + 1 :], strict=False))
    assert columns == {"weights": "1.0 MiB", "activations": "1.0 MiB", "process": "3.0 MiB"}


def test_smoothing_has_no_bias_to_the_first_value_no_lag_and_keeps_gaps():
    assert [value for _, value in smoothed([(1, 4.0), (2, 4.0), (3, 4.0)])] == pytest.approx([4.0] * 3)
    first, gap, last = smoothed([(1, 1.0), (2, math.nan), (3, 2.0)])
    assert (first[0], math.isnan(gap[1])) == (1, True)
    assert 1.0 < first[1] < 1.5 < last[1] < 2.0
    ramp = smoothed([(step, float(step)) for step in range(201)])
    assert ramp[100][1] == pytest.approx(100.0), "an average of the past alone would lag"


@pytest.mark.parametrize("moe", [None, MoE(experts=(4, 8), every=4, capacity=1.25)])
def test_model_flops_are_those_that_the_planner_predicts(moe):
    config = plain_of(Run(model=GPT(moe=moe)))
    costs = costs_on_paper(GPT(moe=moe), 1)
    assert flops_per_token(config) == pytest.approx(costs.of_stage[0, Op.F] + costs.of_stage[0, Op.B])
    assert flops_per_token({"model": OWN}) is None
    assert flops_per_token({"model": config["model"] | {"hidden": -1, "gone": True}}) is None, (
        "an older raypar wrote it"
    )
    assert actors_of({"mesh": {"pp": 2, "dp": 3, "tp": "2d:2x2", "gone": 1}}) == 24
    assert actors_of({"mesh": {"pp": "many"}}) is None


def test_utilisation_is_told_where_the_peak_is_known_and_else_why_not():
    assert "Utilisation is left out: the peak of the device is not known" in texts(page(past()))
    flops = History.of(past()).model_flops()[0][1]
    assert "step 1: utilisation 50%" in Reader(page(past(), peak=2 * flops)).tips
    assert "the FLOPs of the user's own layers are not known" in texts(page(own()))
    measured = [line | {"mfu": 0.4, "hfu": 0.5} for line in past().metrics]
    shown = page(past(metrics=measured))
    assert "of the run's GPUs, by their data sheets: MFU 40.0%, HFU 50.0%." in texts(shown)
    assert "step 1: model FLOPs 40%, with what is recomputed 50%" in Reader(shown).tips
    assert "Utilisation is left out" not in texts(shown)
    assert "step 1: utilisation 50%" in Reader(page(past(metrics=measured), peak=2 * flops)).tips, "--peak counts"
    assert [rate(value) for value in (0, 12, 1.5e12)] == ["0 FLOP/s", "12 FLOP/s", "1.5 TFLOP/s"]


def test_memory_is_told_by_kind_where_the_steps_have_it():
    assert "pp=0 | " in texts(page(past()))
    assert "pp=0: peak 5.0 MiB" in Reader(page(past())).tips


def test_the_step_axis_counts_from_1_and_marks_stand_on_it():
    marks = [Mark(7, "resume", "went on after step 7"), Mark(99, "failure", "elsewhere")]
    drawn = str(line_chart([ChartLine("a", [(step, 1.0) for step in range(1, 13)])], significant, marks=marks))
    assert '<span style="left: 0.0%">1</span>' in drawn
    assert drawn.count('class="sign"') == drawn.count('class="grid resume"') == 1
    assert 'title="went on after step 7"' in drawn
    assert '<span style="left: 0.0%">1</span>' in str(line_chart([ChartLine("a", [(20, 1.0), (50, 2.0)])], significant))
    late = str(line_chart([ChartLine("a", [(1001, 1.0), (1100, 2.0)])], significant))
    assert '<span style="left: 0.0%">1,001</span>' in late


def test_a_run_that_was_killed_and_went_on_has_both_marked():
    lines = log("INFO starting 2 actors", "INFO step  1/40  loss", "INFO step 12/40  loss", "INFO starting 2 actors")
    run = past(steps=40, log=[*lines, *log("INFO step 11/40  loss", "INFO step 40/40  loss")])
    assert [(mark.kind, mark.step) for mark in happenings(run)] == [("failure", 12), ("resume", 10)]
    assert "went on after step 10" in texts(page(run))


def test_a_run_that_was_killed_between_two_lines_of_its_log_has_taken_what_it_saved():
    lines = log("INFO actors: 2", "INFO step   1/4000  loss", "INFO actors: 2", "INFO step  62/100  loss")
    saved = [Listed(Path(f"/runs/a/checkpoints/step-000000{step}"), step, 1, 1, 1, []) for step in (60, 40)]
    marks = happenings(past(steps=100, log=[*lines, *log("INFO step 100/100  loss")], checkpoints=saved))
    assert [(mark.kind, mark.step) for mark in marks] == [("failure", 60), ("resume", 60)]
    assert marks[0].text == "ended after step 60 or a little later, before its last step"


def test_a_run_that_failed_and_went_on_is_marked_at_the_step_that_failed():
    died = "actor pp=0 died during step 18"
    lines = log("INFO actors: 2", "INFO step  1/40  loss", "INFO step 12/40  loss", f"ERROR {died}; seen from pp=1: it")
    went_on = log("INFO actors: 2", "INFO step 11/40  loss", "INFO step 40/40  loss")
    end = {"step": 18, "reason": died, "back_to": 17, "lost": 0.1, "replaced": [], "death": None, "is_end": True}
    run = past(steps=40, log=[*lines, *went_on], failures=[end])
    assert [(mark.step, mark.text) for mark in happenings(run)] == [
        (17, f"failed after step 17: {died}; seen from pp=1: it"),
        (10, "went on after step 10"),
    ]
    shown = texts(page(run))
    assert "ended the run" in shown and "ETTR" not in shown, "what it cost is not known"


def test_a_run_that_is_over_before_its_last_step_says_how_it_ended():
    start = log("INFO actors: 2 = pp 2", "INFO step 1/9  loss", "INFO step 3/9  loss")
    half = past(log=start)
    half.config["steps"] = 9
    assert [mark.text for mark in happenings(half)] == ["ended after step 3, before its last step"]
    assert happenings(replace(half, under_way=True)) == []
    (halted,) = happenings(replace(half, log=[*start, *log("WARNING interrupted, and nothing was saved: x")]))
    assert halted.text == "stopped with Ctrl-C after step 3"
    ended = log("WARNING SIGTERM: waiting for the actors", "WARNING interrupted, and nothing was saved: x")
    assert happenings(replace(half, log=[*start, *ended]))[0].text == "stopped with SIGTERM after step 3"
    (failed,) = happenings(replace(half, log=[*start, *log("ERROR pp=0 died")]))
    assert failed.text == "failed after step 3: pp=0 died"
    reported = "the run goes on after step 3 (from memory), with pp=1 replaced, 1.4 s after the failure"
    survived = log(
        "INFO actors: 2", "INFO step 1/9  loss", "WARNING actor pp=1 died during step 4", f"WARNING {reported}"
    )
    (mark,) = happenings(past(log=[*survived, *log("INFO step 9/9  loss")]))
    assert (mark.kind, mark.step, mark.text) == ("resume", 3, f"actor pp=1 died during step 4: {reported}")
    grown = "the run is whole again after step 5, with dp=4 of 4, in 0.6 s"
    (mark,) = happenings(past(log=[*survived[:2], *log(f"WARNING {grown}", "INFO step 9/9  loss")]))
    assert (mark.kind, mark.step, mark.text) == ("resume", 5, grown)
    assert happenings(past(log=log("INFO starting 1 actors", "INFO step 3/3  loss"))) == []


@pytest.mark.parametrize("text", ["step ,/, loss", "step ,1/9  loss", "step 1/,  loss", "step " + "9" * 5000 + "/9 "])
def test_a_line_of_the_log_that_looks_like_a_step_is_none(text):
    assert happenings(past(log=log("INFO actors: 1", f"INFO {text}", "INFO step 3/3  loss"))) == []


def test_a_kind_that_is_no_name_has_no_flops():
    assert flops_per_token({"model": {"kind": ["gpt"], "layers": 2}}) is None


def test_steps_that_go_back_and_a_loss_that_is_lost_are_marked():
    run = past()
    again = replace(run, metrics=[*run.metrics, run.metrics[1]])
    assert [(mark.kind, mark.step) for mark in happenings(again)] == [("resume", 1)]
    lost = replace(run, metrics=[run.metrics[0], run.metrics[1] | {"loss": math.nan}])
    assert ("failure", 2) in [(mark.kind, mark.step) for mark in happenings(lost)]


def test_where_a_run_comes_from_is_told():
    shown = texts(page(past(provenance={"raypar": "0.1", "command": "raypar train gpt-tiny"})))
    assert "command | raypar train gpt-tiny" in shown
    assert "does not say where it comes from" in texts(page(past()))


def test_bytes_without_seconds_are_of_an_older_raypar():
    from raypar.reporting.run_folder.read import OpCounts

    assert "did not write the seconds" in texts(page(past(ledger={"pp=0": {"pp send": OpCounts(1, 2)}})))


def test_where_a_run_was_resumed_from_is_told_by_what_was_different(tmp_path):
    first = {"raypar": "0.1", "host": "a", "commit": None, "command": ["raypar", "train", "gpt-tiny"], "started": "1"}
    again = [{**first, "command": ["raypar", "train", "--resume", "runs/a"], "started": "2"}, {**first, "host": "b"}]
    (tmp_path / "provenance.json").write_text(json.dumps({**first, "resumed": again}))
    (tmp_path / "run.toml").write_text(toml_of(plain_of(Run())))
    found = read(tmp_path)
    assert found.provenance == {
        "raypar": "0.1",
        "host": "a",
        "command": "raypar train gpt-tiny",
        "started": "1",
        "command, resumed 1": "raypar train --resume runs/a",
        "started, resumed 1": "2",
        "host, resumed 2": "b",
    }
    for odd in (5, "x", [5], None):
        (tmp_path / "provenance.json").write_text(json.dumps({**first, "resumed": odd}))
        assert read(tmp_path).provenance["host"] == "a"


def test_skipped_steps_and_the_loss_scale_are_shown():
    run = past(steps=6)
    scaled = [line | {"loss_scale": 2.0 ** (9 - n), "skipped": n in (0, 1, 2, 4)} for n, line in enumerate(run.metrics)]
    shown = texts(page(replace(run, metrics=scaled)))
    assert "4 | skipped steps" in shown
    assert "Loss scale" in shown
    assert "no weight was changed, and the learning rate counts as 0: steps 1 to 3, step 5." in shown
    assert "Loss scale" in texts(comparison([replace(run, metrics=scaled)]))
    assert "No step was skipped." in texts(
        page(replace(run, metrics=[line | {"loss_scale": 8.0} for line in run.metrics]))
    )
    odd = [line | {"skipped": n % 2 == 0} for n, line in enumerate(past(steps=90).metrics)]
    assert "step 39, and 25 stretches more." in texts(page(replace(run, metrics=odd)))
    assert "Loss scale" not in texts(page(run))
    assert "skipped" not in texts(page(run))


def test_short_times_are_not_0():
    assert [duration(seconds) for seconds in (0, 0.0002, 0.035, 0.96, 61)] == [
        "0.0 s",
        "<1 ms",
        "35 ms",
        "1.0 s",
        "1 min",
    ]


def test_a_model_with_experts_says_so():
    config = plain_of(Run(model=GPT(moe=MoE(experts=8))))
    assert titled(past(config=config)).startswith("GPT of 8 layers, 256 hidden, 8 experts on ")


def test_failures_are_listed_with_their_deaths_and_what_they_cost():
    death = Death("ended by SIGSEGV", None, "SIGSEGV", False, "1F0 of step 2", ("Fatal <b>",), "/logs/a.err")
    survived = Failure(2, "actor pp=1 died during step 2", ("pp=1",), 1, "memory", 0.4, 0.5, death)
    end = Failure.ending(3, JobError("it raised\nwith a trace"), 2, "", 0.536)
    run = past(failures=[{"at": "now", **asdict(one)} for one in (survived, end)])
    shown = texts(page(run))
    assert "| ended by SIGSEGV, in 1F0 of step 2 | Fatal <b> | went on after step 1 | pp=1 | 0.5 s |" in shown
    assert "| 3 | it raised | ended the run |" in shown
    assert "ETTR): 75.4%" in shown  # 1.536 s of steps, and 0.5 s lost; what an end costs is not known
    assert {"failures", "effective time"} <= set(Reader(page(run)).texts)
    assert "Failures" not in texts(page(past()))
