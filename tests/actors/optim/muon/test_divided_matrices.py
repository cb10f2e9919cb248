"""Muon's matrices that replicas and tensor ranks divide: bits, who computes what, and bytes."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.optim import optimizer
from raypar.actors.optim.groups import is_matrix
from raypar.actors.optim.muon import muon_with_adamw
from raypar.actors.optim.muon.matrix_rounds import matrix_rounds
from raypar.actors.specs.data import Batches
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.traffic import step_traffic
from tests.support.odd_parameters import OddParameters
from tests.support.oracle_runs import whole
from tests.support.snapshots import loaded, read
from tests.support.team import Team, batch, mse

MODEL = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)
EXPERTS = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, moe=MoE(experts=4, top_k=2))
ADAPTED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, lora=Lora(rank=8))
MUON = Muon(lr=1e-2, adamw_lr=3e-3)


@pytest.fixture
def computed(monkeypatch):
    """The shapes of the matrices that actors orthogonalize."""
    found, lock, one = [], threading.Lock(), muon_with_adamw.orthogonalized

    def orthogonalized(matrix, *args):
        with lock:
            found.append(tuple(matrix.shape))
        return one(matrix, *args)

    monkeypatch.setattr(muon_with_adamw, "orthogonalized", orthogonalized)
    return found


def trained(model, mesh, steps=2, **changes):
    fields = {"microbatches": mesh.dp, "steps": steps, "clip": None, "optim": MUON, "timeout": 20.0} | changes
    team = Team.of(Run(model=model, mesh=mesh, **fields))
    for number in range(steps):
        team.step(number)
    return team


def matrices_of(team):
    """The shapes of the model's matrices, each once."""
    found = whole(team.masters() if team.world.sharded else team.weights())
    return sorted(tuple(one.shape) for name, one in found.items() if is_matrix(MUON, name, one.dim()))


RUNS = {
    "two": (MODEL, Mesh(dp=2), {}),
    "three": (MODEL, Mesh(dp=3), {}),
    "four": (MODEL, Mesh(dp=4), {"optim": Muon(lr=1e-2, nesterov=False, scale="original")}),
    "more than blocks": (MODEL, Mesh(dp=6), {}),
    "pipeline": (MODEL, Mesh(pp=2, dp=2), {}),
    "tensor": (MODEL, Mesh(dp=2, tp=2), {}),
    "tensor and pipeline": (MODEL, Mesh(pp=2, dp=2, tp=2), {}),
    "grid": (MODEL, Mesh(dp=2, tp="2d:2x2"), {"micro_batch_size": 2}),
    "context": (MODEL, Mesh(cp=2), {}),
    "hybrid": (MODEL, Mesh(dp=4, shard=2), {}),
    "experts": (EXPERTS, Mesh(dp=4, ep=2), {}),
    "experts of one": (EXPERTS, Mesh(dp=2, ep=2), {}),
    "experts with tensor": (EXPERTS, Mesh(dp=4, ep=2, tp=2), {}),
    "bf16": (MODEL, Mesh(dp=2), {"precision": Precision("bf16")}),
    "fp16": (MODEL, Mesh(dp=3), {"precision": Precision("fp16")}),
    "iterations in bf16": (MODEL, Mesh(dp=2, tp=2), {"optim": Muon(lr=1e-2, precision="bf16")}),
    "adapters": (ADAPTED, Mesh(dp=2), {}),
}


@pytest.mark.parametrize("kind", list(RUNS))
def test_every_level_has_the_bits_of_whole_matrices_and_computes_each_once(computed, kind):
    """Those of level 0; copies of shards, which add gradients up in another order, have those of level 1."""
    model, mesh, changes = RUNS[kind]
    wanted = whole(trained(model, mesh, zero=1 if mesh.shard else 0, **changes).weights())
    for level in (1, 2, 3) if kind in ("two", "tensor") else (1, 3):
        computed.clear()
        team = trained(model, mesh, zero=level, **changes, **({"zero_reduce": "step"} if level > 1 else {}))
        assert team.world.sharded
        found = whole(team.weights())
        found = {name: weight.to(wanted[name].dtype) for name, weight in found.items()}
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        copies = team.world.replicas // team.world.mesh.shards
        assert sorted(computed) == sorted(2 * copies * matrices_of(team))


