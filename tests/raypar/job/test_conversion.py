"""Data that the nodes of a cluster convert: the same bytes, and what is told when that fails."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

import raypar as rp
from raypar.actors.data.examples.example_files import open_examples
from raypar.job.start import conversion
from raypar.job.start.conversion import convert_on_cluster
from tests.support.examples import made_jsonl


def dies_once(block):
    if block.startswith(b"mark") and not (mark := Path(block[5:].decode())).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if block == b"wrong":
        raise ValueError("this one is wrong")
    return block.upper()


@pytest.mark.long
def test_tasks_answer_in_order(job_on, by_value, monkeypatch):
    from raypar.cluster.nodes import tasks

    job_on(2)
    monkeypatch.setattr(tasks, "_GROUP", 10)
    blocks = [b"abc", b"defghijklmnop", b"rs", b"t" * 9, b"q"]
    assert [*tasks.in_tasks(dies_once, blocks, 1)] == [block.upper() for block in blocks]
    with pytest.raises(ValueError, match=r"^this one is wrong$"):
        list(tasks.in_tasks(dies_once, [b"a", b"wrong"], 1))


@pytest.mark.long
def test_a_task_whose_process_dies_runs_again(job_on, by_value, tmp_path):
    from raypar.cluster.nodes import tasks

    job_on(2)
    mark = b"mark " + str(tmp_path / "x").encode()
    assert [*tasks.in_tasks(dies_once, [b"abc", mark], 1)] == [b"ABC", mark.upper()]
    assert (tmp_path / "x").exists()


def test_a_run_on_several_nodes_has_its_data_converted_there(job_on, tmp_path, monkeypatch):
    job_on(2)
    path = made_jsonl(tmp_path / "data.jsonl", [{"text": f"number {i}"} for i in range(50)])
    run = rp.recipe("gpt-tiny", data=rp.Examples(str(path), cache=str(tmp_path / "cache")))
    used = list[int]()

    def in_tasks(call, blocks, cpus):
        used.append(cpus)
        return tasks.in_tasks(call, blocks, cpus)

    from raypar.cluster.nodes import tasks
    from raypar.cluster.nodes.nodes import living_nodes

    monkeypatch.setattr(conversion, "in_tasks", in_tasks)
    monkeypatch.setattr(conversion, "connected", lambda: nullcontext([*living_nodes()] * 2))
    convert_on_cluster(run)
    assert not used and not [*(tmp_path / "cache").rglob("*.tmp")], "it is small"
    monkeypatch.setattr(conversion, "_WORTH", 0)
    convert_on_cluster(run)
    assert not used, "it is converted"
    far = rp.Examples(str(path), cache=str(tmp_path / "far"))
    convert_on_cluster(rp.recipe("gpt-tiny", data=far))
    assert len(used) == 1 and used[0] >= 2
    here, there = (open_examples("path", str(path), spec) for spec in (run.data, far))
    assert here.ids.tolist() == there.ids.tolist() and here.facts == there.facts
    path.write_text("{")
    convert_on_cluster(rp.recipe("gpt-tiny", data=far))  # the check of the run tells what is wrong


def test_where_the_cluster_fails_this_machine_converts(tmp_path, monkeypatch, caplog):
    path = made_jsonl(tmp_path / "data.jsonl", [{"text": f"number {i}"} for i in range(50)])
    run = rp.recipe("gpt-tiny", data=rp.Examples(str(path), cache=str(tmp_path / "cache")))

    def fails():
        raise rp.JobError("Ray does not start")

    monkeypatch.setattr(conversion, "starts_own_ray", lambda: False)
    monkeypatch.setattr(conversion, "connected", fails)
    monkeypatch.setattr(conversion, "_WORTH", 0)
    convert_on_cluster(run)
    assert caplog.messages[-1] == "the data is converted on this machine alone, because Ray does not start"
    assert not [*(tmp_path / "cache" / "examples").iterdir()]
    convert_on_cluster(rp.recipe("gpt-tiny", data=5))
