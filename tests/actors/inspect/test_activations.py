"""Watching what layers make: tensors, their parts, their order; and nothing is left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raypar.actors.inspect.activations import LOSS, OutputWatch, Spot
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.model import GPT
from raypar.actors.worker.build.parallelize import Parallelizer
from tests.support.team import Team
from tests.support.tensor_teams import longer

MODEL = GPT(layers=2, hidden=16, heads=4, seq=8, vocab=11)


def watched(team):
    """Step 0 of a team, with every actor watched."""
    for actor in team.workers:
        actor.open(0)
        actor.watch()
    for one in team.each(lambda actor: [actor.perform(action) for action in actor.member.program.row]):
        assert not isinstance(one, Exception), one


def team_of(**changes):
    return Team(None, 1, 2, model=MODEL, data=longer, **changes)


def test_outputs_and_gradients_in_the_order_of_a_step():
    layers = {"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Tanh(), nn.Linear(3, 2))}
    watch = OutputWatch(layers, {"b.1": Sharding({-1: Pieces.at(1, 2)})})
    assert watch.names == ("a", "b", "b.1")
    x = torch.randn(4, 3)
    with watch.of(5):
        out = layers["b"](layers["a"](x))
        out.backward(torch.ones(4, 2))
    order = ["a", "b.1", "b"]
    assert list(watch.seen) == [Spot(n, 5) for n in order] + [Spot(n, 5, backward=True) for n in ("b.1", "b", "a")]
    assert torch.equal(watch.seen[Spot("b", 5)].tensor, out)
    assert torch.equal(watch.seen[Spot("b", 5, backward=True)].tensor, torch.ones(4, 2))
    assert watch.seen[Spot("b.1", 5)].sharding == Sharding({1: Pieces.at(1, 2)})
    before = dict(watch.seen)
    layers["b"](layers["a"](x)).sum().backward()
    assert watch.seen == before, "outside of its time it hears nothing"
    assert not any(module._forward_hooks for layer in layers.values() for module in layer.modules())


def test_what_a_layer_makes_is_kept_as_it_was():
    layers = {"a": nn.Linear(3, 3), "b": nn.ReLU(inplace=True)}
    watch = OutputWatch(layers, {})
    with watch.of(0):
        made = layers["a"](torch.randn(4, 3))
        kept = made.detach().clone()
        layers["b"](made).sum().backward()
    assert torch.equal(watch.seen[Spot("a", 0)].tensor, kept)
    assert watch.seen[Spot("a", 0, backward=True)].tensor.shape == (4, 3)


def test_a_module_in_two_places_is_left_out():
    shared = nn.Linear(3, 3)
    assert OutputWatch({"a": shared, "b": nn.Tanh(), "c": shared}, {}).names == ("b",)


@pytest.mark.parametrize("recompute", ["none", "full", ("full", "none"), "selective"])
def test_recomputing_shows_the_same(recompute):
    """Every spot once, whatever is computed twice."""
    teams = [team_of(recompute=one, schedule="gpipe") for one in ("none", recompute)]
    for team in teams:
        watched(team)
    plain, other = (team.workers[0].stages[0].listener.seen for team in teams)
    layers = 4
    assert len(plain) == len(other) == 2 * 2 * (layers + 1)
    assert all(torch.equal(sight.tensor, other[spot].tensor) for spot, sight in plain.items())


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_parts_make_up_what_one_actor_has(sequence):
    alone, team = team_of(), team_of(tp=2, sequence_parallel=sequence)
    for one in (alone, team):
        watched(one)
    names = team.workers[0].stages[0].listener.names
    assert {"embed.tokens", "blocks.0.attn.q", "blocks.1.mlp.down", "head.out", "head"} <= set(names)
    spots = [Spot(name, 1, backward) for name in ("embed", "blocks.0", "head", LOSS) for backward in (False, True)]
    (wholes,) = [actor.sights(spots) for actor in alone.workers]
    for sights in [actor.sights(spots) for actor in team.workers]:
        for spot, whole, sight in zip(spots, wholes, sights, strict=True):
            part = sight.sharding.take(whole.tensor)
            torch.testing.assert_close(sight.tensor, part, msg=str(spot))
            divided = spot.module == "head" or (sequence and spot.module != LOSS)
            assert (sight.tensor.numel() < whole.tensor.numel()) == divided
    assert team.workers[0].sights([Spot("embed", 9)]) == [None]


def test_the_next_step_is_not_watched():
    team = team_of(tp=2)
    watched(team)
    team.step(1)
    stages = [stage for actor in team.workers for stage in actor.stages.values()]
    assert all(stage.listener is None for stage in stages)


@pytest.mark.parametrize(
    ("spot", "says"),
    [
        (Spot("blocks.1", 0), "output of blocks.1 in microbatch 0, forward"),
        (Spot("layers.3", 2, backward=True, number=1), "gradient at output 1 of layers.3 in microbatch 2, backward"),
        (Spot(LOSS, 4), "the loss in microbatch 4, forward"),
    ],
)
def test_spots_are_told_in_words(spot, says):
    assert str(spot) == says


class Says(ParallelStyle):
    """Shards nothing, but says that it shards a module's output."""

    def __init__(self, sharding):
        self.sharding = sharding

    def apply(self, name, module):
        return Applied(module, outputs={"": self.sharding})


def test_one_sharding_within_the_other():
    """By tokens and then by columns, and by tokens twice."""
    tokens, half = Sharding({1: Pieces(4, (0, 3))}), Pieces.at(1, 2)
    model = SimpleNamespace(tensor_plan=(("a", "heads"), ("a.q", "column")))
    outer = AxisStyles({"heads": Says(tokens)}, tokens)
    inner = AxisStyles({"heads": Says(Sharding({-1: half})), "column": Says(Sharding({-1: half}))}, Sharding({1: half}))
    parallelizer = Parallelizer(model, [outer, inner])
    parallelizer.parallelize("a", nn.ModuleDict({"q": nn.Linear(2, 2)}))
    parallelizer.parallelize("b", nn.Linear(2, 2))
    found = parallelizer.outputs
    assert found["a"] == found["a.q"] == Sharding({1: Pieces(4, (0, 3)), -1: half})
    assert found["b"] == Sharding({1: Pieces(4, (3,))})
    assert Parallelizer(model, []).outputs == {}
