"""Faults that are injected on purpose: found in the run or told, and happening as often as they say."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.worlds import world_of
from raypar.actors.worker.fault_injection import FaultInjector, InjectedError, flip_bit
from raypar.config.run import check_run
from raypar.job.recover.chaos import faults_in, injectable, never_happen
from raypar.schedules.action import Action, Op

RUN = rp.Run(mesh=rp.Mesh(pp=2), microbatches=4)


def found(*faults, run=RUN):
    return injectable(faults, world_of(run), check_run(run)["train"])


def test_names_and_actions_of_the_run_are_found():
    split = found(rp.chaos.kill("pp=1", at="1B3", step=7), rp.chaos.stop("pp=0", at="STEP"))
    assert split == ([InjectedFault("kill", "pp=1", "1I3", 7), InjectedFault("stop", "pp=0", "STEP")], [])
    whole = rp.Run(mesh=rp.Mesh(dp=2), microbatches=4)
    assert found(rp.chaos.raise_("dp=1", at="0B3"), run=whole)[0] == [InjectedFault("raise", "pp=0 dp=1", "0B3")]


def test_all_that_never_happens_is_told_with_what_there_is():
    (told,) = [
        found(rp.chaos.kill("pp=7", at="STEP"), rp.chaos.kill("pp=1", at="0F0"), InjectedFault("kil", "pp=0", "STEP"))[
            1
        ]
    ]
    assert told[0] == "chaos: 'pp=7' is no one's name: there are pp=0, pp=1"
    assert told[1].startswith("chaos: 'pp=1' has no '0F0': its row is 1RECV_F0 1F0")
    assert told[1].endswith("and any has start, end, snapshot, report")
    assert told[2].startswith("chaos: fault 3: kind is 'kil': it must be 'kill', 'stop'")
    assert found(rp.chaos.kill(0, at="0F0", step=0))[1] == [
        "chaos: fault 1: actor is 0: it must be a text",
        "chaos: fault 1: step is 0: it must be at least 1",
    ]
    with pytest.raises(rp.ConfigError, match=r"it must be a fault, such as rp\.chaos\.kill"):
        rp.launch(RUN, chaos=[rp.chaos.kill])
    assert found(rp.chaos.kill("pp=7", at="9F9"))[1] == [
        "chaos: 'pp=7' is no one's name: there are pp=0, pp=1",
        "chaos: no actor has '9F9': give an action of its row, or start, end, snapshot, report",
    ]
    with pytest.raises(rp.ConfigError, match="no one's name"):
        rp.launch(RUN, chaos=[rp.chaos.kill("pp=7", at="STEP")])
    two = rp.Run(mesh=rp.Mesh(pp=2, dp=2), microbatches=4)
    assert "there are pp=0 dp=1, pp=1 dp=1" in found(rp.chaos.kill("dp=1", at="STEP"), run=two)[1][0]


@pytest.mark.parametrize(
    ("fault", "taken", "why"),
    [
        (rp.chaos.kill("pp=0", at="STEP", step=21), 0, "STEP of step 21 never happens: the run has 20 steps"),
        (rp.chaos.kill("pp=0", at="end", step=5), 5, "end of step 5 never happens: the run goes on after step 5"),
        (
            rp.chaos.kill("pp=0", at="start", step=2),
            0,
            "never happens: actors start again only in a recovery, and max_f",
        ),
        (rp.chaos.kill("pp=0", at="snapshot"), 0, "the run takes no snapshots: set max_failures and snapshot_every"),
        (rp.chaos.kill("pp=0", at="snapshot", step=3), -1, "the run takes a snapshot after every 2 steps"),
        (rp.chaos.kill("pp=0", at="start"), 5, None),
        (rp.chaos.kill("pp=0", at="STEP", step=20), 19, None),
        (rp.chaos.kill("pp=0", at="snapshot", step=4), -1, None),
        (rp.chaos.kill("pp=0", at="start", step=2), -1, None),
    ],
)
def test_what_never_happens_in_the_steps_of_a_run_is_told(fault, taken, why):
    run = replace(RUN, steps=20, max_failures=int(taken < 0), snapshot_every=2)
    told = [*never_happen(*found(fault, run=run)[:1], run, max(0, taken))]
    assert [why in one for one in told] == [True] if why else not told


def test_a_launch_warns_of_what_never_happens(monkeypatch, caplog):
    def stop(*words, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("raypar.job.launch"), "settled", stop)
    with pytest.raises(KeyboardInterrupt), caplog.at_level("WARNING", "raypar"):
        rp.launch(replace(RUN, steps=3), chaos=[rp.chaos.kill("pp=1", at="STEP", step=4)])
    assert "chaos: kill 'pp=1' at STEP of step 4 never happens: the run has 3 steps" in caplog.messages


def test_a_file_of_faults(tmp_path):
    file = tmp_path / "chaos.toml"
    file.write_text('[[fault]]\nkind = "delay"\nactor = "pp=1"\nat = "1F0"\nstep = 3\nseconds = 2\n')
    assert faults_in(file) == [rp.chaos.delay("pp=1", at="1F0", step=3, seconds=2.0)]
    for text, why in (
        ("", "has no faults: write a table"),
        ("fault = 3", "has no faults"),
        ("[[fault", "is no TOML"),
        (
            '[[fault]]\nkind = "kil"\nactor = "pp=1"\nat = "1F0"\nstep = 0',
            "(?s)kind is 'kil': it must be 'kill', 'stop'.*step is 0",
        ),
        (
            '[[fault]]\nkind = "kill"\nwhen = "1F0"',
            "(?s)actor is missing.*at is missing.*no field 'when'",
        ),
        ("fault = [3]", "fault 1: 3 is no table"),
        ('[[fault]]\nkind = "kill"\nactor = "pp=1"\nat = "1F0"\nstep = 0', "fault 1: step"),
    ):
        file.write_text(text)
        with pytest.raises(rp.ConfigError, match=why):
            faults_in(file)
    with pytest.raises(rp.ConfigError, match="can't be read"):
        faults_in(tmp_path / "none")


def test_a_fault_happens_at_its_point_as_often_as_it_says():
    left = [2]

    def claim(fault):
        left[0] -= 1
        return left[0] >= 0

    injector = FaultInjector([rp.chaos.raise_("pp=0", at="0F1", step=3, times=2)], claim)
    for action, step in ((Action(0, Op.F, 0), 2), (Action(0, Op.F, 1), 1)):
        injector.reach(action, step)
    for _ in range(2):
        with pytest.raises(InjectedError, match="raise 'pp=0' at 0F1 of step 3, 2 times"):
            injector.reach(Action(0, Op.F, 1), 2)
    injector.reach(Action(0, Op.F, 1), 2)


def test_a_corrupted_weight_differs_in_one_bit_and_stays_finite():
    weight = torch.ones(3)
    flip_bit([torch.empty(0), weight])
    assert weight.tolist()[1:] == [1.0, 1.0]
    assert 0 < abs(weight[0].item() - 1.0) < 1e-6
