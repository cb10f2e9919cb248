"""Actors that compute longer than others with the same work are told, once."""

from __future__ import annotations

import os
import random
import socket
import statistics

import pytest

import raypar as rp
from raypar.actors.machine.process_identity import ProcessIdentity
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.results import Located, Progress, Span
from raypar.reporting.step_times import Stragglers, _medians_of_others
from raypar.reporting.tables.actor_table import Whereabouts, actor_of
from raypar.schedules.action import Action, Op


def told(stragglers, rows):
    return [line for step, busy in enumerate(rows, 1) for line in stragglers.of(step, busy)]


def test_ten_steps_on_end_are_told_once_with_the_name():
    slow = [[0.1, 0.16, 0.3, 0.31]] * 25  # of stage 1, which is slower on both replicas, nobody is late
    (line,) = told(Stragglers(World(Mesh(pp=2, dp=2))), slow)
    assert line.startswith("straggler: pp=0 dp=1 has computed more than 1.5 times as long as its peers for 10 steps ")
    assert "(160 and 100 ms in step 10)" in line and "job.who()" in line


@pytest.mark.parametrize("number", [1, 2, 3, 4, 9, 32])
def test_the_usual_time_is_the_median_of_all_others(number):
    draws = random.Random(number)
    for _ in range(20):
        values = [draws.choice((0.1, 0.2, 0.2, 0.5, draws.random())) for _ in range(number)]
        others = [[*values[:at], *values[at + 1 :]] or values for at in range(number)]
        assert _medians_of_others(values) == [statistics.median(of_one) for of_one in others], values


def test_a_pause_is_no_straggler_nor_is_an_actor_without_peers():
    now_and_then = [[0.1, 0.2]] * 9 + [[0.1, 0.1]] + [[0.1, 0.2]] * 9
    assert told(Stragglers(World(Mesh(dp=2))), now_and_then) == []
    assert told(Stragglers(World(Mesh(pp=2))), [[0.1, 9.0]] * 30) == []
    assert told(Stragglers(World(Mesh(dp=2))), [[0.0, 0.0]] * 30) == []


def test_a_table_says_who_is_where():
    events = [Span(Action(1, Op.F, 0), 0.0, 0.002), Span(Action(1, Op.F, 1), 0.0, 0.004)]
    busy = actor_of("pp=1", Located("host", ProcessIdentity(pid=7)), Progress(4, 12, Action(1, Op.F, 3)), [])
    idle = actor_of("pp=0", Located("host", ProcessIdentity(pid=8)), Progress(4, 20, None), events)
    judged = actor_of("pp=3", Located("host", ProcessIdentity(pid=9)), Progress(3, 8, None, program="evaluate"), [])
    table = Whereabouts([busy, idle, actor_of("pp=2", None, None, []), judged])
    lines = repr(table).splitlines()
    assert lines[0].split() == ["actor", "node", "pid", "step", "action", "done", "F", "ms", "B", "ms", "W", "ms"]
    assert lines[1].split() == ["pp=1", "host", "7", "5", "1F3", "12", "-", "-", "-"]
    assert lines[2].split() == ["pp=0", "host", "8", "5", "-", "20", "3.0", "-", "-"]
    assert "no answer" in lines[3]
    assert lines[4].split()[:5] == ["pp=3", "host", "9", "eval", "4"]
    assert "<td" in table._repr_html_()


def test_a_job_knows_its_actors(kept_actors):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=2, microbatches=2)
    with rp.launch(run) as job:
        assert [one.step for one in job.who()] == [0, 0]
        job.step()
        found = job.who()
        job.evaluate()
        assert [one.program for one in [*found, *job.who()]] == ["train"] * 2 + ["evaluate"] * 2
        job.step()
        assert [(one.step, one.program) for one in job.who()] == [(2, "train")] * 2
    assert [one.actor for one in found] == ["pp=0", "pp=1"]
    assert {one.node for one in found} == {socket.gethostname()} and os.getpid() not in {one.pid for one in found}
    assert [one.step for one in found] == [1, 1] and all(one.seconds["F"] > 0 for one in found)
