"""``rp.plan``: all is searched, or what is not annotated; annotations are kept, and numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import raypar as rp
from raypar.actors.models.own.plan_kinds import SHORT, kind_of
from raypar.actors.models.skeleton import Skeleton
from raypar.planner.hardware.cluster import RingRoute
from raypar.planner.operators.chains import chains_of
from raypar.planner.operators.division import search_plan
from raypar.planner.operators.prices import Prices
from raypar.planner.timing.roofline import Roofline
from tests.support.own_layers import mse
from tests.support.team import Team
from tests.support.tensor_teams import agrees


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x_BSC = torch.randn(4, 6, 8, generator=generator)
    return x_BSC, x_BSC.sin().flip(-1)


class Block(nn.Module):
    """Its own code is not seen; the sequence and the linear layer in it are."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        return x + self.out(self.mlp(self.norm(x)))


MAKES = {
    "linear": lambda: nn.Linear(8, 8),
    "wide": lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)),
    "norm": lambda: nn.LayerNorm(8),
    "tanh": nn.Tanh,
    "drop": lambda: nn.Dropout(0.0),
    "block": Block,
    "mean": lambda: nn.AdaptiveAvgPool1d(8),
}


def model(kinds):
    return lambda: [MAKES[kind]() for kind in kinds]


def run_of(kinds, plan=(), tp=2, **changes):
    layers = rp.Layers(model(kinds), mse, plan=dict(plan))
    return replace(rp.Run(model=layers, data=rp.Batches(batch), mesh=rp.Mesh(tp=tp), microbatches=2), **changes)


def annotated(draw, kinds):
    """Annotations of some modules, with placements for some of these."""
    plan = {}
    for number, kind in enumerate(kinds):
        if kind not in ("linear", "norm", "wide") or not draw(st.booleans()):
            continue
        linear = ("column", "row", "split0", "split1", "replicated")
        name = draw(st.sampled_from(linear if kind != "norm" else linear[2:]))
        words = [f" {word} {draw(st.sampled_from(('R', 'S-1', 'S0', 'S1')))}" for word in ("from", "to")]
        text = name + "".join(word for word in words if draw(st.integers(0, 3)) == 0)
        plan[f"layers.{number}" + (".0" if kind == "wide" else "")] = text
    return plan


def keeps(found, plan):
    """Every annotated module has its strategy, and the placements that were annotated."""
    for name, text in plan.items():
        new, old, words = kind_of(found[name]), kind_of(text), SHORT.get(text, text).split(" ")
        assert new.name == old.name, (name, text, found[name])
        assert "from" not in words or new.given == old.given, (name, text, found[name])
        assert "to" not in words or new.made == old.made, (name, text, found[name])


@pytest.mark.long
@settings(max_examples=15)
@given(st.data(), st.sampled_from(("speed", "memory")), st.sampled_from(("cpu", "h100")))
def test_semi_keeps_every_annotation(data, aim, gpu):
    kinds = data.draw(st.lists(st.sampled_from(sorted(MAKES)), min_size=1, max_size=5))
    assume({"linear", "wide", "block"} & set(kinds))
    plan = annotated(data.draw, kinds)
    try:
        found = rp.plan(run_of(kinds, plan), "semi", aim=aim, gpu=gpu).run
    except rp.ConfigError as error:
        assert all(
            fault.startswith("model.plan: no division leads to what it says of layers.") for fault in error.faults
        )
        assert any(" from " in text or " to " in text for text in plan.values()), "strategies alone always can be"
        return
    keeps(found.model.plan, plan)
    assert not rp.faults(found)
    assert rp.plan(found, "semi", aim=aim, gpu=gpu).run.model.plan == found.model.plan, "it is what it says"


@settings(max_examples=8)
@given(st.data(), st.sampled_from((1, 2)))
def test_numbers_are_those_of_one_process(data, pp):
    kinds = data.draw(st.lists(st.sampled_from(sorted(MAKES)), min_size=2, max_size=4))
    assume({"linear", "wide", "block"} & set(kinds))
    plan = annotated(data.draw, kinds)
    try:
        found = rp.plan(run_of(kinds, plan), "semi", aim="memory").run
    except rp.ConfigError:
        assume(False)
    mesh = rp.Mesh(tp=2, pp=pp)
    agrees(Team.of(replace(found, mesh=mesh, steps=2, optim=rp.SGD(lr=0.1), clip=None, timeout=10.0)))


MIXED = ("linear", "norm", "wide", "drop", "linear", "block")
SAID = {"layers.0": "split0", "layers.1": "split1", "layers.2.0": "row", "layers.4": "column"}


def test_as_many_bytes_are_sent_as_the_search_has_counted():
    """Two sums of squares are sent besides, and the squares of what both members hold, which they compare."""
    run = run_of(MIXED, SAID)
    costs = Prices(2, Roofline(1e9, 1e9, 0.0), RingRoute(1e9, 0.0), 4, run.microbatches)
    layers = Skeleton(run.model, 0).layers
    division = search_plan(chains_of(layers, (batch(0, 0, 0)[0].to("meta"),), SAID), costs, "speed")
    run = replace(run, model=replace(run.model, plan=dict(division.plan)))
    team = Team.of(replace(run, optim=rp.SGD(lr=0.1), clip=None, timeout=10.0))
    team.step(0)
    sent = sum(bytes for _, bytes in team.ledger("tp")[0].values())
    assert division.sent > 0
    compared = sum(shard.is_whole for shard in team.all[0].holds().values())
    assert sent == run.microbatches * division.sent + 8 * (2 * 21 + compared)


