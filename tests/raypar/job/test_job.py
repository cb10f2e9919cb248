"""A job on real actors: what it reports, moves, holds and answers."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.job.steps.executors import Compiled
from raypar.job.steps.steps_ahead import StepsAhead
from raypar.reporting.forecasting import forecast_of
from raypar.reporting.run_folder.read import read
from raypar.schedules import build, text
from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import simulate
from raypar.schedules.step_board import moves

B, S, H = 2, 32, 32  # of gpt-tiny


@pytest.fixture
def job(job_of):
    return job_of(tiny())


def tiny(**changes):
    text = rp.Text(argparse.__file__)  # opened by every actor for every run: one file and not the whole library
    return replace(rp.recipe("gpt-tiny"), data=text, **changes)


@pytest.mark.long
def test_a_step_counts_samples_and_memory_by_kind_in_every_layout(job_of):
    for mesh, count in ((rp.Mesh(pp=2, dp=2), 16), (rp.Mesh(cp=2), 8), (rp.Mesh(tp=2), 8)):
        job = job_of(tiny(mesh=mesh, microbatches=4))
        report = job.step()
        assert report.samples == count
        whole = 4 * sum(weight.numel() for _, weight in job.weights().items())
        assert report.memory["weights"] == report.memory["gradients"]
        if mesh.tp == 1:
            assert sum(report.memory["weights"]) == whole
            assert sum(report.memory["optimizer"]) == pytest.approx(2 * whole // (mesh.dp * mesh.cp), rel=0.05)
        by_hand = job.stepper().finish()
        assert (report.by_hand, by_hand.by_hand) == (False, True)
        assert by_hand.memory == report.memory


def test_a_run_that_has_taken_all_its_steps_says_how_it_goes_on(job, caplog):
    job.reset(tiny(steps=2))
    assert len(job.train()) == 2
    caplog.clear()
    assert job.train() == []
    assert [record.getMessage() for record in caplog.records] == [
        "the run has taken all its 2 steps: give train(steps=...) for more"
    ]


def test_a_folder_keeps_the_times_of_the_latest_compiled_step(job, tmp_path):
    job.reset(tiny(folder=str(tmp_path / "run")))
    job.step()
    job.stepper().finish()
    job.reset(tiny())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step_ms"] is None for line in lines] == [False, True]
    assert [line["samples"] for line in lines] == [8, 8]
    assert json.loads((tmp_path / "run" / "timeline.json").read_text())["step"] == 0
    assert read(tmp_path / "run").step == 0


def counts(job, op):
    return {label: table.get(("pp", op), None) for label, table in job.ledger().items()}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_a_boundary_moves_2mbsh_elements_a_step_and_nothing_else(job, schedule, m):
    job.reset(tiny(schedule=schedule, microbatches=m))
    for step in (1, 2):
        job.step()
        sends = counts(job, "send")
        assert sum(entry.bytes for entry in sends.values()) == step * 2 * m * B * S * H * 4
        assert {label: entry.calls for label, entry in sends.items()} == {"pp=0": step * m, "pp=1": step * m}
    ops = {op for table in job.ledger().values() for _, op in table}
    assert ops == {"send", "recv", "send shapes", "recv shapes", "all_reduce"}
    norms = counts(job, "all_reduce")["pp=0"]
    assert (norms.calls, norms.bytes) == (2, 2 * 8 * (21 + 2)), (
        "the sum of the squares, the correction for tokens and a vote, once a step"
    )
    assert counts(job, "send shapes") == {"pp=0": rp_entry(1, 1024), "pp=1": None}


def rp_entry(calls, nbytes):
    from raypar.actors.collective.ledger import LedgerEntry

    return LedgerEntry(calls, nbytes)


def test_interleaving_crosses_v_times_as_often(job):
    job.reset(tiny(schedule="interleaved", microbatches=4))
    job.step()
    sent = sum(entry.bytes for entry in counts(job, "send").values())
    boundaries = 2 * 2 - 1
    assert sent == boundaries * 2 * 4 * B * S * H * 4


def test_no_tensor_goes_through_the_object_store(job, cluster):
    from ray._private.internal_api import memory_summary

    job.reset(tiny(model=rp.GPT(layers=2, hidden=256, heads=4, seq=256), micro_batch_size=2))
    address = cluster.get_runtime_context().gcs_address  # other clusters may run on this machine
    before = stored(memory_summary(address, stats_only=True))
    for _ in range(2):
        job.step()
    assert stored(memory_summary(address, stats_only=True)) == before
    assert counts(job, "send")["pp=0"].bytes == 2 * 4 * 2 * 256 * 256 * 4, "and yet this much was moved"


def stored(summary):
    line = next(line for line in summary.splitlines() if "Plasma memory usage" in line)
    return line.split("MiB")[0], line.split(",")[1]


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "m"), [("naive", 4), ("gpipe", 6), ("1f1b", 1), ("1f1b", 8), ("interleaved", 8)])
def test_activations_in_flight_are_the_predicted_ones(job, schedule, m):
    job.reset(tiny(schedule=schedule, microbatches=m))
    predicted = simulate(job.schedule).in_flight
    report = job.step()
    assert report.in_flight == predicted == job.timeline().in_flight
    written = simulate(build(schedule, 2, m)).in_flight
    assert max(predicted) == max(written), "weights' gradients that are to come count, too"
    if schedule == "1f1b":
        assert written == tuple(min(2 - rank, m) for rank in range(2))
    if schedule == "gpipe":
        assert predicted == (m, m)


@pytest.mark.long
def test_peak_memory_is_flat_for_1f1b_and_grows_for_gpipe(job):
    base = tiny(model=rp.GPT(layers=4, hidden=128, heads=4, seq=128), micro_batch_size=4, steps=2)
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        for m in (4, 12):
            job.reset(replace(base, schedule=schedule, microbatches=m))
            job.step()
            peaks[schedule, m] = job.step().peak_memory
    # 8 more microbatches of 2 layers, at least 10 tensors of (B, S, D) each
    activations = 8 * 2 * 4 * 128 * 128 * 4 * 10
    for rank in range(2):
        assert peaks["1f1b", 12][rank] < 1.05 * peaks["1f1b", 4][rank]
        assert peaks["gpipe", 12][rank] > peaks["gpipe", 4][rank] + activations


def test_reports_and_progress(job, caplog):
    run = tiny(steps=6, eval_every=2)
    job.reset(run)
    seen = []
    with caplog.at_level(logging.INFO, logger="raypar"):
        reports = job.train(on=seen.append)
    assert [report.step for report in reports] == list(range(6))
    assert [type(outcome).__name__ for outcome in seen].count("Evaluation") == 2
    assert reports[-1].tokens == 4 * B * S
    assert reports[-1].loss < reports[0].loss
    assert all(0 < report.bubble < 1 for report in reports)
    assert reports[-1].bubble == pytest.approx(job.timeline().bubble, abs=1e-9), "one figure, whoever tells it"
    assert sum("loss" in message for message in caplog.messages) == 8
    assert job.train() == [], "the run is over"


def test_a_loss_that_falls_no_more_ends_the_training_with_a_checkpoint(job, tmp_path, caplog):
    stuck = rp.SGD(lr=1e-30, momentum=0.0)
    job.reset(tiny(steps=9, eval_every=1, early_stop=2, optim=stuck, folder=str(tmp_path / "run")))
    assert [report.step for report in job.train()] == [0, 1, 2]
    assert "the validation loss was lowest after step 1" in caplog.text
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir()


@pytest.mark.long
def test_steps_handed_over_ahead_are_the_same_steps(job):
    run = tiny(steps=7, eval_every=3)
    losses = []
    for ahead in (0, 1, 4):
        job.reset(run)
        seen = []
        reports = job.train(on=seen.append, ahead=ahead)
        assert [report.step for report in reports] == list(range(7))
        losses.append([outcome.loss for outcome in seen])
    assert losses[0] == losses[1] == losses[2]


def test_steps_handed_over_ahead_count_even_if_nobody_wants_their_reports(job):
    job.reset(tiny(steps=9))

    def stop(report):
        raise KeyError("seen enough")

    with pytest.raises(KeyError):
        job.train(on=stop, ahead=2)
    assert job.next_step == 3
    assert job.step().step == 3


def test_nothing_comes_between_steps_that_were_handed_over(job):
    job.reset(tiny(steps=6))
    refused = []

    def meddle(report):
        if report.step > 0:  # it has nothing behind it
            return
        for call in (job.step, job.stepper, job.evaluate, lambda: job.reset(job.run)):
            try:
                call()
            except rp.JobError as error:
                refused.append(str(error))

    job.train(2, on=meddle, ahead=1)
    assert len(refused) == 4
    assert "train with ahead=0" in refused[0]


@pytest.mark.parametrize("ahead", [-1, 1.5])
def test_a_wrong_number_of_steps_ahead(job, ahead):
    with pytest.raises(ValueError, match=r"ahead is .*: it must be"):
        job.train(1, ahead=ahead)


@pytest.mark.long
def test_evaluation_changes_nothing(job):
    run = tiny(steps=4)
    job.reset(run)
    alone = [job.step().loss for _ in range(4)]
    job.reset(run)
    mixed = []
    for _ in range(4):
        first, second = job.evaluate(), job.evaluate()
        assert first.loss == second.loss, "validation is the same batches, without dropout"
        mixed.append(job.step().loss)
    assert mixed == alone
    assert first.tokens == run.eval_steps * run.microbatches * B * S


def test_looking_inside(job):
    job.reset(tiny())
    assert job.grad("head.out.weight") is None
    assert job.gradients() == dict.fromkeys(job.parameters)
    before = job.param("blocks.3.mlp.up.weight").clone()
    report = job.step()
    assert job.param("blocks.3.mlp.up.weight").shape == (4 * H, H) == job.parameters["blocks.3.mlp.up.weight"]
    assert not torch.equal(job.param("blocks.3.mlp.up.weight"), before)
    gradients = job.gradients()
    assert all(torch.equal(job.grad(name), gradients.pop(name)) for name in job.parameters)
    assert not gradients
    norms = torch.stack([torch.linalg.vector_norm(job.grad(name)) for name in job.parameters])
    clipped = min(report.grad_norm, job.run.clip)
    assert float(torch.linalg.vector_norm(norms)) == pytest.approx(clipped, rel=1e-4)
    with pytest.raises(KeyError, match=r"did you mean .*blocks\.3\.mlp\.up\.weight"):
        job.param("blocks.3.mlp.up.wieght")


def test_the_stepper_moves_draws_and_finishes(job):
    job.reset(tiny(microbatches=3, backward="split"))
    stepper = job.stepper()
    assert stepper.next() == (Action.parse("0F0"),)
    assert job.schedule.rows[1][2] == Action.parse("1I0"), "it is split"
    taken = stepper.run_to("1I0")
    assert taken[-1] == Action.parse("1I0")
    assert {str(action) for action in taken} >= {"0SEND_F0", "1RECV_F0", "1F0"}
    assert "I0" in repr(stepper)
    with pytest.raises(ValueError, match="no action 1B0: this backward is split, take 1I0 and then 1W0"):
        stepper.do("1B0")
    assert "next: 1SEND_B0 + 0RECV_B0" in repr(stepper)
    with pytest.raises(ValueError, match="done"):
        stepper.run_to("0F0")
    with pytest.raises(ValueError, match="no action 7F0"):
        stepper.run_to("7F0")
    with pytest.raises(rp.JobError, match="finish"):
        job.step()
    report = stepper.finish()
    assert stepper.finish() is report
    with pytest.raises(StopIteration, match=r"the step is finished: s = job\.stepper\(\) begins another one$"):
        stepper.next()
    assert job.next_step == 1
    assert job.step().step == 1


def test_the_moves_of_a_stepper_are_an_order_of_the_schedule(job):
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        job.reset(tiny(schedule=name))
        taken = [(rank, action) for move in moves(job.schedule) for rank, action in move.actions]
        for rank, row in enumerate(job.schedule.rows):
            mine = [action for at, action in taken if at == rank]
            assert sorted(map(str, mine)) == sorted(map(str, row))
            compute = [action for action in row if action.op in COMPUTE]
            assert [action for action in mine if action.op in COMPUTE] == compute


def regression(step, microbatch, dp):
    generator = torch.Generator().manual_seed(step * 100 + microbatch)
    x = torch.randn(5, 6, generator=generator)
    return x, x[:, :3].sin()


class Fork(nn.Module):
    """Two tensors out: a float and its int mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x):
        y = self.inner(x)
        return y, (y > 0).long()


