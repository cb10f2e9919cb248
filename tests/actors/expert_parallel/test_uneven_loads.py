"""Experts on several actors when tokens are spread badly: one expert gets all, an actor has none, a router fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raypar.actors.errors import NonFiniteError, RouterError
from raypar.actors.mesh.mesh import Mesh
from raypar.config.recipes import recipe
from tests.support.expert_layouts import batches, tilted
from tests.support.replicas import agrees
from tests.support.team import Team

TINY = recipe("moe-tiny")
MODEL = replace(TINY.model, layers=2, dropout=0.0, moe=replace(TINY.model.moe, top_k=1, normalise=False))
# A seed of its own, because the plain process of a run is trained once for all tests, and here with other routers.
RUN = replace(TINY, model=MODEL, microbatches=1, steps=2, seed=7, timeout=20.0)
# A single token on each replica: the gradients of queries and keys are rounding, which AdamW's eps must not divide by.
ONE = replace(RUN, model=replace(MODEL, seq=1), data=batches(1, 1), optim=replace(RUN.optim, eps=1e-4))
CASES = {
    "all tokens to one expert": (replace(RUN, mesh=Mesh(dp=2, ep=2)), "one expert"),
    "to one expert, of which some are dropped": (
        replace(RUN, mesh=Mesh(dp=2, ep=2), model=replace(MODEL, moe=replace(MODEL.moe, capacity=1.0))),
        "one expert",
    ),
    "to one expert, with zero 3": (replace(RUN, mesh=Mesh(dp=4, ep=2), zero=3), "one expert"),
    "to one expert, on tensor ranks": (replace(RUN, mesh=Mesh(tp=2, ep=2)), "one expert"),
    "one token a replica": (replace(ONE, mesh=Mesh(dp=2, ep=2)), "even"),
    "one token for two tensor ranks": (replace(ONE, mesh=Mesh(tp=2, ep=2)), "even"),
    "one token for two tensor ranks, in both of two replicas": (replace(ONE, mesh=Mesh(dp=2, tp=2, ep=4)), "even"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_uneven_loads_train_as_in_one_process(case):
    run, tilt = CASES[case]
    with tilted(tilt):
        plain = agrees(Team.of(run), 2e-5)
        if tilt == "one expert":
            idle = [name for name in plain.gradients if ".experts." in name and ".experts.0." not in name]
            assert all(not plain.gradients[name].any() for name in idle), "the others get no token, and zeros"


NAMED = [Mesh(pp=2, dp=2, ep=2), Mesh(pp=2, tp=2, ep=2), Mesh(pp=2, dp=2, expert_actors=1)]


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", NAMED, ids=str)
def test_a_router_that_is_not_finite_is_named_on_its_actor(mesh):
    team = Team.of(replace(RUN, mesh=mesh, check_every=0))
    team.step()
    last = team.world.replicas_of(1)[-1]
    for rank in team.world.replicas_of(1) if mesh.tp > 1 else [last]:  # tensor ranks route the same tokens
        with torch.no_grad():
            team.workers[rank].stages[1].parameters()["blocks.1.mlp.router.weight"].fill_(float("nan"))
    errors = team.each(lambda actor: actor.train(1))
    assert all(isinstance(error, NonFiniteError) for error in errors)
    assert f"the router of blocks.1.mlp gave scores that are not finite in 1F0 on actor {team.world.label(last)}" in {
        str(error).split(": ")[1].split(";")[0] for error in errors if isinstance(error, RouterError)
    }
