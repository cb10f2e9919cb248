"""Communication within actions: actors mark it, reports count it, and a run's folder, traces and pictures have it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from raypar.actors.collective.ledger import Ledger
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.results import Span
from raypar.config.recipes import recipe
from raypar.reporting.html.actors import times
from raypar.reporting.report import _joined, report_of, timelines_of
from raypar.reporting.run_folder.damage import DamagedError
from raypar.reporting.run_folder.timeline_rows import EventRow, rows_of, timeline_of
from raypar.schedules import Costs, build, lower, simulate
from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.svg import svg
from raypar.schedules.timeline import Call
from tests.raypar.reporting.html.test_report import Reader, past
from tests.support.team import Team

SCHEDULE = lower(build("1f1b", 2, 4))


def talking():
    """A timeline in which half of each computation is an exchange."""
    simulated = simulate(SCHEDULE, Costs(f=0.05, b=0.1))
    events = [
        event._replace(calls=(Call("ep all_to_all", event.start, (event.start + event.end) / 2),))
        if event.action.op in COMPUTE
        else event
        for event in simulated.events
    ]
    return replace(simulated, events=tuple(events), measured=True)


def test_a_step_of_divided_experts_has_the_time_of_its_exchanges():
    tiny = recipe("moe-tiny")
    model = replace(tiny.model, layers=2, dropout=0.0)
    team = Team.of(replace(tiny, model=model, mesh=Mesh(dp=2, ep=2), microbatches=2, steps=1, timeout=20.0))
    results = team.step()
    report = report_of(0, 1.0, results, team.world)
    assert 0.0 < report.communication < 1.0
    assert report.bubble + report.communication < 1.0, "it is a part of what is not bubble"
    rows = [actor.events() for actor in team.all]
    for timeline in timelines_of(team.programs["train"], team.world, rows):
        names = {call.name for event in timeline.events if event.action.op in COMPUTE for call in event.calls}
        assert "ep all_to_all" in names
        for event in timeline.events:
            assert all(event.start <= call.start <= call.end <= event.end for call in event.calls)


def test_a_ledger_keeps_the_calls_since_a_time_until_they_are_taken():
    ledger = Ledger()
    ledger.record("tp", "all_reduce", 8)
    ledger.spent("tp", "all_reduce", 1.0, 2.0)
    ledger.spent("tp", "all_reduce", 3.0, 4.0)
    assert ledger.entries()["tp", "all_reduce"].seconds == 2.0
    assert ledger.taken(3.0) == (Call("tp all_reduce", 3.0, 4.0),)
    assert ledger.taken(0.0) == ()


def test_calls_have_the_clock_of_the_driver():
    device = ComputeDevice()
    device.clock_offset = 10.0
    (span,) = device.spans([Span(Action(0, Op.F, 0), 1.0, 2.0, calls=(Call("a", 1.25, 1.5),))])
    assert (span.start, span.end, span.calls) == (11.0, 12.0, (Call("a", 11.25, 11.5),))


def test_the_start_of_an_op_and_the_wait_for_it_are_one_call():
    calls = [Call("a", 0.0, 1.0), Call("a", 1.0, 2.0), Call("b", 2.0, 3.0), Call("b", 4.0, 5.0)]
    assert _joined(calls) == (Call("a", 0.0, 2.0), *calls[2:])


def test_a_folder_keeps_calls_and_an_older_one_has_none():
    rows = json.loads(json.dumps(rows_of(talking())))
    assert timeline_of([EventRow(*row) for row in rows], SCHEDULE, measured=True) == talking()
    older = [EventRow(*row[:7]) for row in rows]
    assert timeline_of(older, SCHEDULE, measured=True).events == simulate(SCHEDULE, Costs(f=0.05, b=0.1)).events
    with pytest.raises(DamagedError, match="is not an action"):
        timeline_of([EventRow(0, "a", "??", 0.0, 1.0, 0, None)], SCHEDULE, measured=True)


def test_a_trace_and_a_picture_have_calls_inside_of_their_actions():
    slices = [event for event in chrome_trace(talking())["traceEvents"] if event["ph"] == "X"]
    inside = [event for event in slices if event["name"] == "ep all_to_all"]
    assert len(inside) == len([event for event in slices if event["cat"] == "compute"]) == 16
    assert inside[0]["ts"] == 0 and inside[0]["dur"] == pytest.approx(25_000)
    drawn = svg(talking())
    assert drawn.count('class="raypar-call"') == 16
    assert "ep all_to_all within 0F0 on pp=0: 25.0 ms" in drawn
    assert "raypar-call" not in svg(simulate(SCHEDULE))


def test_the_time_of_each_actor_is_divided():
    read = Reader(str(times(past(timelines=[talking()]))))
    assert {"pp=0: compute 300 ms", "pp=0: ep all_to_all 300 ms", "pp=0: waiting between actions 150 ms"} <= set(
        read.tips
    )
    assert "Of all actors' time: compute 40%, ep all_to_all 40%, waiting between actions 20%." in read.texts
    assert "did not write communication" not in " ".join(read.texts)
    older = Reader(str(times(past(timelines=[simulate(SCHEDULE, Costs(f=0.05, b=0.1))]))))
    assert "did not write communication" in " ".join(older.texts)
    assert times(past(timelines=[])) == ""