class Join(nn.Module):
    def forward(self, y, mask):
        return (y * mask).sum(dim=1, keepdim=True)


def test_any_shapes_between_stages(job):
    run = rp.Run(
        model=rp.Layers(lambda: [Fork(), Join()], loss=lambda out, target: (out - target[:, :1]).pow(2).mean()),
        mesh=rp.Mesh(pp=2),
        microbatches=3,
        data=rp.Batches(regression),
        optim=rp.SGD(lr=0.1),
        steps=3,
    )
    assert rp.verify(run, job).bitwise
    sent = counts(job, "send")
    assert sent["pp=0"].bytes == 3 * 3 * (5 * 8 * 4 + 5 * 8 * 8), "a float and an int64 tensor forth"
    assert sent["pp=1"].bytes == 3 * 3 * 5 * 8 * 4, "one gradient back"


@pytest.mark.long
def test_steps_are_taken_by_one_thread_at_a_time(job):
    """Two would both take the step that comes next."""
    job.reset(tiny(steps=50))
    refused, reports = [], []

    def work():
        for _ in range(6):
            try:
                reports.append(job.step())
            except rp.JobError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(refused) == {"another thread is taking steps of this job: take them all in one"}
    assert sorted(report.step for report in reports) == list(range(len(reports)))
    losses = {report.step: report.loss for report in reports}
    job.reset(tiny(steps=50))
    assert losses == {step: job.step().loss for step in range(len(reports))}


