"""The examples run and do what they say."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import raypar as rp

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_train_your_text(kept_actors, tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "b.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
    evaluation = load("train_your_text").main(str(tmp_path), steps=8)
    assert evaluation.loss < 5.0
    assert evaluation.tokens == 4 * 8 * 4 * 128


def test_own_model(kept_actors):
    example = load("own_model")
    first, last = example.main(steps=30)
    assert last < 0.7 * first
    assert all(bool((a == b).all()) for a, b in zip(example.batch(3, 1, 0), example.batch(3, 1, 0), strict=True))


@pytest.mark.long
def test_own_experts(kept_actors):
    first, last, load_of_busiest = load("own_experts").main(steps=40)
    assert 1 <= load_of_busiest <= 4
    assert last < 0.6 * first


def run_cells(name):
    """Run the cells of an example one after the other, as a notebook does, and return what they define."""
    head, *cells = (EXAMPLES / f"{name}.py").read_text().split("\n# %% ")
    defined = {"__name__": "a_notebook"}
    for cell in (head, *(f"# {cell}" for cell in cells)):
        exec(compile(cell, name, "exec"), defined)
    return defined


def test_write_your_own_schedule_on_paper(catalog_as_before, capsys):
    run_cells("write_your_own_schedule")
    said = capsys.readouterr().out
    assert "It also fails with 2 ranks and 2 microbatches, the smallest:\nrank 0:   0F0  >0B0<" in said
    assert "rank 0  F0 F1 F2 F3 F4 F5 F6 B0 F7 B1    B2" in said
    assert "1f1b   lasts 41.0" in said
    assert "eager  lasts 36.0" in said
    assert "edited in slots: makespan 10" in said


def test_write_your_own_schedule_on_actors(job_of, catalog_as_before):
    edited = run_cells("write_your_own_schedule")["edited"]
    seen = []
    for schedule in ("1f1b", "eager", edited):
        job = job_of(replace(rp.recipe("gpt-tiny"), schedule=schedule, steps=2))
        seen.append([(report.loss, report.grad_norm) for report in job.train()])
    assert seen[0] == seen[1] == seen[2]


def test_first_steps(kept_actors, capsys):
    defined = run_cells("first_steps")
    said = capsys.readouterr().out
    assert "0B0 waits for 1SEND_B0 + 0RECV_B0" in said
    assert "values for other actions" in said
    assert "bitwise equal to the recording" in said
    assert "resumed from step-00000002: the same losses" in said
    assert defined["by_hand"].step == 1


@pytest.mark.long
def test_tensor_parallel_plan(kept_actors, capsys):
    defined = run_cells("tensor_parallel_plan")
    said = capsys.readouterr().out
    assert "'layers.*.up' names no module: use 'layers.*.patches.up' or 'layers.*.channels.up'" in said
    assert "torch.Size([128, 32])" in said
    first, *_, last = [report.loss for report in defined["reports"]]
    assert last < 0.7 * first
    assert defined["verdict"].ok, said
    assert not defined["verdict"].bitwise


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_the_interpreter_of_eighty_lines_computes_the_gradients_of_one_process(monkeypatch, capsys, name):
    path = EXAMPLES / "interpreter.py"
    assert len(path.read_text().splitlines()) <= 80
    monkeypatch.setattr(sys, "argv", ["interpreter.py", name])
    runpy.run_path(str(path))
    told = capsys.readouterr().out
    assert told.startswith("rank 0  ") and told.endswith("those of one process, bitwise: True\n")