def test_auto_searches_what_was_annotated_too():
    run = run_of(["linear", "norm", "linear"], {"layers.0": "replicated", "layers.2": "replicated"})
    found = rp.plan(run, "auto", aim="memory").run.model.plan
    assert {kind_of(found[name]).name for name in ("layers.0", "layers.2")} <= {"column", "row"}
    assert rp.plan(run, "semi", aim="memory").run.model.plan["layers.0"].startswith("replicated")
    assert rp.plan(run, "manual").run is run


def test_what_is_inside_a_module_of_ones_own_is_kept_word_by_word():
    plan = {"layers.1.mlp.0": "column", "layers.1.mlp.2": "row"}
    found = rp.plan(run_of(["linear", "block"], plan), aim="memory").run.model.plan
    assert {name: found[name] for name in plan} == plan
    assert "layers.1.out" in found, "the sequence is seen, and annotated whole"
    plan = {"layers.1.out": "column_gather_output"}
    found = rp.plan(run_of(["linear", "block"], plan), aim="memory").run.model.plan
    assert found.keys() <= {"layers.0", "layers.1", "layers.1.out"}, "what stands between its modules is not seen"
    assert found["layers.1.out"] == plan["layers.1.out"]


def test_the_table_says_what_was_found():
    said = str(rp.plan(run_of(["linear", "norm"], {"layers.0": "column"}), gpu="h100"))
    assert "layers.0  4x6x8  4x6x8   column *             40       " in said
    assert "layers.1  4x6x8  4x6x8   replicated from S-1  16       " in said
    assert "an actor has 56 of the 88 weights of these modules" in said


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (run_of(["linear"], tp=1), "mesh.tp is 1: give the number of actors over which modules are divided, 2 or more"),
        (
            run_of(["linear"], {"layers.0": "split2"}),
            "of its input, 4x6x8, that dim is none of samples or tokens: use 'split0' or",
        ),
        (run_of(["linear"], {"layers.0": "split0"}, tp=3), "divide the 4 along dim 0 of the input of layers.0, which"),
        (
            run_of(["linear", "norm"], {"layers.0": "column"}, tp=3),
            "mesh.tp 3 does not divide the 8 outputs of layers.0",
        ),
        (run_of(["linear"], {"layers.0": "colum"}), "which is no kind: use 'column'"),
        (run_of(["linear"], {"layers.0": "column to S-1"}), "no division leads to what it says of layers.0: leave out"),
        (
            run_of(["linear", "linear"], {"layers.0": "column to S5", "layers.1": "row from S4"}),
            "layers.1 is given as 'from S4', but of 4x6x8 there is no dim 4: use R, S-1 or S0, S1, S2",
        ),
        (run_of(["linear"], {"layers.0": "column to S0"}, tp=8), "does not divide the 4 along dim 0 of the output of"),
        (replace(rp.Run(), mesh=rp.Mesh(tp=2)), "model is no Layers: raypar plan --gpus searches the layout"),
        (
            replace(run_of(["linear"]), data=rp.Batches(lambda *_: (torch.ones(2, 3), 0))),
            "can't be tried on the shapes",
        ),
    ],
)
def test_what_can_not_be_searched_is_told(run, says):
    with pytest.raises(rp.ConfigError) as caught:
        rp.plan(run)
    assert any(says in fault for fault in caught.value.faults), caught.value.faults


def test_ids_have_no_features_and_are_split_by_tokens():
    layers = rp.Layers(lambda: [nn.Embedding(12, 8), nn.Linear(8, 8)], mse, plan={"layers.0": "split1 from R"})
    ids = rp.Batches(lambda *_: (torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, 8)))
    found = rp.plan(replace(run_of(["linear"]), model=layers, data=ids)).run.model.plan
    assert found["layers.0"].startswith("split1 from R")


@pytest.mark.parametrize(
    ("fn", "says"), [(list, "its list has nothing"), (lambda: [1 / 0], "fails at .*division by zero")]
)
def test_layers_that_can_not_be_built_are_told(fn, says):
    with pytest.raises(rp.ConfigError, match=says) as caught:
        rp.plan(replace(run_of(["linear"]), model=rp.Layers(fn, mse)))
    assert len(caught.value.faults) == 1


def test_all_faults_are_told_at_once():
    plan = {"layers.7": "column", "layers.1": "row"}
    with pytest.raises(rp.ConfigError) as caught:
        rp.plan(run_of(["linear", "norm"], plan, tp=1, steps=-1), gpu="h1000")
    said = "\n".join(caught.value.faults)
    assert all(part in said for part in ("steps is -1", "mesh.tp is 1", "h1000", "names no module", "is a LayerNorm"))
    plan = {"layers.0": "split0", "layers.1.mlp.0": "split1 from R", "layers.1.mlp.2": "split2"}
    with pytest.raises(rp.ConfigError) as caught:
        rp.plan(run_of(["linear", "block"], plan, tp=4, mesh=rp.Mesh(tp=5)))
    assert len(caught.value.faults) == 3, "of the model's own chain, and of the one inside a module"


def test_an_unknown_device_is_told():
    with pytest.raises(rp.ConfigError, match="h1000"):
        rp.plan(run_of(["linear"]), gpu="h1000")