def test_a_stepper_whose_step_is_not_finite_is_over_and_the_job_goes_on(job):
    job.reset(tiny(optim=rp.SGD(lr=1e30), clip=None))
    job.step()
    stepper = job.stepper()
    with pytest.raises(rp.NonFiniteError):
        stepper.finish()
    with pytest.raises(rp.NonFiniteError):
        stepper.finish()
    job.reset(tiny())
    assert job.step().step == 0


def test_the_timeline_of_training_outlives_an_evaluation(job):
    job.reset(tiny())
    job.step()
    before = job.timeline().events
    job.evaluate()
    assert job.timeline().events == before
    assert "B3" in text(job.timeline(), width=None)


def test_a_timeline_says_what_every_message_moved(job):
    job.reset(tiny())
    job.step()
    for rank in (0, 1):
        own = [event for event in job.timeline().events if event.rank == rank]
        for op, messages in (("send", SENDS), ("recv", RECVS)):
            moved = sum(event.bytes for event in own if event.action.op in messages)
            assert moved == counts(job, op)[f"pp={rank}"].bytes > 0
        assert not any(event.bytes for event in own if event.action.op in COMPUTE)


def test_a_reset_forgets_what_was_measured(job):
    job.reset(tiny())
    job.step()
    job.reset(tiny())
    with pytest.raises(ValueError, match="no step has been measured yet"):
        job.timeline()


