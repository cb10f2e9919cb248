"""Profiles of training steps: the actions as ranges, ops below them, a file that a failure does not harm."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from raypar.actors.inspect.profile_file import add_step, plain_trace
from raypar.actors.worker.fault_injection import FaultInjector
from tests.support.team import Team, linears

HEAD = {"baseTimeNanoseconds": 1000, "actor": "pp=0", "distributedInfo": {"rank": 0, "world_size": 1}}


def slices(path, kind="user_annotation"):
    """The named slices of a trace by name, with their times in microseconds."""
    events = json.loads(plain_trace(path))["traceEvents"]
    return {one["name"]: (one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") == kind}


def profiled(tmp_path, **changes):
    asked = {"pp": 1, "m": 2, "profile": (2, 3), "folder": str(tmp_path / "run"), "steps": 4}
    return Team(linears(), **asked | changes)


def test_the_actions_of_the_asked_steps_are_ranges_with_torch_s_ops_below_them(tmp_path):
    team, path = profiled(tmp_path), tmp_path / "run" / "profile" / "pp=0.json.gz"
    assert team.step(0)[0].profile is None and not path.exists()
    assert [team.step(step)[0].profile for step in (1, 2, 3)] == ["", "", None], "both ends are profiled"
    trace = json.loads(plain_trace(path))
    assert trace["steps"] == [2, 3] and trace["distributedInfo"] == {"rank": 0, "world_size": 1}
    ranges = slices(path)
    row = {str(action) for action in team.programs["train"].rows[0]}
    assert {*ranges} >= {"ProfilerStep#2", "ProfilerStep#3", "STEP"} | row
    start, end = ranges["0F1"]
    ops = [one for one in trace["traceEvents"] if one.get("cat") == "cpu_op" and start <= one["ts"] <= end]
    assert {"aten::addmm", "aten::tanh"} & {one["name"] for one in ops}
    assert any(one["name"] == "process_name" and one["args"] == {"name": "pp=0"} for one in trace["traceEvents"])
    arrows = [one["id"] for one in trace["traceEvents"] if one["ph"] == "s"]
    assert len({*arrows}) == len(arrows), "those of two steps are not mixed up"


def test_a_profile_changes_no_bit(tmp_path):
    team, plain = profiled(tmp_path, pp=2), Team(linears(), pp=2, m=2, steps=4)
    for step in range(4):
        assert [one.losses for one in team.step(step)] == [one.losses for one in plain.step(step)]
    other = plain.weights()
    assert all(torch.equal(weight, other[name]) for name, weight in team.weights().items())


def test_of_actors_in_one_process_one_is_profiled_and_the_others_say_so(tmp_path):
    team = profiled(tmp_path, dp=2, data_parallel="parameter_server")
    found = [one.profile for one in team.step(1)]
    assert found.count("") >= 1 and {*found} - {""} <= {
        "torch records one thread of a process, now that of another actor"
    }


def test_servers_are_profiled_too(tmp_path):
    team = profiled(tmp_path, dp=1, data_parallel="parameter_server")
    (worker,) = team.workers
    worker.member.profiler.take = lambda step, count, take: take()  # it is not recorded, so that the server is
    assert [one.profile for one in team.step(1)] == [None, ""]
    assert {"ProfilerStep#2", "STEP"} <= {*slices(tmp_path / "run" / "profile" / "server 0 of pp=0.json.gz")}


def test_a_step_that_fails_is_not_written_and_the_next_one_is(tmp_path):
    team, path = profiled(tmp_path), tmp_path / "run" / "profile" / "pp=0.json.gz"
    team.step(1)
    (actor,) = team.workers
    sound = actor.member.faults
    actor.member.faults = FaultInjector()
    actor.member.faults.reach = lambda *_: 1 / 0
    with pytest.raises(Exception, match="ZeroDivisionError"):
        actor.member.profiler.take(2, 1, lambda: actor.member.run("train", 2))
    assert json.loads(plain_trace(path))["steps"] == [2]
    actor.member.faults = sound
    again = profiled(tmp_path)  # as after a recovery
    assert again.step(2)[0].profile == "" and json.loads(plain_trace(path))["steps"] == [2, 3]


def test_a_step_that_is_taken_again_replaces_itself_and_later_ones(tmp_path):
    path = tmp_path / "profile" / "pp=0.json.gz"
    for step in (2, 3, 4, 3):
        add_step(path, HEAD, step, [{"ph": "X", "name": f"step {step}", "ts": 1.5}, {"ph": "s", "id": 7, "ts": 2.0}])
    trace = json.loads(plain_trace(path))
    assert trace["steps"] == [2, 3] and trace["baseTimeNanoseconds"] == 1000
    assert [one["name"] for one in trace["traceEvents"] if one["ph"] == "X"] == ["step 2", "step 3"]
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing is left aside"


def test_a_damaged_file_begins_anew(tmp_path):
    path = tmp_path / "pp=0.json.gz"
    for found in (b"no gzip", gzip.compress(b"no trace"), gzip.compress(b'{"steps": [1')[:-4]):
        path.write_bytes(found)
        add_step(path, HEAD, 5, [])
        assert json.loads(plain_trace(path))["steps"] == [5]


def test_a_disk_that_fails_is_said_and_the_step_counts(tmp_path):
    team = profiled(tmp_path)
    (tmp_path / "run").write_text("no folder")
    result = team.step(1)[0]
    assert result.losses and "can't be written (Not a directory)" in result.profile
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(tmp_path)
    assert "is a symbolic link" in team.step(2)[0].profile


def test_times_are_those_of_the_driver_s_machine(tmp_path):
    team, path = profiled(tmp_path), tmp_path / "run" / "profile" / "pp=0.json.gz"
    team.step(1)
    (actor,) = team.workers
    actor.member.context.device.wall_offset = 3600.0
    team.step(2)
    ranges = slices(path)
    assert 3600e6 < ranges["ProfilerStep#3"][0] - ranges["ProfilerStep#2"][0] < 3660e6


def test_steps_that_overlap_are_profiled_as_one(tmp_path):
    team = profiled(tmp_path, profile=(1, 1), pp=2, schedule="pipedream", flush_every=2)
    results = team.each(lambda actor: actor.train(0, stream=2))
    assert "" in [one.profile for one in results]
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert json.loads(plain_trace(path))["steps"] == [2] and "ProfilerStep#2" in slices(path), "the last one"


def test_a_gpu_s_allocations_in_these_steps_are_a_file_for_torch_s_viewer(tmp_path, monkeypatch):
    team, calls = profiled(tmp_path), []
    device = team.all[0].member.context.device
    monkeypatch.setattr(device, "record_allocations", lambda on: calls.append(on))
    monkeypatch.setattr(device, "allocations", lambda: f"after {len(calls)} calls".encode())
    for step in range(4):
        team.step(step)
    assert calls == [True, True, False], "it begins anew in no step, and ends with the last one"
    assert (tmp_path / "run" / "profile" / "pp=0.memory.pickle").read_bytes() == b"after 2 calls"
