"""One Ray task for each action: the same bits as one call for a whole step, and faults are told as there."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.types import SEND_WINDOW
from raypar.actors.specs.worlds import world_of
from raypar.cluster.calls.answers import Answer
from raypar.config.run import check_run, reset_faults
from raypar.errors import JobError
from raypar.job.steps.executors import Dynamic, Tasks
from raypar.schedules.action import Action
from raypar.schedules.checking.check import check

pytestmark = pytest.mark.usefixtures("by_value")

TINY = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), microbatches=4, steps=2)
EXPERTS = replace(TINY, model=rp.recipe("moe-tiny").model)


class Refs:
    """Actors that note the calls that they get, and a Ray in which calls are done when a test says so."""

    def __init__(self, run, drawn=None):
        self.drawn = drawn or SimpleNamespace(choice=lambda refs: refs[0])
        self.got = [[] for _ in range(world_of(run).size)]
        self.handles = [SimpleNamespace(**self._methods(rank)) for rank in range(len(self.got))]
        self.pending, self.done = [], []

    def _methods(self, rank):
        def method(name):
            def remote(*args):
                self.got[rank].append((name, args))
                return f"{rank} {args[0] if name == 'act' else name}"

            called = SimpleNamespace(remote=remote)
            called.options = lambda name: called
            return called

        return {name: method(name) for name in ("start_step", "act", "end_step", "train")}

    def waiting(self):
        return self

    def expect(self, ref, rank):
        assert int(ref.split()[0]) == rank
        self.pending.append(ref)

    def next(self, what):
        ref = self.drawn.choice(self.pending)
        self.pending.remove(ref)
        self.done.append(ref)
        return [Answer(ref, int(ref.split()[0]), None, None)]

    def gather(self, refs, what):
        return refs


def loaded(run, calls):
    return SimpleNamespace(calls=calls, schedule=check_run(run)["train"], world=world_of(run), run=run)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_a_task_is_submitted_once_the_one_of_another_rank_is_done(name):
    run = replace(TINY, schedule=name, mesh=rp.Mesh(pp=2, dp=2))
    calls = Refs(run)
    run_loaded = loaded(run, calls)
    tasks = Tasks(run_loaded)
    begun = tasks.begin(3, 0, 0)
    assert all(got == [("start_step", (3, 0, 0))] for got in calls.got)
    ends = tasks.results(begun, "step 4")
    assert ends == [f"{rank} end_step" for rank in range(4)]
    for rank, got in enumerate(calls.got):
        row = run_loaded.schedule.rows[run_loaded.world.pp(rank)]
        assert [args[0] for name, args in got if name == "act"] == list(row)
        for name, args in got:
            if name == "act":
                partner = [] if not str(args[0].op).startswith("RECV") else list(args[1:])
                assert list(args[1:]) == partner
                assert all(ref in calls.done for ref in partner)
                assert all(int(ref.split()[0]) % 2 == rank % 2 for ref in partner), "of the same replica"
    assert len(calls.done) == len(set(calls.done))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "run",
    [
        replace(TINY, schedule="zb-v"),
        replace(TINY, mesh=rp.Mesh(pp=2, dp=2), zero=3),
        pytest.param(replace(EXPERTS, mesh=rp.Mesh(dp=2, expert_actors=2)), marks=pytest.mark.long),
        pytest.param(replace(TINY, mesh=rp.Mesh(dp=2), data_parallel="parameter_server"), marks=pytest.mark.long),
    ],
    ids=["zb-v", "zero 3", "expert actors", "servers"],
)
def test_tasks_have_the_bits_of_compiled_steps(job_of, run):
    found = {}
    for executor in ("compiled", "tasks"):
        job = job_of(replace(run, executor=executor))
        reports = job.train()
        assert 0 < reports[-1].bubble < 1
        assert [event.action for event in job.timeline().events], "it is measured"
        found[executor] = [report.loss for report in reports], dict(job.weights())
    assert found["tasks"][0] == found["compiled"][0]
    assert all(torch.equal(weight, found["compiled"][1][name]) for name, weight in found["tasks"][1].items())


@pytest.mark.parametrize("seed", [1, 2])
def test_actors_of_a_rank_get_what_is_ready_in_one_order(seed):
    run = replace(TINY, schedule="interleaved", mesh=rp.Mesh(pp=2, dp=2), executor="tasks", order="dynamic")
    calls = Refs(run, random.Random(seed))
    run_loaded = loaded(run, calls)
    ends = (dynamic := Dynamic(run_loaded)).results(dynamic.begin(3, 0, 0), "step 4")
    assert ends == [f"{rank} end_step" for rank in range(4)]
    got = [[args[0] for name, args in each if name == "act"] for each in calls.got]
    for pp, row in enumerate(run_loaded.schedule.rows):
        first, other = (got[rank] for rank in run_loaded.world.trainers_of(pp))
        assert first == other, "so that their collectives agree"
        assert sorted(map(str, first)) == sorted(map(str, row))
    leaders = [run_loaded.world.trainers_of(pp)[0] for pp in range(2)]
    check(replace(run_loaded.schedule, rows=tuple(got[rank] for rank in leaders)), send_capacity=SEND_WINDOW)


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [
        replace(TINY, schedule="zb-v", backward="split"),
        replace(TINY, mesh=rp.Mesh(pp=2, dp=2), zero=2),
        pytest.param(replace(TINY, mesh=rp.Mesh(pp=2, tp=2), schedule="interleaved"), marks=pytest.mark.long),
    ],
    ids=["zb-v", "zero 2", "tp"],
)
def test_what_happened_in_a_dynamic_order_is_a_schedule_of_the_same_bits(job_of, tmp_path, run):
    job = job_of(replace(run, executor="tasks", order="dynamic", steps=1))
    (report,), happened = job.train(), job.timeline().happened
    weights = dict(job.weights())
    check(happened, send_capacity=SEND_WINDOW)
    for row, planned in zip(happened.rows, job.schedule.rows, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, planned))
    path = happened.save(tmp_path / "happened.csv")
    job = job_of(replace(run, schedule=str(path), chunks=None, backward="whole", steps=1))
    assert [report.loss] == [again.loss for again in job.train()]
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights().items())


def test_a_dynamic_order_that_can_not_be_is_refused():
    run = replace(TINY, mesh=rp.Mesh(dp=2), zero=3, order="dynamic")
    assert [re.sub(":.*", "", fault) for fault in rp.faults(run)] == [
        "order is 'dynamic', but executor is 'compiled', and its actors follow their rows by themselves",
        "order is 'dynamic', but zero is 3, and weights come for use in the order of the rows",
    ]
    (fault,) = reset_faults(replace(TINY, executor="tasks", order="dynamic"), "cuda")
    assert "messages of NCCL have no tags on GPUs: set order to 'row', or device to 'cpu'" in fault


@pytest.mark.long
def test_rays_timeline_shows_the_schedule(job_of):
    job = job_of(replace(TINY, executor="tasks", microbatches=3, steps=1))
    job.train()
    wanted = Counter(f"task::{action}" for row in job.schedule.rows for action in row)
    end = time.monotonic() + 20  # Ray gathers its events about once a second
    while time.monotonic() < end:
        seen = Counter(event["cat"] for event in ray.timeline() if event["name"] == "act")
        if all(seen[name] >= count for name, count in wanted.items()):
            return
        time.sleep(0.3)
    raise AssertionError(wanted - seen)


class Failing(nn.Linear):
    def forward(self, x):
        if x.isnan().any():
            raise ZeroDivisionError("the user's own message")
        return super().forward(x)


def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return (x * torch.nan if (step, microbatch) == (2, 1) else x), x.sin()


def poisoned(step, microbatch, dp):
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    return x, y * float("inf") if (step, microbatch) == (1, 1) else y


def own(data, **fields):
    model = rp.Layers(lambda: [nn.Linear(4, 4), Failing(4, 4)], nn.functional.mse_loss)
    fields = {"mesh": rp.Mesh(pp=2), "microbatches": 2, "steps": 4, "executor": "tasks"} | fields
    return rp.Run(model=model, data=rp.Batches(data), **fields)


def test_a_layer_that_fails_is_told_with_its_action(job_of):
    with pytest.raises(JobError, match=r"actor pp=1: action 1F1 .*the user's own message"):
        job_of(own(batch)).train()


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_step_that_is_not_finite(job_of, nonfinite):
    job = job_of(own(poisoned, nonfinite=nonfinite))
    if nonfinite == "skip":
        assert [report.skipped for report in job.train()] == [False, True, False, False]
        return
    with pytest.raises(rp.NonFiniteError, match="step 2"):
        job.train()
    assert job.next_step == 1


@pytest.mark.long
def test_actors_that_die_or_fail_are_survived(kept_actors):
    run = replace(TINY, steps=4, executor="tasks", order="dynamic", max_failures=2, timeout=60.0)
    chaos = [
        rp.chaos.kill("pp=1", at="1B1", step=2),
        rp.chaos.raise_("pp=0", at="0F2", step=3),
    ]
    with rp.launch(run, chaos=chaos) as job:
        found = [report.loss for report in job.train()]
        assert len(job.failures) == 2, job.failures
        weights = dict(job.weights())
        job.reset(replace(run, executor="compiled", order="row"))
        assert [report.loss for report in job.train()] == found
        assert all(torch.equal(weight, weights[name]) for name, weight in job.weights().items())


def test_only_actions_of_rows_are_tasks():
    run = replace(TINY, mesh=rp.Mesh(dp=2), data_parallel="parameter_server", microbatches=1)
    calls = Refs(run)
    tasks = Tasks(loaded(run, calls))
    tasks.results(tasks.begin(0, 0, 4), "step 1")
    assert calls.got[-1] == [("train", (b"[0, 0, 4, 0]",))], "a server's step is one action"
    assert ("act", (Action.parse("STEP"),)) in calls.got[0]