def test_an_overlay_predicts_a_step_with_the_costs_of_those_before_it(job):
    job.reset(tiny())
    with pytest.raises(ValueError, match=r"no step has been measured yet: job.step\(\) takes one"):
        job.overlay()
    for _ in range(3):
        job.step()
    steps = [job.timelines(ago)[0] for ago in range(4)]
    assert [bool(step.events) for step in steps] == [True, True, True, False]
    assert len({step.events for step in steps}) == 4
    overlay = job.overlay()
    assert overlay.measured == job.timeline() == steps[0]
    assert overlay.predicted == simulate(job.schedule, costs_of(*steps[1:3]))
    job.reset(tiny())
    job.step()
    assert job.overlay().predicted == simulate(job.timeline().schedule, costs_of(job.timeline()))
    planned = job.overlay(before_run=True)
    assert planned.measured == job.timeline() and planned.source == "from FLOPs and bytes"
    assert planned.predicted == forecast_of(job.run, job.schedule, None).timeline
    with pytest.raises(ValueError, match="no replica dp=1"):
        job.overlay(1)


def test_a_job_shows_what_it_is_and_where_it_is(job):
    job.reset(tiny())
    assert re.search(r"<Job, actors: 2 = pp 2, cpu>\nGPT\(layers=.*\n0 of \d+ steps taken\nrank 0  F0 ", repr(job))
    loss = job.step().loss
    assert f"\n1 of {job.run.steps} steps taken, loss {loss:.4f} in step 1\n" in repr(job)
    assert job._repr_html_().startswith('<div style="max-width: 100%; overflow-x: auto"><pre ')
    assert "&lt;Job, actors: 2" in job._repr_html_()
    assert '</pre><table class="raypar-table"><tr><th' in job._repr_html_()
    assert re.search("</table><style>[^<]*</style><svg", job._repr_html_())
    assert ">pp=1</td>" in job._repr_html_()


