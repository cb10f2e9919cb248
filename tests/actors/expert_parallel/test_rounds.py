"""Tokens that travel in rounds: the same bits, the same bytes, and one order of collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.expert_parallel.rounds import Trip
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.results import losses_of
from raypar.config.recipes import recipe
from tests.support.expert_layouts import batches, tilted
from tests.support.team import Team
from tests.support.thinned import thinned

TINY = recipe("moe-tiny")
MODEL = replace(TINY.model, layers=2, dropout=0.0)
RUN = replace(TINY, model=MODEL, microbatches=2, steps=2, seed=9, timeout=20.0)
EIGHT = replace(MODEL, moe=replace(MODEL.moe, experts=8))
ONE = {"model": replace(MODEL, seq=1), "data": batches(1, 1)}  # a single token on each replica
LAYOUTS = {
    "replicas": ({"mesh": Mesh(dp=2, ep=2)}, 2, "even"),
    "three rounds of four experts": ({"mesh": Mesh(dp=2, ep=2), "model": EIGHT}, 3, "even"),
    "on tensor ranks": ({"mesh": Mesh(dp=2, tp=2, ep=2)}, 2, "even"),
    "pipeline": ({"mesh": Mesh(pp=2, dp=2, ep=2), "schedule": "1f1b"}, 2, "even"),
    "pipeline, split backwards": ({"mesh": Mesh(pp=2, dp=2, ep=2), "backward": "split"}, 2, "even"),
    "zero 3": ({"mesh": Mesh(dp=4, ep=2), "zero": 3}, 2, "even"),
    "recomputation": ({"mesh": Mesh(dp=2, ep=2), "recompute": "full"}, 2, "even"),
    "expert actors": ({"mesh": Mesh(dp=2, expert_actors=2)}, 2, "even"),
    "one expert actor, split backwards": (
        {"mesh": Mesh(pp=2, dp=2, expert_actors=1), "backward": "split", "recompute": "full"},
        4,
        "even",
    ),
    "all tokens to two experts": ({"mesh": Mesh(dp=2, ep=2)}, 2, "two experts"),
    "one token a replica": (ONE | {"mesh": Mesh(dp=2, ep=2)}, 2, "even"),
}
LONG = ("on tensor ranks", "pipeline", "recomputation", "expert actors", "zero 3")


def trained(run, tilt):
    """What two steps give: losses, gradients and weights; and the ledgers of the experts' groups of the first."""
    with tilted(tilt):
        team = Team.of(run)
        first, ledger = losses_of(team.step(0)), team.ledger("ep")
        gradients, second = team.gradients(), losses_of(team.step(1))
    return (first, second), gradients, team.weights(), ledger


@pytest.mark.sampled
@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: layout not in LONG))
def test_rounds_give_the_same_bits_by_the_same_bytes(layout):
    changes, rounds, tilt = LAYOUTS[layout]
    run = replace(RUN, **changes)
    losses, gradients, weights, ledger = trained(run, tilt)
    in_rounds = trained(replace(run, expert_rounds=rounds), tilt)
    assert in_rounds[0] == losses
    for ours, theirs in ((in_rounds[1], gradients), (in_rounds[2], weights)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs if theirs[name] is not None)
    assert [ours.keys() for ours in in_rounds[3]] == [theirs.keys() for theirs in ledger]
    for ours, theirs in zip(in_rounds[3], ledger, strict=True):
        assert ours["all_to_all"][:2] == (rounds * theirs["all_to_all"][0], theirs["all_to_all"][1])


def test_a_layer_has_four_all_to_alls_in_each_round():
    team = Team.of(replace(RUN, mesh=Mesh(dp=2, ep=2), expert_rounds=2))
    team.step()
    assert {moved["all_to_all"][0] for moved in team.ledger("ep")} == {4 * 2 * MODEL.layers * RUN.microbatches}


def test_the_next_rounds_rows_travel_while_one_computes(monkeypatch):
    """What one actor does in a layer, forward and backward, is in the order that hides the trips."""
    done = []
    for name in ("depart", "arrive"):
        monkeypatch.setattr(Trip, name, noted(getattr(Trip, name), name, done))
    run = replace(RUN, mesh=Mesh(expert_actors=1, dp=1), model=replace(MODEL, layers=1), microbatches=1)
    team = Team.of(replace(run, expert_rounds=2))
    team.step()
    there_0, there_1, back_0, back_1 = dict.fromkeys(trip for _, trip, rank in done if rank == 0)
    forward = [("depart", there_0), ("depart", there_1), ("arrive", there_0), ("depart", back_0)]
    forward += [("arrive", there_1), ("depart", back_1), ("arrive", back_0), ("arrive", back_1)]
    backward = [("depart", back_1), ("depart", back_0), ("arrive", back_1), ("depart", there_1)]
    backward += [("arrive", back_0), ("depart", there_0), ("arrive", there_1), ("arrive", there_0)]
    assert [(name, trip) for name, trip, rank in done if rank == 0] == forward + backward


def noted(method, name, done):
    def call(trip, *args):
        done.append((name, trip, trip._group.rank))
        return method(trip, *args)

    return call


def test_mistakes_are_told():
    told = "\n".join(rp.faults(replace(RUN, mesh=Mesh(dp=2), expert_rounds=2, expert_shadows=1)))
    assert "expert_rounds is 2, but mesh.ep is 1, so no token travels: set expert_rounds to 1" in told
    assert "expert_rounds is 2, and expert_shadows is 1, but shadows are for tokens that travel at once" in told
    fixes = {
        Mesh(dp=2, ep=2): "2 of a layer's experts, and each round needs one: set it to 2 or less",
        Mesh(dp=2, expert_actors=4): "1 of a layer's experts, and each round needs one: set it to 1",
    }
    for mesh, fix in fixes.items():
        (fault,) = rp.faults(replace(RUN, mesh=mesh, expert_rounds=3))
        assert fault == f"expert_rounds is 3, but an actor has {fix}"
    assert "expert_rounds" in "\n".join(rp.faults(replace(RUN, mesh=Mesh(dp=2, ep=2), expert_rounds=0)))
