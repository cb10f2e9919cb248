"""Formulas of the notes beside the real thing: modules, torch's counter of FLOPs, simulations, planned messages."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.config.run import check_run
from raypar.planner import formulas
from raypar.planner.sizes.parameters import num_parameters
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.traffic import step_traffic
from raypar.schedules import build
from raypar.schedules.simulation.simulate import Costs, simulate
from tests.support.team import Team

MODULES = [one.name for one in pkgutil.iter_modules(formulas.__path__)]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_the_notes_and_papers(module):
    found = doctest.testmod(importlib.import_module(f"raypar.planner.formulas.{module}"))
    assert found.failed == 0
    assert found.attempted > 0


def test_planning_by_hand_needs_no_torch():
    code = "import raypar, sys; raypar.formulas.parameters(2, 8, 4, 10); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def sizes():
    return st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 24]), st.sampled_from([4, 8]), st.integers(3, 30))


@given(sizes=sizes(), tied=st.booleans())
def test_parameters_are_those_of_the_modules_but_for_biases_and_norms(sizes, tied):
    layers, hidden, seq, vocab = sizes
    model = rp.GPT(layers=layers, hidden=hidden, heads=4, seq=seq, vocab=vocab, tied=tied)
    small = layers * (2 * 2 * hidden + hidden + 4 * hidden + hidden) + 2 * hidden
    assert num_parameters(model) - small == formulas.parameters(layers, hidden, seq, vocab, tied=tied)


@pytest.mark.long
@given(sizes=sizes(), samples=st.integers(1, 3))
def test_flops_are_those_that_torch_counts(sizes, samples):
    layers, hidden, seq, vocab = sizes
    model = rp.GPT(
        layers=layers, hidden=hidden, heads=4, seq=seq, vocab=vocab, attention="materialised", linear="torch"
    )
    modules = build_model(model, 0).materialize(range(layers + 2), 0)
    x = torch.zeros(samples, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        for module in modules:
            x = module(x)
    forward = counter.get_total_flops()
    assert forward == sum(formulas.forward_flops(layers, hidden, seq, vocab, samples).values())
    with FlopCounterMode(display=False) as counter:
        x.sum().backward()
    assert forward + counter.get_total_flops() == formulas.training_flops(layers, hidden, seq, vocab, samples)


def test_what_is_computed_again_counts():
    whole = formulas.training_flops(2, 64, 32, 100)
    assert formulas.training_flops(2, 64, 32, 100, recomputed="selective") == whole + 2 * 4 * 32**2 * 64
    full = formulas.training_flops(2, 64, 32, 1, recomputed="full") - 3 * formulas.forward_flops(2, 64, 32, 1)["head"]
    assert full == 96 * 32 * 2 * 64**2 * (1 + 32 / (6 * 64))  # equation 3 of the paper, without its head
    assert formulas.hfu(1e3, 1e12, 2, 64, 32, 100, recomputed="none") == formulas.mfu(1e3, 1e12, 2, 64, 32, 100)


@pytest.mark.parametrize(
    ("form", "ranks", "microbatches", "chunks"),
    [
        ("naive", 3, 4, 1),
        ("gpipe", 4, 8, 1),
        ("1f1b", 4, 8, 1),
        ("1f1b", 4, 2, 1),
        ("interleaved", 4, 8, 2),
        ("interleaved", 2, 6, 3),
        ("zb-h1", 4, 8, 1),
        ("zb-h1", 3, 6, 1),
    ],
)
def test_bubbles_are_those_of_simulated_schedules(form, ranks, microbatches, chunks):
    f, i, w = 1.0, 1.25, 0.75
    costs = Costs(f=f / chunks, b=(i + w) / chunks, i=i / chunks, w=w / chunks)
    timeline = simulate(build(form, ranks, microbatches, chunks if chunks > 1 else None), costs)
    spans = [
        max(e.end for e in timeline.events if e.rank == rank) - min(e.start for e in timeline.events if e.rank == rank)
        for rank in range(ranks)
    ]
    step = (
        max(event.end for event in timeline.events) if form in ("naive", "gpipe", "1f1b", "interleaved") else max(spans)
    )
    found = 1 - microbatches * (f + i + w) / step
    assert found == pytest.approx(formulas.bubble(form, ranks, microbatches, chunks, f=f, i=i, w=w), rel=1e-9)


def planned(axis, op, **changes):
    run = rp.Run(model=rp.GPT(layers=2, hidden=16, heads=4, seq=8, vocab=256), data=rp.Text("text"), **changes)
    schedule = check_run(run)["train"]
    sent = step_traffic(SizedRun.of(run, schedule))
    return sum(count for (of, what), count in sent.items() if of == axis and what in op)


def test_messages_are_those_that_are_planned(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text that is long enough for a few sequences of eight tokens " * 20)
    run = {"microbatches": 1, "micro_batch_size": 2, "device": "cpu"}
    parameters = 4 * num_parameters(rp.GPT(layers=2, hidden=16, heads=4, seq=8, vocab=256))
    for level in (0, 1, 2, 3):
        ops = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
        found = planned("dp", ops, mesh=rp.Mesh(dp=2), zero=level, **run)
        assert found == pytest.approx(formulas.zero_bytes(level, parameters, 2), rel=0.01), level


@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_sends_over_tensor_ranks_what_the_formula_says(sequence):
    """Of a model with one layer more, what it sends more. What is sent for the norm does not depend on the layers.

    With sequences divided, each rank has the gradients of norms and of two biases, 6 h, for its own tokens only.
    """
    sent = []
    for layers in (1, 2):
        model = rp.GPT(layers=layers, hidden=16, heads=4, seq=8, vocab=11)
        run = rp.Run(model=model, data=rp.Batches(tokens), mesh=rp.Mesh(tp=2), sequence_parallel=sequence)
        team = Team.of(replace(run, microbatches=1, steps=1, device="cpu", clip=None))
        team.step(0)
        sent.append([sum(nbytes for _, nbytes, *_ in ledger.values()) for ledger in team.ledger("tp")])
    more = {two - one for one, two in zip(*sent, strict=True)}
    besides = formulas.collective_bytes("all_reduce", 6 * 16 * 4, 2) if sequence else 0
    assert more == {formulas.tensor_parallel_bytes(1, 16, 8, 3, 2, element=4) + besides}


def tokens(step, microbatch, dp):
    ids = torch.arange(24).view(3, 8) % 11
    return ids, ids