def test_a_job_says_what_memory_its_actors_take(job):
    job.reset(tiny())
    assert job.memory()["pp=0"]["peak"].measured is None
    job.step()
    figures = job.memory()["pp=1"]
    assert figures["weights"].measured == figures["weights"].formula
    assert figures["optimizer"].measured == pytest.approx(figures["optimizer"].formula, rel=0.05)
    assert 200 << 20 < figures["process"].measured < figures["peak"].measured


def test_what_the_driver_can_know_does_not_cost_the_job(kept_actors):
    lock = threading.Lock()
    run = rp.Run(
        model=rp.Layers(lambda: [nn.Linear(6, 3)], loss=nn.functional.mse_loss),
        mesh=rp.Mesh(),
        data=rp.Batches(regression),
        optim=rp.SGD(lr=0.1),
    )
    with rp.launch(run) as job:
        with pytest.raises(rp.ConfigError, match="validate"):
            job.evaluate()
        job.step()
        stepper = job.stepper()
    with pytest.raises(rp.JobError, match="this job is over"):
        stepper.next()
    closes_over = replace(run, model=rp.Layers(lambda: [nn.Linear(6, 3)] if lock else [], nn.functional.mse_loss))
    with pytest.raises(rp.ConfigError, match="can't be sent to actors"):
        rp.launch(closes_over)


def test_a_step_by_hand_has_the_bits_of_a_compiled_one_whatever_is_done_on_its_way(job, tmp_path):
    run = tiny(schedule="gpipe", microbatches=4, backward="split")
    job.reset(run)
    compiled = [job.step().loss for _ in range(2)]
    weights = dict(job.weights())
    job.reset(run)
    stepper = job.stepper()
    stepper.run_to("1I0")
    assert torch.equal(stepper.peek("1I0").tensor, stepper.run_to("0RECV_B0") and stepper.peek("1SEND_B0").tensor)
    assert stepper.peek("0F1").tensor.shape == stepper.peek("1RECV_F1").tensor.shape
    assert [held.actor for held in stepper.state()] == ["pp=0", "pp=1"]
    stepper.swap("1f1b")
    stepper.run(2)
    assert stepper.finish().loss == compiled[0]
    stepper = job.stepper()
    for stage in range(2):
        stepper.record(tmp_path / f"stage{stage}.rec", stage)
    stepper.run()
    stepper.rewind()
    assert stepper.finish().loss == compiled[1]
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights().items())
    played = (
        "import sys, raypar; found = [raypar.replay(path) for path in sys.argv[1:]]; print(found)\n"
        "assert all(one.ok for one in found) and 'ray' not in sys.modules"
    )
    paths = [str(tmp_path / f"stage{stage}.rec") for stage in range(2)]
    subprocess.run([sys.executable, "-c", played, *paths], check=True, timeout=60)


def test_a_step_takes_no_less_than_it_took_its_actors():
    """The driver may come so late to a report that the next one is there already."""
    results, learned = [SimpleNamespace(start=0.0, end=0.25), SimpleNamespace(start=0.5, end=8.0)], []
    deadline = SimpleNamespace(learn=learned.append)
    calls = SimpleNamespace(handles=[], gather=lambda refs, what: results, deadline=deadline)
    executor = Compiled(SimpleNamespace(calls=calls, world=None, schedule=None))
    ahead = StepsAhead(calls, executor, 1, 0, lambda step: 0)
    ahead.hand_over(0, 2)
    assert [ahead.collect()[1] for _ in range(2)] == [7.5, 7.5] == learned
