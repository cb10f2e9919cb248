"""Replicas that divide the elements of offloaded weights compute what replicas on their devices compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.precision import Precision
from tests.actors.data_parallel.test_even_parts import assert_divided_evenly, equal, made, once
from tests.actors.data_parallel.test_memory import formulas
from tests.support.oracle_runs import whole

MODEL = GPT(layers=1, hidden=32, heads=2, seq=8, vocab=256)
TIED = replace(MODEL, tied=True)
EXPERTS = replace(MODEL, moe=MoE(experts=4, top_k=2))
BF16, FP16 = {"precision": Precision("bf16")}, {"precision": Precision("fp16")}
OPTIMIZER, PARAMETERS = {"offload": "optimizer"}, {"offload": "parameters"}
FILES = {"offload_folder": True}
MUON, SUMS = {"optim": Muon(lr=0.01)}, {"precision": Precision("bf16", reduce="bf16")}
RUNS = {
    "1 optimizer": (1, MODEL, Mesh(dp=2), OPTIMIZER | FILES),
    "1 optimizer, fp16, averages": (1, MODEL, Mesh(dp=3), OPTIMIZER | FP16 | {"ema": 0.9}),
    "1 optimizer, tensor group, Muon": (1, MODEL, Mesh(dp=2, tp=2), OPTIMIZER | MUON),
    "1 optimizer, expert actors": (1, EXPERTS, Mesh(dp=2, expert_actors=2), OPTIMIZER),
    "1 parameters": (1, MODEL, Mesh(dp=3), PARAMETERS),
    "1 parameters, tied, bf16": (1, replace(TIED, layers=2), Mesh(pp=2, dp=2), PARAMETERS | BF16 | FILES),
    "1 parameters, experts": (1, EXPERTS, Mesh(dp=2, ep=2), PARAMETERS),
    "1 parameters, copies of shards": (1, MODEL, Mesh(dp=4, shard=2), PARAMETERS | FILES | SUMS),
    "2 optimizer, copies of shards": (2, MODEL, Mesh(dp=4, shard=2), OPTIMIZER | BF16),
    "2 optimizer, experts": (2, EXPERTS, Mesh(dp=4, ep=2), OPTIMIZER | BF16 | FILES),
    "2 parameters, fp16": (2, TIED, Mesh(dp=2), PARAMETERS | FP16),
    "2 parameters, Muon": (2, MODEL, Mesh(dp=3), PARAMETERS | MUON | BF16 | FILES),
    "2 parameters, tiles": (2, MODEL, Mesh(dp=2), PARAMETERS | {"tile": 2}),
    "3 optimizer": (3, replace(TIED, layers=2), Mesh(pp=2, dp=3), OPTIMIZER | SUMS),
    "3 optimizer, Muon": (3, MODEL, Mesh(dp=2), OPTIMIZER | MUON | FILES),
    "3 parameters, averages": (3, replace(MODEL, layers=2), Mesh(pp=2, dp=2), PARAMETERS | FILES | {"ema": 0.9}),
    "3 parameters, experts": (3, EXPERTS, Mesh(dp=4, ep=2), PARAMETERS | BF16),
    "3 parameters, Muon": (3, EXPERTS, Mesh(dp=2, ep=2), PARAMETERS | MUON),
}


def trained(kind, folder):
    level, model, mesh, changes = RUNS[kind]
    changes = {"microbatches": 2} | changes | ({"offload_folder": str(folder)} if "offload_folder" in changes else {})
    return made(model, mesh, changes, **once(level))


def on_devices(kind):
    """What runs without offload compute: at level 0, or for copies of shards at another level."""
    level, model, mesh, changes = RUNS[kind]
    changes = {name: value for name, value in changes.items() if not name.startswith("offload")}
    return made(model, mesh, {"microbatches": 2} | changes, **once(3 - level if mesh.shard else 0))


@pytest.mark.parametrize("kind", list(RUNS))
def test_every_bit_is_that_of_weights_on_devices(kind, tmp_path):
    _, *plain = on_devices(kind)
    team, *found = trained(kind, tmp_path)
    assert team.world.sharded
    assert found[0] == plain[0]
    for ours, theirs in zip(map(whole, found[1:3]), map(whole, plain[1:3]), strict=True):
        equal({name: one if one is None else one.to(theirs[name].dtype) for name, one in ours.items()}, theirs)
    assert_divided_evenly(team)
    assert_stored(team)
    assert not list(tmp_path.iterdir())


def assert_stored(team):
    """What is offloaded is in the storage, and as large as the planner counts."""
    found, wanted = [actor.held().most for actor in team.workers], formulas(team)
    for pp, formula in {team.world.pp(rank): one for rank, one in enumerate(wanted)}.items():
        for kind in ("offloaded", "weights"):
            most = max(found[rank][kind] for rank in team.world.replicas_of(pp))
            assert most == pytest.approx(getattr(formula, kind), rel=0.01)
    for actor in team.all:
        part, update = actor.member.parts.part, actor.member.state.update
        masters = list(part.masters.parameters.values())
        states = [value for _, key, value in update.state() if key and value.dim()]
        weights = part.held if team.run.offload == "parameters" else []
        kept = [*masters, *states, *(one.grad for one in masters), *weights]
        assert [one.shape for one in kept if one.numel() and not part.storage.holds(one)] == []
