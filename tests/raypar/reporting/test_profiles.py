"""Profiled steps on the driver: when they come, what is said of them, and what of a damaged folder is merged."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from raypar.actors.inspect.profile_file import add_step
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.config.run import check_run, unrecorded
from raypar.config.toml import plain_of, run_of
from raypar.errors import ConfigError
from raypar.reporting.profiles import ProfiledSteps, merged_profiles
from raypar.schedules.schedule import Schedule

WORLD = SimpleNamespace(label=lambda rank: f"pp={rank}")


def test_the_actors_are_asked_after_each_of_the_steps(tmp_path):
    profiled = ProfiledSteps(Run(profile=(3, 4), folder=str(tmp_path)))
    assert [profiled.next_due(step, 9) for step in range(6)] == [3, 3, 3, 4, 9, 9]
    assert profiled.next_due(0, 2) == 2
    assert ProfiledSteps(Run(profile=(3, 4))).next_due(0, 9) == 9, "nodes that do not see the folder profile nothing"


def test_the_log_says_what_is_there(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    profiled = ProfiledSteps(Run(profile=(3, 6), folder=str(tmp_path)))
    assert not profiled.note([2], [StepResult(), StepResult()], WORLD)
    for step in (3, 4, 5):
        assert profiled.note([step], [StepResult(profile=""), StepResult(profile="no space")], WORLD)
    assert not profiled.note([6], [StepResult(profile="no space")] * 2, WORLD)
    profiled.report()
    profiled.report()
    warning, said = caplog.messages
    assert warning == "step 3: no profile of actor pp=1: no space; said once"
    assert said.startswith(f"profile of steps 3 to 5: {tmp_path / 'profile'}; raypar trace ")


def test_damaged_and_odd_traces_are_left_out(tmp_path):
    folder = tmp_path / "profile"
    head = {"baseTimeNanoseconds": 5_000_000, "actor": "pp=0", "distributedInfo": {"rank": 0}}
    sound = {"ph": "X", "name": "0F0", "pid": 7, "tid": 8, "ts": 3.0, "dur": 1.0}
    odd = [{"ph": "X"}, sound | {"pid": []}, sound | {"ts": "1"}, sound | {"ph": "f", "id": [1]}]
    odd += [{"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "ts": 3.0, "args": 1}]
    add_step(folder / "pp=0.json.gz", head, 2, [sound, *(one for one in odd if "id" not in one), sound | {"ts": 4.0}])
    add_step(folder / "pp=1.json.gz", head | {"actor": "pp=1", "baseTimeNanoseconds": 6_000_000}, 2, [sound])
    (folder / "pp=2.json.gz").write_bytes(b"no trace")
    (folder / "pp=3.json.gz").symlink_to(folder / "pp=0.json.gz")
    (folder / "timelines.jsonl").write_text('{"steps_taken": 2}\n')
    merged = merged_profiles(tmp_path, None)
    assert merged.steps == (2,)
    times = [(one["pid"], one["ts"]) for one in merged.trace["traceEvents"] if one["ph"] == "X"]
    assert times == [(0, 0.0), (0, 1.0), (1, 1000.0)], "each counts from its own moment"
    first, second, third = sorted(merged.faults)
    assert first.startswith("profile/pp=2.json.gz can't be read (it is damaged: ")
    assert second.startswith("profile/pp=3.json.gz can't be read (")
    assert third.startswith("profile/timelines.jsonl line 1 has ")


def test_processes_are_in_the_order_of_ranks_whichever_begins(tmp_path):
    for rank in (10, 2):
        head = {"baseTimeNanoseconds": 0, "actor": f"pp={rank}", "distributedInfo": {"rank": rank}}
        add_step(tmp_path / "profile" / f"pp={rank}.json.gz", head, 1, [])
    rows = {"actions": [[1, "pp=10", "1F0", 0.0, 1.0, 0, None, []], [0, "pp=2", "0F0", 1.0, 2.0, 0, None, []]]}
    line = json.dumps({"steps_taken": 1, "wall": 5.0, "timelines": [rows]})
    (tmp_path / "profile" / "timelines.jsonl").write_text(line + "\n")
    merged = merged_profiles(tmp_path, Schedule.of("mine", [["0F0", "0B0"], ["1F0", "1B0"]]))
    events = merged.trace["traceEvents"]
    assert {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"} == {
        "pp=2": 0,
        "pp=10": 1,
    }
    assert merged.faults == () and [one["pid"] for one in events if one["ph"] == "X"] == [1, 0]


def test_a_folder_without_profiles_has_none(tmp_path):
    assert merged_profiles(tmp_path, None) == (None, (), ())


WRONG = {
    "beyond": ({"profile": (2, 9)}, "profile is (2, 9), but the run has 5 steps: end with step 5, or set steps to 9"),
    "after": ({"profile": (7, 9)}, "the run has 5 steps: profile some of the steps 1 to 5, or set steps to 9"),
    "reversed": ({"profile": (4, 2)}, "its first step comes after its last one: give 2:4, (2, 4)"),
    "from 0": ({"profile": (0, 2)}, "profile.0 is 0: it must be at least 1"),
    "negative": ({"profile": (1, -2)}, "profile.1 is -2: it must be at least 1"),
    "one number": ({"profile": 3}, "profile is 3: it must be a tuple (in TOML a list); such as (10, 13)"),
    "a text": ({"profile": "2:3"}, "profile is '2:3': it must be a tuple"),
    "three": ({"profile": (1, 2, 3)}, "profile is (1, 2, 3): it must be"),
    "no folder": ({"folder": None}, "there is no folder for the traces: leave profile out, or give folder"),
    "tasks": (
        {"executor": "tasks"},
        "each action is a call by itself: leave profile out, or set executor to 'compiled'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_refused_with_all_other_faults(tmp_path, name):
    changes, fault = WRONG[name]
    fields = {"steps": 5, "profile": (2, 3), "folder": str(tmp_path / "run"), "save_every": -1} | changes
    with pytest.raises(ConfigError) as caught:
        check_run(Run(**fields))
    assert any(fault in one for one in caught.value.faults), caught.value.faults
    assert any("save_every" in one for one in caught.value.faults)


def test_a_run_that_is_written_is_read_again():
    run = Run(profile=(2, 3), folder="/tmp/run")
    assert run_of(plain_of(run)).profile == (2, 3)
    assert run_of({"profile": [2, 3]}).profile == (2, 3) and run_of({"profile": "none"}).profile is None
    assert unrecorded(run).profile is None
