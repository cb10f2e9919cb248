"""What comes home from routers on teams: loads and losses, the expert bias, and a router that gives NaN."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import raypar as rp
from raypar.actors.errors import NonFiniteError, RouterError
from raypar.reporting.report import report_of
from tests.support.layouts import verdict_of
from tests.support.routed import EXPERTS, RATE, routed
from tests.support.team import Team
from tests.support.thread_jobs import Hands

LAYOUTS = [{"pp": 2}, {"pp": 1, "dp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "schedule": "interleaved"}]
TOKENS = 3  # of a microbatch


def biases(team):
    """By actor and layer."""
    return {
        (rank, name.removesuffix(".bias")): value.clone()
        for rank, actor in enumerate(team.workers)
        for stage in actor.stages.values()
        for name, value in stage.buffers().items()
    }


def loads(results):
    """The tokens of each expert by layer, over all actors."""
    found = {}
    for result in results:
        for layer, asked, _ in result.loads:
            found.setdefault(layer, Counter()).update(dict(enumerate(asked)))
    return {layer: torch.tensor([counts[e] for e in range(EXPERTS)]) for layer, counts in found.items()}


def moved(before, results):
    return {
        (rank, layer): bias + RATE * (loads(results)[layer].float().mean() - loads(results)[layer]).sign()
        for (rank, layer), bias in before.items()
    }


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_replicas_balance_by_the_tokens_of_the_whole_step(layout):
    team = Team(routed, m=4, **layout)
    for step in range(3):
        before, results = biases(team), team.step(step)
        assert {int(counts.sum()) for counts in loads(results).values()} == {4 * TOKENS * layout.get("dp", 1)}
        assert equal(biases(team), moved(before, results))
        assert not equal(biases(team), before)
    assert loads(results).keys() == {"layers.0", "layers.2"}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full", ("full",) * 4], ids=str)
def test_one_process_makes_the_same_steps(layout, recompute):
    team = Team(routed, m=4, recompute=recompute, steps=4, optim=rp.AdamW(lr=1e-2), **layout)
    assert (verdict := verdict_of(team.run)).ok, str(verdict)


def test_losses_are_means_over_microbatches():
    one, other = Team(routed, 1, 4), Team(routed, 2, 4)
    (whole,), parts = one.step(), other.step()
    found = {loss.layer: loss for part in parts for loss in part.auxiliary}
    assert [found[loss.layer] for loss in whole.auxiliary] == list(whole.auxiliary)
    assert [(loss.layer, loss.kind) for loss in whole.auxiliary] == [("layers.0", "z"), ("layers.2", "z")]
    assert all(0 < loss.value < 1 for loss in whole.auxiliary)
    (result,) = one.step(0, "evaluate")
    assert (result.auxiliary, result.loads) == ((), ())


def test_a_step_that_is_skipped_balances_nothing():
    team = Team(routed, 2, 2, nonfinite="skip")
    before = biases(team)
    weight = team.workers[0].stages[0].parameters()["layers.1.0.weight"]
    hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    assert all(result.is_skipped for result in team.step(0))
    assert equal(biases(team), before)
    hook.remove()
    team.step(1)
    assert not equal(biases(team), before)


def test_a_step_that_is_taken_back_takes_the_bias_back():
    hands = Hands(Team(routed, 2, 2))
    before, stepper = biases(hands.team), hands.stepper()
    stepper.run(1000)
    after = biases(hands.team)
    assert not equal(after, before)
    stepper.rewind()
    assert equal(biases(hands.team), before)
    stepper.finish()
    assert equal(biases(hands.team), after)
    hands.close()


def test_a_router_that_is_not_finite_is_named_with_actor_and_action():
    team = Team(routed, 2, 2, dp=2, check_every=0)
    team.step(0)
    broken = team.workers[2].stages[1]  # the router of layers.2, of the second stage
    with torch.no_grad():
        broken.parameters()["layers.2.router.weight"].fill_(float("nan"))
    errors = team.each(lambda actor: actor.train(1))
    assert all(isinstance(error, NonFiniteError) for error in errors)
    named = [str(error) for error in errors if isinstance(error, RouterError)]
    assert named == [
        "step 2: the router of layers.2 gave scores that are not finite in 1F0 on actor pp=1 dp=0; no weight was "
        "changed: look at the batch, lower the learning rate, clip, or add a z-loss"
    ]


def test_a_step_that_is_not_finite_for_another_reason_names_no_router():
    team = Team(routed, 2, 2)
    weight = team.workers[1].stages[1].parameters()["layers.3.0.weight"]
    weight.register_hook(lambda gradient: gradient * float("inf"))
    errors = team.each(lambda actor: actor.train(0))
    assert {type(error) for error in errors} == {NonFiniteError}


EXPERT_LAYOUTS = [
    ({"pp": 2}, {}),
    ({"cp": 2}, {}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"pp": 2, "cp": 2}, {"recompute": "full"}),
    ({"dp": 2, "ep": 2}, {"microbatches": 1}),
    ({"cp": 2, "ep": 2}, {}),
    ({"tp": 2, "ep": 2}, {}),
    ({"tp": 2, "cp": 2, "ep": 4}, {"recompute": "full"}),
    ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"microbatches": 1, "zero": 3}),
]


def moe(mesh=None, **changes):
    spec = rp.MoE(experts=4, gate="sigmoid", bias_rate=0.05, alpha=0.01, z_loss=1e-3, capacity=1.0)
    model = rp.GPT(layers=2, hidden=16, heads=2, seq=16, dropout=0.0, moe=spec)
    fields = {"model": model, "mesh": rp.Mesh(**mesh or {}), "microbatches": 2, "steps": 3, "timeout": 20.0}
    return Team.of(rp.Run(**fields | changes))


def told(team, steps=3):
    """Reports of steps, and the bias of each actor afterwards."""
    reports = [report_of(step, 1.0, team.step(step), team.world) for step in range(steps)]
    return reports, {key: bias for key, bias in biases(team).items() if key[1].endswith("router")}


@pytest.fixture(scope="module")
def one_actor():
    return told(moe())


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "changes"), EXPERT_LAYOUTS, ids=str)
def test_every_layout_tells_the_same(mesh, changes, one_actor):
    theirs, ours = one_actor, told(moe(mesh, **changes))
    for wanted, report in zip(theirs[0], ours[0], strict=True):
        assert report.loads == wanted.loads
        assert report.loads.dropped > 0
        assert report.aux == pytest.approx(wanted.aux, rel=1e-4)
        assert [*report.aux_by_layer["z"]] == ["blocks.0.mlp", "blocks.1.mlp"]
    wanted = {layer: bias for (_, layer), bias in theirs[1].items()}
    assert all(torch.equal(bias, wanted[layer]) for (_, layer), bias in ours[1].items())
    assert len({rank for rank, _ in ours[1]}) == rp.Mesh(**mesh).size
