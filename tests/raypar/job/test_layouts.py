"""Runs with fewer replicas take the same samples in a step, under the same numbers, and give the same losses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.worlds import world_of
from raypar.config.run import check_run
from raypar.config.schedule import load
from raypar.job.layout.elastic import Layout, Layouts, with_replicas
from raypar.job.recover.restarts import why_no_room
from tests.support.team import Team, linears

MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(dp=4), microbatches=2, steps=4, max_failures=1, optim=rp.AdamW(lr=1e-2))
MOE = replace(MODEL, moe=rp.MoE(experts=4, top_k=2))


def layouts_of(run):
    return Layouts(Layout(run, check_run(run)), Skeleton(run.model, run.seed))


def trained(run, steps=3):
    """The losses by microbatch of the whole step, and the weights."""
    team, dp, losses = Team.of(run), run.mesh.dp, []
    for step in range(steps):
        results = team.step(step)
        last = [team.world.mesh.rank(pp=run.mesh.pp - 1, dp=replica) for replica in range(dp)]
        losses.append([results[rank].losses[m] for m in range(run.microbatches) for rank in last])
    return torch.tensor(losses), team.weights()


def data(step, microbatch, dp):
    assert microbatch < 2 and dp < 6, "as the user's function is made for"
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return x, x.sin()


OWN = replace(RUN, model=rp.Layers(linears(), nn.functional.mse_loss), data=rp.Batches(data, data))
CASES = (
    ("text", RUN, 2),
    ("own data", replace(OWN, mesh=rp.Mesh(pp=2, dp=4), zero=0), 2),
    ("zero 3", replace(OWN, zero=3, zero_gather="step"), 1),
    ("zero 2, in groups", replace(OWN, mesh=rp.Mesh(dp=4, shard=2), zero=2), 2),
    ("servers", replace(OWN, data_parallel="parameter_server", servers=2), 2),
    ("experts", replace(RUN, model=MOE, mesh=rp.Mesh(dp=4, ep=4)), 2),
    ("expert actors", replace(RUN, model=MOE, mesh=rp.Mesh(dp=4, expert_actors=2)), 1),
    ("three of four", replace(RUN, zero=1, microbatches=3), 3),
    ("own data, four of six", replace(OWN, mesh=rp.Mesh(dp=6), zero=2), 4),
    ("three of four, in groups", replace(RUN, mesh=rp.Mesh(dp=4, shard=2), zero=3, microbatches=3), 3),
    ("experts, three of four", replace(RUN, model=MOE, mesh=rp.Mesh(dp=4, ep=2), microbatches=3), 3),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("run", "dp"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_losses_and_weights_are_those_of_all_replicas(run, dp):
    losses, weights = trained(run)
    fewer, its = trained(with_replicas(run, dp))
    torch.testing.assert_close(fewer, losses, rtol=1e-6, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(its[name], weight, rtol=1e-4, atol=1e-5)


def test_what_replicas_share_out_is_shared_out_among_those_that_are_left():
    zero = replace(RUN, zero=3, zero_gather="step", zero_resident=1, check_every=0)
    alone = with_replicas(zero, 1)
    assert (alone.zero, alone.zero_gather, alone.zero_resident) == (None, "microbatch", None)
    assert (with_replicas(zero, 2).zero, with_replicas(zero, 2).microbatches) == (3, 4)
    assert with_replicas(replace(RUN, mesh=rp.Mesh(dp=6, shard=2)), 3).mesh.shard == 3
    checked = replace(RUN, check_every=1, recheck_every=1)
    assert [with_replicas(checked, dp).recheck_every for dp in (2, 1)] == [1, 0]
    assert [with_replicas(checked, dp).check_every for dp in (2, 1)] == [1, 0]
    experts = replace(RUN, model=MOE, mesh=rp.Mesh(dp=4, ep=4), expert_shadows=1)
    assert [with_replicas(experts, dp).mesh.ep for dp in (2, 1)] == [2, 1]
    assert with_replicas(experts, 1).expert_shadows == 0
    assert with_replicas(replace(experts, mesh=rp.Mesh(dp=2, tp=2, ep=4, etp=1)), 1).mesh.ep == 2


def test_the_largest_layout_for_so_many_actors():
    layouts = layouts_of(replace(RUN, mesh=rp.Mesh(pp=2, dp=4)))
    assert [None if one is None else one.run.mesh.dp for one in map(layouts.largest, (9, 8, 7, 4, 3, 2, 1))] == (
        [4, 4, 2, 2, 1, 1, None]
    )
    assert layouts.largest(8) is layouts.whole and layouts.largest(5) is layouts.largest(4)
    assert layouts.largest(4).programs["train"].num_microbatches == 4
    assert layouts.why_none() == "there are too few actors to go on with 1 of 4 replicas"


@pytest.mark.parametrize(
    ("dp", "microbatches", "chosen"), [(4, 3, [4, 3, 2, 1]), (6, 2, [6, 4, 4, 3, 2, 1]), (3, 2, [3, 2, 1])]
)
def test_replicas_that_are_left_divide_the_microbatches_of_a_step(dp, microbatches, chosen):
    layouts = layouts_of(replace(RUN, mesh=rp.Mesh(dp=dp), microbatches=microbatches))
    assert [layouts.largest(actors).run.mesh.dp for actors in range(dp, 0, -1)] == chosen


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mesh": rp.Mesh(pp=2)}, "with mesh.dp 1 it has no replica that it could do without"),
        ({"min_dp": 4}, "min_dp is 4, so it does not go on with fewer replicas"),
        (
            {"mesh": rp.Mesh(dp=3), "min_dp": 2, "microbatches": 3},
            "no smaller number of replicas, from min_dp 2 on, divides a step's 9 microbatches",
        ),
    ],
)
def test_why_a_run_does_not_go_on_with_fewer_replicas(changes, why):
    layouts = layouts_of(replace(RUN, **changes))
    assert layouts.largest(layouts.whole.world.size - 1) is None
    assert layouts.why_none() == why


def test_a_schedule_of_fixed_rows_has_no_other_number_of_microbatches():
    layouts = layouts_of(replace(RUN, schedule=load("1f1b", 1, 2, None).schedule))
    assert layouts.largest(3) is None
    assert "it can't go on with mesh.dp 2: schedule '1f1b' is for 2 microbatches" in layouts.why_none()


def test_so_few_replicas_that_there_are_not_are_refused():
    assert rp.faults(replace(RUN, min_dp=8)) == ["min_dp is 8, but there are 4 replicas: set it to 4 at most"]
    assert rp.faults(replace(RUN, mesh=rp.Mesh(), min_dp=2)) == [
        "min_dp is 2, but there is 1 replica: set it to 1 at most"
    ]
    assert rp.faults(replace(RUN, min_dp=4)) == []


def test_a_world_with_fewer_replicas_needs_fewer_actors():
    served = replace(RUN, mesh=rp.Mesh(pp=2, dp=4), data_parallel="parameter_server")
    assert [world_of(with_replicas(served, dp)).size for dp in (2, 1)] == [6, 4]


@pytest.mark.parametrize(
    ("free", "reported"),
    [("", "no node is left for another actor"), ("n has 0 free CPUs", "no node has room for another actor (n has 0")],
)
def test_why_no_actor_comes_is_told_of_each_node_that_there_is(monkeypatch, free, reported):
    monkeypatch.setattr("raypar.job.recover.restarts.free_cpus_text", lambda: free)
    assert why_no_room(SimpleNamespace(pending=[])).startswith(reported)
