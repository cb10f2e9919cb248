"""Stages whose layers compute in memory that is used again, as CUDA graphs do; and which runs have graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.worker.build import layers as compiled
from raypar.actors.worker.build.layers import captures_graphs, compile_layers
from tests.support.team import Team


class Memory:
    """Tensors in the order in which they are made, and the same ones again once no backward is awaited."""

    def __init__(self):
        self.tensors, self.next, self.awaited = [], 0, 0

    def begin(self):
        self.next *= bool(self.awaited)
        self.awaited += torch.is_grad_enabled()

    def keep(self, value):
        if self.next == len(self.tensors):
            self.tensors.append(torch.empty_like(value))
        self.next += 1
        return self.tensors[self.next - 1].copy_(value).detach()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, memory, x, weight):
        ctx.memory = memory
        ctx.save_for_backward(x, weight)
        return memory.keep(x @ weight.t())

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), keep = ctx.saved_tensors, ctx.memory.keep
        found = None, keep(gradient @ weight), keep(gradient.t() @ x)
        ctx.memory.awaited -= 1
        return found


class Captured(nn.Linear):
    """A layer whose outputs and gradients are where a graph has them."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.memory = Memory()

    def forward(self, x):
        self.memory.begin()
        return Product.apply(self.memory, x, self.weight)


class Ordinary(Captured):
    def forward(self, x):
        return Product.apply(self.memory, x, self.weight)

    def __init__(self):
        super().__init__()
        self.memory.keep = torch.Tensor.detach


def made(kind):
    return lambda: [kind() for _ in range(4)]


def trained(kind, copies=False, **changes):
    team = Team(made(kind), data=batch, **changes)
    for actor in team.all:
        for stage in actor.stages.values():
            stage.is_captured = copies
    losses = [[one.losses for one in team.step(number)] for number in range(2)]
    losses.append([one.losses for one in team.step(2, "evaluate")])
    return losses, team.weights()


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x = torch.randn(4, 4, generator=generator)
    return x, x.sin()


LAYOUTS = {
    "alone": {"pp": 1},
    "pp": {"pp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "recomputed": {"pp": 2, "recompute": "full"},
    "dp": {"pp": 1, "dp": 2, "m": 2},
    "zero 2": {"pp": 2, "dp": 2, "m": 2, "zero": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_copies_leave_a_stage_and_gradients_stay(layout):
    losses, weights = trained(Ordinary, **layout)
    found, others = trained(Captured, copies=True, **layout)
    assert found == losses
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def test_without_copies_numbers_would_change():
    _, weights = trained(Ordinary, pp=1)
    _, others = trained(Captured, pp=1)
    assert not all(torch.equal(others[name], weight) for name, weight in weights.items())


class Gpu(ComputeDevice):
    kind = "cuda"


@pytest.mark.parametrize(
    ("changes", "device", "why"),
    [
        ({}, Gpu(), None),
        ({"compile": True}, Gpu(), ""),
        ({}, ComputeDevice(), "CPUs have no CUDA graphs"),
        ({"dp": 2, "zero": 3}, Gpu(), "weights come to other memory in every step"),
        ({"offload": "parameters", "zero": 3, "dp": 2}, Gpu(), "weights come to other memory in every step"),
        ({"schedule": "pipedream", "pp": 2}, Gpu(), "weights have versions in other memory"),
    ],
)
def test_which_runs_have_graphs_and_a_line_says_why_not(changes, device, why, monkeypatch):
    lines = []
    monkeypatch.setattr(compiled.log, "warning", lambda text, *parts: lines.append(text % parts))
    plan = Team(made(Ordinary), **{"pp": 1, "compile": "graphs"} | changes).all[0].member.context.plan
    lines.clear()
    assert captures_graphs(plan, device) == (why is None)
    assert [why in line and "layers are compiled as with True" in line for line in lines] == [True] * bool(why)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_the_compiler_is_asked_for_graphs():
    modes = []

    def backend(graph, inputs, mode=None):
        modes.append(mode)
        return graph.forward

    for graphs in (True, False):
        layers = [Doubled()]
        compile_layers(layers, backend, graphs=graphs)
        layers[0](torch.ones(1, 3))
        torch.compiler.reset()
    assert modes == ["reduce-overhead", None]


def test_on_a_cpu_graphs_train_as_compiled_layers_do(monkeypatch):
    said = []
    monkeypatch.setattr(compiled.log, "warning", lambda text, *parts: said.append(text % parts))

    def eager(modules, graphs):
        assert not graphs
        compile_layers(modules, lambda graph, inputs: graph.forward)

    monkeypatch.setattr("raypar.actors.worker.build.assemble.compile_layers", eager)
    found = trained(Ordinary, pp=2, compile="graphs")[0]
    assert found == trained(Ordinary, pp=2, compile=True)[0]
    assert len(said) == 2 and len({*said}) == 1, "each actor has one line"
    assert rp.faults(rp.Run(compile="graph")) == ["compile is 'graph': it must be true or false or 'graphs'"]
