"""Profiled steps of real actors: their traces, the merged one, and runs that fail or go on in the middle of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import raypar as rp
from raypar.actors.inspect.profile_file import plain_trace
from raypar.cli.main import run_command

pytestmark = pytest.mark.usefixtures("cluster", "kept_actors")
MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=16)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, steps=5, profile=(2, 4), timeout=20.0)


def losses(run, chaos=(), steps=None, **launch):
    with rp.launch(run, chaos=chaos, **launch) as job:
        return [report.loss for report in job.train(steps)]


def traces(folder):
    files = sorted((folder / "profile").glob("*.json.gz"))
    return {path.name: json.loads(plain_trace(path)) for path in files}


@pytest.fixture(scope="module")
def plain(cluster, pool):
    with pool.serving():
        return losses(replace(RUN, profile=None))


def test_each_actor_has_a_trace_and_one_has_all_of_them(tmp_path, plain, capsys):
    run = replace(RUN, folder=str(tmp_path / "run"), eval_every=3)
    assert losses(run) == plain, "an evaluation is in the middle, and no bit is another"
    found = traces(tmp_path / "run")
    assert [*found] == ["pp=0.json.gz", "pp=1.json.gz"] and all(one["steps"] == [2, 3, 4] for one in found.values())
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("profile of steps 2 to 4: ") == 1 and f"raypar trace {tmp_path / 'run'}" in log

    out = tmp_path / "t.json"
    assert run_command(["trace", str(tmp_path / "run"), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out} (profile of steps 2 to 4)\n"
    events = json.loads(out.read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {0: "pp=0", 1: "pp=1"}
    slices = [one for one in events if one["ph"] == "X"]
    own = {(one["pid"], one["name"]): [] for one in slices}
    for one in slices:
        own[one["pid"], one["name"]].append((one["ts"], one["ts"] + one["dur"], one["tid"]))
    for pid, action in ((0, "0F1"), (1, "1F1"), (0, "0B0"), (1, "1B0"), (0, "STEP"), (1, "STEP")):
        measured, recorded = ([at for at in own[pid, action] if (at[2] < 1000) == of_run] for of_run in (True, False))
        assert len(measured) == len(recorded) == 3, "of each step, by the run and by torch"
        for one, other in zip(sorted(measured), sorted(recorded), strict=True):
            assert one[0] <= other[1] and other[0] <= one[1], "they are the same moments"
    start, end, thread = next(at for at in own[1, "1B0"] if at[2] >= 1000)
    below = {one["name"] for one in slices if one["pid"] == 1 and one["tid"] == thread and start <= one["ts"] <= end}
    assert any(name.startswith("aten::") for name in below) and any("Backward" in name for name in below)
    arrows = [one["id"] for one in events if one["ph"] == "s"]
    assert len({*arrows}) == len(arrows) and min(one["ts"] for one in events if "ts" in one) == 0.0


def test_a_run_that_fails_in_the_middle_has_all_of_them(tmp_path, plain):
    run = replace(RUN, folder=str(tmp_path / "run"), max_failures=1)
    assert losses(run, [rp.chaos.kill("pp=1", at="1B1", step=3)]) == plain
    assert all(one["steps"] == [2, 3, 4] for one in traces(tmp_path / "run").values())
    assert "profile of steps 2 to 4: " in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_that_is_resumed_in_the_middle_adds_to_them(tmp_path, plain, capsys):
    folder = tmp_path / "run"
    run = replace(RUN, folder=str(folder), save_every=3)
    assert losses(run, steps=3) == plain[:3]
    assert "profile of steps 2 to 3: " in (folder / "log.txt").read_text()
    assert losses(run, resume=str(folder)) == plain[3:]
    assert all(one["steps"] == [2, 3, 4] for one in traces(folder).values())
    assert "profile of step 4: " in (folder / "log.txt").read_text()
    assert run_command(["trace", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder / 'trace.json'} (profile of steps 2 to 4)\n"
    assert losses(replace(run, profile=None), overwrite=True) == plain, "a folder with profiles is one of a run"
    assert not (folder / "profile").exists()
