"""Replicas compare their weights: when that is due, and what of them can be compared."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from raypar.actors.data_parallel import replica_checks
from raypar.actors.data_parallel.reducer import Reducer
from raypar.actors.errors import ActionError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD
from raypar.actors.worker.build import model_part
from raypar.actors.worker.recheck import is_due
from raypar.config.run import check_run
from raypar.errors import ConfigError
from tests.support.team import Team, linears, mse
from tests.support.uneven_runs import gpt, run_of


@pytest.mark.parametrize(
    ("check_every", "steps"), [(None, {1, 999, 1999}), (0, set()), (1, {*range(2001)}), (700, {699, 1399})]
)
def test_it_is_due_in_these_steps(check_every, steps):
    assert {step for step in range(2001) if is_due(check_every, range(step, step + 1))} == steps
    flushes = [range(first, first + 8) for first in range(0, 2001, 8)]
    due = [flush for flush in flushes if is_due(check_every, flush)]
    assert due == [flush for flush in flushes if steps & {*flush}]


def one_changed(team, rank):
    """Change one number that a rank holds."""
    with torch.no_grad():
        parameter = next(iter(team.all[rank].member.state.parameters.values()))
        parameter.view(-1)[0] += 1.0


def faults_of(team, step, stream=0):
    results = team.each(lambda actor: actor.train(step, None, 0, stream))
    return [str(result) for result in results if isinstance(result, Exception)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "zero": 0},
        {"dp": 2},
        {"dp": 2, "pp": 1, "zero": 2},
        {"dp": 4, "pp": 1, "zero": 3, "shard": 2},
        {"dp": 4, "pp": 1, "zero": 3, "shard": 2, "offload": "optimizer"},
    ],
    ids=["zero0", "zero1", "zero2", "hybrid", "hybrid-offload"],
)
def test_without_a_word_of_the_user_other_weights_are_found_in_step_2(settings):
    team = Team(linears(), **({"pp": 2} | settings))
    team.step(0)
    one_changed(team, 0)
    faults = faults_of(team, 1)
    assert any("in step 2 the weights of pp=0 dp=" in fault for fault in faults), faults


def test_shards_of_which_there_is_no_copy_are_not_compared():
    team = Team(linears(), pp=1, dp=2, zero=3)
    team.step(0)
    one_changed(team, 0)
    assert not faults_of(team, 1)
    with pytest.raises(
        ConfigError, match=r"no two actors hold the same weights: set it to 0 \(with mesh.shard, copies"
    ):
        check_run(run_of(gpt(), mesh=Mesh(dp=2), zero=3, check_every=1))
    check_run(run_of(gpt(), mesh=Mesh(dp=4, shard=2), zero=3, check_every=1))


def test_an_actor_without_replicas_computes_no_digest(monkeypatch):
    monkeypatch.setattr(replica_checks, "digest", lambda weights: pytest.fail("a digest that is compared to nothing"))
    monkeypatch.setattr(model_part, "digest", replica_checks.digest)
    team = Team(linears(), pp=2)
    assert not [fault for step in range(2) for fault in faults_of(team, step)]


def test_a_flush_finds_replicas_that_update_by_other_counts(monkeypatch):
    """The fault that there was: each replica corrected its gradients by its own targets."""
    run = run_of(gpt(), mesh=Mesh(pp=2, dp=2), zero=0, flush_every=2, optim=SGD(lr=0.2))
    monkeypatch.setattr(Reducer, "total", lambda reducer, tensor: None)
    faults = faults_of(Team.of(run), 0, 2)
    assert any("after step 2 the weights of pp=1 dp=1 are not those of pp=1 dp=0" in fault for fault in faults), faults


def layers_of(names, width=4):
    """A layer whose modules were made in this order, the last of them with so many outputs."""
    layer = nn.Sequential()
    for name in names:
        layer.add_module(name, nn.LayerNorm(4) if name == "norm" else nn.Linear(4, 4))
    layer.add_module("last", nn.Linear(4, width))
    return [layer]


OTHERS = {
    "other order": [{"names": ("first", "second")}, {"names": ("second", "first")}],
    "other place of what is not drawn": [{"names": ("norm", "first")}, {"names": ("first", "norm")}],
    "other shape": [{"names": ()}, {"names": (), "width": 8}],
}


@pytest.mark.parametrize("settings", [{"dp": 2, "zero": 0}, {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", list(OTHERS))
def test_actors_that_build_other_layers_are_named_before_weights_are_exchanged(kind, settings):
    """As of a function that goes through a set of names, which are in another order in every process."""
    made = itertools.count()
    plan = {"layers.0.last": "column_gather_output"} if "tp" in settings else {}
    model = Layers(lambda: layers_of(**OTHERS[kind][next(made) % 2]), mse, plan=plan)
    with pytest.raises(ActionError, match=r"the layers of pp=0 .*=1 are not those of pp=0 .*=0 in name, shape"):
        Team(None, **{"pp": 1, "model": model} | settings)