class Odd(OddParameters):
    """Matrices that are frozen and unused besides."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4, 40), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(9, 9))

    def forward(self, x):
        x = nn.functional.linear(x, self.columns).tanh() * self.number
        return nn.functional.linear(x, self.gaps + self.frozen) + self.none.sum()


@pytest.mark.parametrize("dp", [2, 5])
def test_matrices_of_any_order_without_elements_and_without_gradients(dp):
    found = []
    for level in (0, 1, 3):
        fields = {"m": 2, "dp": dp, "zero": level, "optim": Muon(lr=0.01, adamw=())}
        fields |= {"zero_reduce": "step"} if level == 3 else {}
        team = Team(lambda: [Odd(), nn.Linear(4, 4, bias=False)], 1, **fields)
        before = team.weights()
        for number in range(2):
            team.step(number)
        found.append(team.weights())
        assert torch.equal(found[-1]["layers.0.unused"], before["layers.0.unused"])
        assert not torch.equal(found[-1]["layers.0.columns"], before["layers.0.columns"])
    first = found[0]
    assert [[name for name in first if not torch.equal(one[name], first[name])] for one in found] == [[]] * 3


@pytest.mark.parametrize(("mesh", "axis"), [(Mesh(dp=2), "dp"), (Mesh(dp=4, shard=2), "shard"), (Mesh(tp=2), "tp")])
def test_parts_go_once_to_the_actor_of_a_matrix_and_once_back(mesh, axis):
    model = replace(MODEL, hidden=64, heads=4)
    team = trained(model, mesh, steps=1)
    sizes = sum(math.prod(shape) for shape in matrices_of(team))
    sent = [table["all_to_all"][1] for table in team.ledger(axis)]
    copies = team.world.replicas // team.world.mesh.shards
    assert sum(sent) == copies * 2 * 4 * sizes // 2
    if axis != "tp":
        run = team.run
        paper = step_traffic(SizedRun.of(run, check_run(run)["train"]))
        assert sum(sent) == len(sent) * paper[axis, "all_to_all"]


def test_an_actor_has_one_matrix_a_round_and_all_rounds_cost_alike():
    shapes = {f"{kind}{i}": shape for i in range(6) for kind, shape in (("a", (8, 8)), ("b", (8, 32)), ("c", (32, 32)))}
    rounds = matrix_rounds(shapes, dict.fromkeys(shapes, range(4)))
    assert [len(one) for one in rounds] == [4, 4, 4, 4, 2]
    assert all(len({*one.values()}) == len(one) for one in rounds)
    assert [{name[0] for name in one} for one in rounds] == [{"c"}, {"c", "b"}, {"b"}, {"a"}, {"a"}]
    assert matrix_rounds({"x": (2, 2), "y": (3, 3)}, {"x": [1], "y": [1, 2]}) == [{"y": 1}, {"x": 1}]


def test_portions_off_the_device_do_not_divide_exchanges(monkeypatch):
    """With slices of different sizes, portions by those would let one rank exchange matrices that others have not."""
    monkeypatch.setattr(optimizer, "PORTION", 4 * 4 * 5)
    linears = lambda: [nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 4)) for n in (5, 3, 5)]  # noqa: E731
    model = Layers(linears, mse, plan={"layers.*.0": "column", "layers.*.2": "row"})
    for mesh, optim in ((Mesh(tp=2), Muon(adamw=())), (Mesh(dp=3, tp=2), Muon(adamw=("*.bias",)))):
        fields = {"optim": optim, "data": Batches(batch)}
        found = [trained(model, mesh, **fields, offload=offload).weights() for offload in ("none", "optimizer")]
        assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


@pytest.mark.parametrize("there", [Mesh(dp=2), Mesh(tp=2), Mesh(pp=2, dp=3)])
def test_spans_of_momentum_go_to_another_layout(there, tmp_path):
    team = trained(MODEL, Mesh(dp=3), steps=1)
    mine, tensors = read(team, tmp_path / "mine")
    other = Team.of(replace(team.run, mesh=there, microbatches=there.dp))
    theirs, _ = read(loaded(other, tmp_path / "mine", tensors), tmp_path / "theirs")
    assert mine["optim.blocks.0.mlp.up.weight.momentum_buffer"].shape == (64, 16)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
