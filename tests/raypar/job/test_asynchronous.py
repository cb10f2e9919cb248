"""Asynchronous schedules on Ray actors: steps, reports, evaluations, checkpoints, failures; and what they refuse."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar import chaos
from raypar.config.run import check_run
from raypar.errors import ConfigError, JobError
from raypar.job.steps.steps_by_hand import StepsByHand
from raypar.schedules.schedule import Schedule

TINY = rp.recipe(
    "gpt-tiny", mesh=rp.Mesh(pp=2), schedule="pipedream", microbatches=1, clip=None, steps=10, flush_every=4
)


@pytest.mark.long
@pytest.mark.usefixtures("cluster", "kept_actors")
def test_a_run_flushes_where_it_evaluates_saves_and_fails(tmp_path):
    run = rp.Run(**{**vars(TINY), "folder": str(tmp_path / "run"), "save_every": 6, "eval_every": 6, "max_failures": 1})
    with rp.launch(run, chaos=[chaos.kill("pp=1", at="1B1", step=6)]) as job:
        reports = job.train()
        weights = job.weights()
        final = {name: weights[name].clone() for name in weights}
        memory = reports[-1].memory["versions"]
        with pytest.raises(JobError, match="steps by hand need a synchronous one"):
            job.stepper()
        timeline = job.timeline()
    assert [report.steps_taken for report in reports] == list(range(1, 11))
    assert all(report.grad_norm > 0 and report.lr > 0 for report in reports)
    assert memory[0] > 0 == memory[1]
    assert timeline.schedule.stream == 2, "the stream that the run's end has cut"
    assert {str(event.action) for event in timeline.events} >= {"0STEP1", "1STEP1"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["steps_taken"] for line in lines if "loss" in line][-10:] == list(range(1, 11))

    alone = rp.Run(**{**vars(TINY), "save_every": 6, "eval_every": 6, "folder": str(tmp_path / "again")})
    with rp.launch(alone) as job:
        undisturbed = job.train()
        assert [report.loss for report in undisturbed] == [report.loss for report in reports]
        weights = job.weights()
        assert all(torch.equal(weights[name], value) for name, value in final.items())
    with rp.launch(
        rp.Run(**{**vars(alone), "folder": None, "save_every": 0}),
        resume=str(tmp_path / "again" / "checkpoints" / "step-00000006"),
    ) as job:
        assert [report.loss for report in job.train()] == [report.loss for report in reports[6:]]


@pytest.mark.parametrize(
    ("changes", "fix"),
    [({}, "need a synchronous one, as 1f1b"), ({"schedule": "zb-h2", "backward": "auto"}, "leave flush_every out")],
    ids=["late", "without a flush"],
)
def test_steps_by_hand_tell_the_way(changes, fix):
    schedule = check_run(rp.Run(**vars(TINY) | changes))["train"]
    with pytest.raises(JobError, match=f"overlap: steps by hand .*{fix}"):
        StepsByHand("cpu").open(SimpleNamespace(schedule=schedule), 0, None, None)


class Held(nn.Module):
    """It reads its weight from a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = [self.linear.weight]

    def forward(self, x):
        return x @ self.held[0]


def tied():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[3].weight = layers[0].weight
    layers[1].weight = layers[0].weight
    return layers


def own(fn):
    return {"model": rp.Layers(fn, nn.functional.mse_loss), "data": rp.Batches(lambda *_: (torch.ones(2, 4),) * 2)}


def two_stages():
    rows = [[f"{stage}F0" for stage in (0, 2)], [f"{stage}F0" for stage in (1, 3)]]
    rows[0] += ["2B0", "2STEP0", "0B0", "0STEP0"]
    rows[1] += ["3B0", "3STEP0", "1B0", "1STEP0"]
    return Schedule.of("two", rows)


def hooked():
    layers = [nn.Linear(4, 4) for _ in range(2)]
    layers[1].weight.register_hook(lambda gradient: gradient * 0.1)
    return layers


FAULTS = {
    "clip": ({"clip": 1.0}, "set clip to None"),
    "zero": ({"mesh": rp.Mesh(pp=2, dp=2)}, "set zero to 0"),
    "nonfinite": ({"nonfinite": "skip"}, "set nonfinite to 'stop'"),
    "order": ({"executor": "tasks", "order": "dynamic"}, "set order to 'row'"),
    "backward": ({"backward": "split"}, "set backward to 'whole'"),
    "checks": ({"mesh": rp.Mesh(pp=2, dp=2), "zero": 0, "recheck_every": 1}, "set recheck_every to 0"),
    "fp16": ({"precision": rp.Precision("fp16")}, "set precision.compute to 'bf16' or 'fp32'"),
    "experts": ({"model": rp.recipe("moe-tiny").model}, "set model.moe to None"),
    "tied": ({"model": rp.GPT(layers=2, hidden=32, heads=2, seq=16, vocab=64, tied=True)}, "set model.tied to False"),
    "snapshots": ({"max_failures": 1, "snapshot_every": 3}, "set it to 1 or a multiple of 4"),
    "synchronous": ({"schedule": "zb-v"}, "has 4 stages on 2 ranks, and without a flush each rank has one"),
    "feedback": ({"schedule": "1f1b", "flush_every": None, "delay_feedback": True}, "no gradient is late"),
    "chunks": ({"chunks": 2}, "an asynchronous schedule has one stage a rank"),
    "own tied": (own(tied), "layers.3.weight is layers.0.weight, which is on another actor (pp=1 and pp=0)"),
    "held": (own(lambda: [Held(), nn.Linear(4, 4)]), "layers.0 keeps layers.0.linear.weight in a list"),
    "hooks": (own(hooked), "layers.1.weight has gradient hooks"),
    "two stages": ({"schedule": two_stages(), "flush_every": None}, "4 stages on 2 ranks: give each rank one stage"),
    "2bw": ({"schedule": "pipedream-2bw"}, "set microbatches to 2 or more"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_takes_all_stages_together_is_refused_before_a_launch(fault):
    changes, told = FAULTS[fault]
    with pytest.raises(ConfigError) as error:
        check_run(rp.Run(**{**vars(TINY), **changes}))
    assert told in str(error.value)


def test_it_is_not_compared_with_a_plain_process():
    with pytest.raises(ConfigError, match="Verify the run with a synchronous one, as 1f1b"):
        rp.verify(TINY)


def test_all_misfits_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        check_run(rp.Run(**{**vars(TINY), "clip": 1.0, "nonfinite": "skip", "recheck_every": 1, "backward": "split"}))
    assert len(error.value.faults) >= 4


def test_a_dry_run_says_when_the_pipeline_is_flushed(said):
    words = "train gpt-tiny --schedule pipedream --mesh.pp 2 --microbatches 1 --clip None --flush-every 5 --dry-run"
    code, out, _ = said(*words.split())
    assert code == 0
    assert "after every 5 steps, evaluation and checkpoint; weights of a gradient are up to 1 step old" in out
    assert "versions 2" in out, "older weights are planned"
