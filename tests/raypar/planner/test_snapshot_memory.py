"""What the planner says of the memory of snapshots, against the memory files that the actors of a run fill."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.worlds import world_of
from raypar.actors.worker.snapshot_keeper import SnapshotKeeper
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.memory.all_actors import actors_memory
from raypar.planner.memory.snapshots import snapshot_counts
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from tests.support.team import Team

SMALL = {"microbatches": 2, "steps": 3, "timeout": 20.0, "max_failures": 1}
EXPERTS = recipe("moe-tiny", **SMALL)
EXPERTS = replace(EXPERTS, model=replace(EXPERTS.model, layers=2, dropout=0.0))
DENSE = recipe("gpt-tiny", **SMALL)
RUNS = {
    "replicas": replace(DENSE, mesh=Mesh(pp=2, dp=2), zero=0),
    "zero": replace(DENSE, mesh=Mesh(pp=2, dp=2), zero=2),
    "zero3": replace(DENSE, mesh=Mesh(dp=2), zero=3, buddy_every=0),
    "copies of shards": replace(DENSE, mesh=Mesh(dp=4, shard=2), zero=2),
    "bf16": replace(DENSE, mesh=Mesh(pp=2), precision=Precision("bf16")),
    "offloaded": replace(DENSE, mesh=Mesh(pp=2), offload="parameters"),
    "server": replace(DENSE, mesh=Mesh(pp=2, dp=2), data_parallel="parameter_server"),
    "servers": replace(DENSE, mesh=Mesh(dp=2), data_parallel="parameter_server", servers=2, buddy_every=1),
    "experts": replace(EXPERTS, mesh=Mesh(dp=4, ep=2), zero=1),
    "expert actors": replace(EXPERTS, mesh=Mesh(dp=2, expert_actors=2), zero=1),
    "expert actors, Muon": replace(EXPERTS, mesh=Mesh(pp=2, dp=2, expert_actors=1), zero=0, optim=Muon()),
    "expert actors, offloaded": replace(EXPERTS, mesh=Mesh(dp=2, expert_actors=2), zero=1, offload="optimizer"),
}


def filled(keeper):
    """Bytes of tensors in the memory files of an actor's own snapshots."""
    headers = [8 + int.from_bytes(os.pread(file, 8, 0), "little") for file in keeper._slots.files]
    return sum(max(0, os.fstat(file).st_size - one) for file, one in zip(keeper._slots.files, headers, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("name", RUNS)
def test_snapshots_take_the_memory_that_is_planned(name):
    run = RUNS[name]
    schedule, world = check_run(run)["train"], world_of(run)
    sized, team = SizedRun.of(run, schedule), Team.of(run)
    timeline = from_flops(sized).timeline
    keepers = [SnapshotKeeper(actor.member.context.plan, lambda step: None) for actor in team.all]
    for step in range(2):
        team.step(step)
        for actor, keeper in zip(team.all, keepers, strict=True):
            keeper.after(step + 1, actor.member.state)
    measured, first = [filled(keeper) for keeper in keepers], 0
    own, copied = snapshot_counts(run)
    for formulas in actors_memory(sized, timeline):
        each = world.mesh.size // run.mesh.pp if not first else (len(keepers) - first) // run.mesh.pp
        for stage, formula in enumerate(formulas):
            found = [size for rank, size in enumerate(measured[first:], first) if world.pp(rank) == stage][:each]
            most = max(found)  # of equal replicas the first saves all; of those that save parts one has most
            assert formula.snapshots == pytest.approx(most, rel=0.03, abs=256)
            assert formula.copies * own == formula.snapshots * copied
        first += world.mesh.size
    for keeper in keepers:
        keeper.leave(comes_back=False)
