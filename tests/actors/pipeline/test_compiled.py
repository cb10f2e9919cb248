"""Compiled layers compute the same, and layers that can't be compiled are computed as they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.results import losses_of
from raypar.actors.worker.build import layers as compiled
from raypar.actors.worker.build.layers import compile_layers
from tests.support.hugging_face import some_ids
from tests.support.team import Team

MODEL = rp.Llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=12, vocab=29)


def batch(step, microbatch, dp):
    ids = some_ids(step + 10 * dp)[microbatch : microbatch + 1]
    return ids, torch.roll(ids, -1, 1)


def trained(mesh, **changes):
    """Losses of two steps, and the weights behind them."""
    fields = {"model": MODEL, "data": rp.Batches(batch), "microbatches": 2, "optim": rp.SGD(lr=0.1), "timeout": 100.0}
    team = Team.of(rp.Run(mesh=mesh, **fields | changes))
    return [losses_of(team.step(step))[0] for step in range(2)], team.weights()


@pytest.fixture
def told(monkeypatch):
    """The warnings of what failed."""
    lines = []
    monkeypatch.setattr(compiled.log, "warning", lambda text, *parts: lines.append(text % parts))
    return lines


@pytest.fixture
def made(monkeypatch):
    """The graphs that the compiler makes; they are run as they are."""
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        "raypar.actors.worker.build.assemble.compile_layers", lambda modules, graphs: compile_layers(modules, kept)
    )
    return graphs


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [(rp.Mesh(), {}), (rp.Mesh(pp=2), {"backward": "split", "recompute": "full"}), (rp.Mesh(dp=2), {"zero": 3})],
    ids=["alone", "pp2", "zero 3"],
)
def test_compiled_layers_learn_the_same(mesh, changes, made, told):
    losses, weights = trained(mesh, **changes)
    assert not made
    found, compiled_weights = trained(mesh, compile=True, **changes)
    assert made, "the compiler has made something"
    assert not told
    for one, other in zip(found, losses, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(compiled_weights[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "mesh",
    [rp.Mesh(), rp.Mesh(pp=2), pytest.param(rp.Mesh(tp=2), marks=pytest.mark.long)],
    ids=["alone", "pp2", "tp2"],
)
def test_layers_of_a_kind_are_compiled_once_whatever_their_number_and_that_of_microbatches(mesh, made):
    counts = []
    for layers, microbatches in ((2, 2), (5, 4)):
        torch.compiler.reset()
        made.clear()
        data = rp.Batches(lambda step, microbatch, dp: batch(step, microbatch % 2, dp))
        run = rp.Run(
            mesh=mesh, model=replace(MODEL, layers=layers), data=data, microbatches=microbatches, timeout=100.0
        )
        team = Team.of(replace(run, compile=True))
        team.step(0)
        counts.append(len(made))
        team.step(1)
        assert len(made) == counts[-1], "nothing is compiled again"
    few, more = counts
    assert 0 < more <= few


def test_what_can_not_be_compiled_is_computed_and_told_once(told):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler\nwas found")

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    layers = [Doubled(), Doubled()]
    wanted = layers[1](layers[0](torch.ones(2, 3)))
    compile_layers(layers, broken)
    for _ in range(2):
        assert torch.equal(layers[1](layers[0](torch.ones(2, 3))), wanted)
    (line,) = told
    assert "layers are computed without torch's compiler, which failed (BackendCompilerFailed: " in line
    assert "\n" not in line


def test_an_error_of_the_layer_is_its_own():
    class Wrong(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    layer = Wrong()
    compile_layers([layer], "eager")
    with pytest.raises(KeyError, match="mine"):
        layer(torch.ones(1))


@pytest.mark.long
def test_the_compiler_is_imported_only_where_it_is_asked_for():
    code = "import sys, raypar.actors.worker.build.assemble; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
