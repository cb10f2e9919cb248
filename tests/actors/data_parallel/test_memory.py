"""What actors hold at each level of ZeRO: bytes a parameter as in the textbook, and the peaks of what passes."""

from __future__ import annotations

import pytest
from torch import nn

from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.precision import Precision
from raypar.planner.memory.worker import ActorMemory, worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from tests.support.team import Team

WIDTH = 4


def equal(count):
    """Layers whose parameters all have one size, so that replicas can hold equally many."""
    return lambda: [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


def held_of(**changes):
    fields = {"fn": equal(16), "pp": 1, "m": 2, "optim": AdamW(lr=0.01), "clip": None} | changes
    team = Team(**fields)
    team.step(0)
    return team, [actor.held() for actor in team.workers]


def formulas(team) -> list[ActorMemory]:
    """The planner's figures of each actor."""
    schedule = team.programs["train"]
    sized = SizedRun.of(team.run, schedule)
    timeline = from_flops(sized).timeline
    found = worker_memory(sized, timeline)
    return [found[team.world.pp(rank)] for rank in range(team.world.mesh.size)]


@pytest.mark.each_value
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    ("level", "bytes_of"),
    [(0, lambda n: 16), (1, lambda n: 8 + 8 / n), (2, lambda n: 4 + 12 / n), (3, lambda n: 16 / n)],
)
@pytest.mark.parametrize("copies", [1, 2])
def test_bytes_a_parameter_are_those_of_the_textbook(level, bytes_of, shards, copies):
    """Adam in fp32: weight and gradient of 4 bytes each and two means (Rajbhandari et al. 2020, figure 1).

    With hybrid sharding they are divided by the replicas of a group. At level 1, where all gradients are kept, each
    actor keeps its part of their sums besides, which copies of the shards add up.
    """
    hybrid = {"shard": shards} if copies > 1 and level else {}
    team, found = held_of(dp=copies * shards, zero=level, **hybrid)
    count, wanted = 16 * WIDTH * WIDTH, bytes_of(shards) + (4 / shards if hybrid and level == 1 else 0)
    for held, formula in zip(found, formulas(team), strict=True):
        measured = sum(held.most[kind] for kind in ("weights", "gradients", "optimizer"))
        assert measured / count == pytest.approx(wanted, rel=0.03)  # Adam also counts steps
        assert formula.state / count == pytest.approx(wanted, rel=0.03)
        assert held.now.get("gathered", 0) == held.now.get("buckets", 0) == 0, "between steps nothing passes"


@pytest.mark.sampled
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    ("reduce", "level", "bytes_of"),
    [
        ("bf16", 0, lambda n: 16),
        ("bf16", 1, lambda n: 4 + 12 / n),
        ("bf16", 2, lambda n: 2 + 14 / n),
        ("bf16", 3, lambda n: 16 / n),
        ("fp32", 0, lambda n: 18),
    ],
)
def test_bytes_a_parameter_in_mixed_precision_are_those_of_the_textbook(reduce, level, bytes_of, shards):
    """Weights and gradients of 2 bytes, or sums of 4; a master and two means (Rajbhandari et al. 2020, 3.1)."""
    precision = Precision(compute="bf16", reduce=reduce)
    team, found = held_of(dp=shards, zero=level, precision=precision, fn=equal(32))
    count = 32 * WIDTH * WIDTH
    for held, formula in zip(found, formulas(team), strict=True):
        measured = sum(held.most[kind] for kind in ("weights", "gradients", "optimizer"))
        assert measured / count == pytest.approx(bytes_of(shards), rel=0.03)
        assert formula.state / count == pytest.approx(bytes_of(shards), rel=0.03)


PLACEMENTS = {
    "layer by layer": ({}, 2),
    "two layers a unit": ({"zero_units": 2}, 4),
    "kept for the backward": ({"reshard_after_forward": False}, 8),
    "once a step": ({"zero_gather": "step"}, 8),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_most_that_is_gathered_follows_the_windows(placement):
    changes, layers = PLACEMENTS[placement]
    team, found = held_of(fn=equal(8), dp=2, zero=3, **changes)
    layer = 4 * WIDTH * WIDTH
    assert [held.most["gathered"] for held in found] == [layers * layer] * 2
    assert [formula.gathered for formula in formulas(team)] == [layers * layer] * 2


@pytest.mark.sampled
@pytest.mark.parametrize(("resident", "stages"), [(None, 4), (1, 1), (2, 2), (3, 3)])
def test_as_many_stages_are_gathered_as_may_be_resident(resident, stages):
    changes = {"schedule": "interleaved", "chunks": 4, "zero_gather": "step", "zero_resident": resident}
    team, found = held_of(pp=2, m=4, dp=2, zero=3, **changes)
    stage = 2 * 4 * WIDTH * WIDTH
    assert {held.most["gathered"] for held in found} == {stages * stage}
    assert {formula.gathered for formula in formulas(team)} == {stages * stage}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize(("pp", "schedule"), [(1, "gpipe"), (2, "1f1b"), (2, "interleaved")])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_account_of_a_pipeline_is_what_its_actors_gather(placement, pp, schedule):
    changes, _ = PLACEMENTS[placement]
    team, found = held_of(pp=pp, m=4, schedule=schedule, dp=2, zero=3, **changes)
    for held, formula in zip(found, formulas(team), strict=True):
        assert held.most["gathered"] == pytest.approx(formula.gathered, rel=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("when", ["step", "microbatch"])
@pytest.mark.parametrize(("full", "passing"), [(1, 3), (0.3, 2)])
def test_gradients_pass_in_few_buckets_or_wait_for_the_last_backward(level, when, full, passing):
    """Three full buckets, or the largest gradient and a unit; gradients larger than a bucket wait for each other."""
    layer = 4 * WIDTH * WIDTH
    team, found = held_of(dp=2, m=4, zero=level, zero_reduce=when, bucket_mb=full * layer / 2**20)
    for held, formula in zip(found, formulas(team), strict=True):
        assert held.most["buckets"] <= formula.buckets
        assert formula.buckets == (16 if when == "step" else passing) * layer
        assert held.most["buckets"] >= formula.buckets / 2


def test_in_the_middle_of_a_step_gathered_units_and_buckets_are_seen():
    team = Team(equal(4), 1, 1, dp=2, zero=3, zero_gather="step", zero_reduce="step")
    seen = []
    for worker in team.workers:
        perform = worker.member.perform

        def looked(action, worker=worker, perform=perform):
            perform(action)
            seen.append((str(action), worker.held().now["gathered"]))

        worker.member.perform = looked
    team.step(0)
    layer = 4 * WIDTH * WIDTH
    assert {count for action, count in seen if action == "0UNSHARD"} == {4 * layer}
    assert {count for action, count in seen if action == "0RESHARD"} == {0}
