"""What the planner says of experts on several actors, against what those actors hold and send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import Muon
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.memory.all_actors import actors_memory
from raypar.planner.prediction import from_flops
from raypar.planner.resource_needs import memory_needs
from raypar.planner.sizes.sized_run import SizedRun, counts_of
from raypar.planner.traffic import step_traffic
from tests.support.team import Team

STATE = "weights", "gradients", "optimizer"
TINY = recipe("moe-tiny")
RUN = replace(TINY, model=replace(TINY.model, layers=2, dropout=0.0), microbatches=2, steps=2, timeout=20.0)
LAYOUTS = [
    {"mesh": Mesh(dp=4, ep=2), "zero": 0},
    {"mesh": Mesh(dp=4, ep=2), "zero": 1},
    {"mesh": Mesh(dp=4, ep=2), "zero": 2},
    {"mesh": Mesh(dp=4, ep=2), "zero": 3},
    {"mesh": Mesh(dp=4, ep=4), "zero": 0},
    {"mesh": Mesh(dp=2, ep=2), "zero": 1, "expert_rounds": 2},
    {"mesh": Mesh(dp=2, tp=2, ep=2), "zero": 1},
    {"mesh": Mesh(dp=2, tp=2, ep=2, etp=2), "zero": 1},
    {"mesh": Mesh(pp=2, dp=2, ep=2), "zero": 0, "recompute": "full"},
    {"mesh": Mesh(dp=2, expert_actors=2), "zero": 2},
    {"mesh": Mesh(pp=2, dp=2, expert_actors=1), "zero": 0, "optim": Muon()},
    {"mesh": Mesh(dp=2, expert_actors=2), "zero": 1, "offload": "optimizer"},
]


def planned(run):
    schedule = check_run(run)["train"]
    sized = SizedRun.of(run, schedule)
    return actors_memory(sized, from_flops(sized).timeline), sized.counts, step_traffic(sized)


def sent_by(team):
    """Bytes that an actor sends in the second step, on average over the pipeline rank that sends most."""

    def totals():
        found = [Counter() for _ in range(team.world.mesh.pp)]
        for axis in ("dp", "ep", "edp"):
            for rank, ledger in enumerate(team.ledger(axis)[: team.world.mesh.size]):
                found[team.world.pp(rank)].update({(axis, op): count for op, (_, count) in ledger.items()})
        return found

    before = totals()
    team.step(1)
    moved = [after - first for after, first in zip(totals(), before, strict=True)]
    most = max(moved, key=lambda one: one.total() - one["ep", "all_to_all"])  # how many tokens are sent is by chance
    return {key: count / team.world.mesh.inner for key, count in most.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout['mesh']} {layout['zero']}")
def test_actors_hold_and_send_what_is_planned(layout):
    run = replace(RUN, **layout)
    (workers, others), counts, expected = planned(run)
    team = Team.of(run)
    team.step()
    held = [actor.held() for actor in team.all]
    for kind in STATE:
        formulas = [(formula, team.world.replicas_of(stage)) for stage, formula in enumerate(workers)]
        formulas += [(formula, team.world.mesh.experts_of(stage)) for stage, formula in enumerate(others)]
        for formula, ranks in formulas:
            most = max((held[rank].most for rank in ranks), key=lambda one: sum(map(one.__getitem__, STATE)))
            found = most[kind]
            steps = 4 * max(len(team.all[rank].member.state.parameters) for rank in ranks)  # that Adam counts, in bytes
            assert getattr(formula, kind) == pytest.approx(found, rel=0.04, abs=steps), kind
    if layout["zero"] < 3:
        each = [sum(weight.numel() for weight in actor.member.state.parameters.values()) for actor in team.workers]
        assert counts.held == [
            max(each[rank] for rank in team.world.replicas_of(stage)) for stage in range(run.mesh.pp)
        ]
    measured = sent_by(team)
    for (axis, op), count in expected.items():
        assert measured[axis, op] == pytest.approx(count, rel=0.15 if axis == "ep" else 0.05), (axis, op)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [Mesh(dp=4, ep=2), Mesh(dp=2, ep=2), Mesh(dp=2, expert_actors=2)], ids=str)
def test_what_is_gathered_is_planned(mesh):
    """Experts that no other actor has are gathered by nobody."""
    run = replace(RUN, mesh=mesh, zero=3)
    ((workers, _), _, _), team = planned(run), Team.of(run)
    team.step()
    assert workers[0].gathered == pytest.approx(team.all[0].held().most["gathered"], rel=0.04)


def test_an_actor_is_not_told_to_hold_all_experts():
    dense = replace(RUN, mesh=Mesh(dp=4))
    rows = []
    for run in (dense, replace(dense, mesh=Mesh(dp=4, ep=4))):
        sized = SizedRun.of(run, check_run(run)["train"])
        rows.append(dict(memory_needs(sized, None, from_flops(sized))))
    told = [row["parameters"].split("an actor holds ")[1] for row in rows]
    assert told == ["93.1 k", "42.9 k"]


def test_muon_updates_the_matrices_of_own_experts_only():
    run = replace(RUN, mesh=Mesh(dp=4, ep=4), optim=Muon(), model=replace(RUN.model, moe=MoE(experts=4, top_k=2)))
    whole, own = (
        counts_of(one, check_run(one)["train"], Skeleton(run.model, run.seed)).matrices[0]
        for one in (replace(run, mesh=Mesh(dp=4)), run)
    )
    of_expert = run.model.mlp_matrices * run.model.hidden * run.model.expert_width
    assert whole - own == run.model.layers * 3 * of_expert
