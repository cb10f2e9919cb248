"""Muon's matrices that replicas and tensor ranks divide: bits, who computes what, and bytes."""

from __future__ import annotations

import threading

import pytest
import torch

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.optim.groups import is_matrix
from raypar.actors.optim.muon import muon_with_adamw
from raypar.actors.specs import worlds
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from tests.support.oracle_runs import whole
from tests.support.team import Team

MODEL = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)
EXPERTS = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, moe=MoE(experts=4, top_k=2))
ADAPTED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, lora=Lora(rank=8))
MUON = Muon(lr=1e-2, adamw_lr=3e-3)


@pytest.fixture
def cut(monkeypatch):
    return lambda *levels: monkeypatch.setattr(worlds, "CUT_LEVELS", frozenset(levels))


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
    fields = {"microbatches": 2 * mesh.dp, "steps": steps, "clip": None, "optim": MUON, "timeout": 20.0} | changes
    team = Team.of(Run(model=model, mesh=mesh, **fields))
    for number in range(steps):
        team.step(number)
    return team


def matrices_of(team):
    """The shapes of the model's matrices, each once."""
    found = whole(team.masters() if team.world.cuts else team.weights())
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
def test_every_level_has_the_bits_of_whole_matrices_and_computes_each_once(cut, computed, kind):
    model, mesh, changes = RUNS[kind]
    wanted = whole(trained(model, mesh, zero=1, **changes).weights())
    cut(1, 2, 3)
    for level in (1, 2, 3):
        computed.clear()
        team = trained(model, mesh, zero=level, **changes, **({"zero_reduce": "step"} if level > 1 else {}))
        assert team.world.cuts
        found = whole(team.weights())
        found = {name: weight.to(wanted[name].dtype) for name, weight in found.items()}
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        copies = team.world.replicas // team.world.mesh.shards
        assert sorted(computed) == sorted(2 * copies * matrices_of(team))
