"""Teams in half precision: their losses, their scale, and steps that overflow on one actor and are skipped on all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.errors import NonFiniteError
from raypar.actors.specs.results import losses_of, mean_loss
from tests.support.overflows import LAYOUTS, SHARDED, laid_out, not_skipped, poison
from tests.support.team import Team

TINY = rp.Run(
    model=rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.0),
    optim=rp.AdamW(lr=2e-3, decay="linear"),
    microbatches=2,
    steps=6,
    timeout=20.0,
)


def losses(run):
    team = Team.of(run)
    return [mean_loss(*losses_of(team.step(number))) for number in range(run.steps)]


@pytest.fixture(scope="module")
def in_fp32():
    return losses(TINY)


@pytest.mark.sampled
@pytest.mark.parametrize("reduce", ["fp32", "half"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_trains_as_fp32_does(compute, reduce, in_fp32):
    run = replace(TINY, precision=rp.Precision(compute, reduce=compute if reduce == "half" else "fp32"))
    assert losses(run) == pytest.approx(in_fp32, rel=0.01)
    assert in_fp32[-1] < 0.99 * in_fp32[0]


def test_a_scale_of_two_to_the_k_changes_no_bit(in_fp32):
    scaled = replace(TINY, loss_scale=rp.LossScale(use="on", init=2.0**10, window=2))
    team, plain = Team.of(scaled), Team.of(TINY)
    for number in range(4):
        (ours,), (theirs,) = team.step(number), plain.step(number)
        assert ours.losses == theirs.losses
        assert ours.grad_norm == theirs.grad_norm
        assert ours.scale == 2.0 ** (10 + number // 2)
    assert all(torch.equal(team.weights()[name], weight) for name, weight in plain.weights().items())


def test_replicas_have_masters_of_their_parts_only():
    team = Team.of(replace(TINY, precision=rp.Precision("bf16"), mesh=rp.Mesh(dp=2)))
    one, other = (actor.member.state for actor in team.all)
    assert one.masters.keys() | other.masters.keys() == one.parameters.keys()
    count = sum(p.numel() for p in one.parameters.values())
    assert sum(master.numel() for state in (one, other) for master in state.masters.values()) == count
    team.step()
    held = [actor.member.probe.memory() for actor in team.all]
    assert all(memory["weights"] == 2 * count for memory in held)
    states = sum(memory["optimizer"] for memory in held)
    assert states == pytest.approx(12 * count, rel=0.01), "master, mean and mean of squares, once"


def cases():
    """Every actor of the layouts without ZeRO, and some of the others, in the first or the last microbatch."""
    yield from ((layout, rank, rank % 2) for layout in LAYOUTS for rank in range(laid_out(layout)["mesh"].size))
    yield from ((layout, laid_out(layout)["mesh"].size - 1, 0) for layout in SHARDED)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize(("layout", "rank", "microbatch"), list(cases()), ids=str)
def test_an_overflow_on_any_actor_skips_the_step_on_every_actor(layout, rank, microbatch):
    run = replace(TINY, precision=rp.Precision("fp16"), loss_scale=rp.LossScale(init=2.0**8), **laid_out(layout))
    assert not list(not_skipped(run, rank, microbatch))


def test_at_its_floor_an_overflow_ends_the_run_unless_it_skips():
    run = replace(TINY, precision=rp.Precision("fp16"), loss_scale=rp.LossScale(init=2.0, floor=1.0))
    team = Team.of(run)
    for step in (0, 1):
        poison(team.all[0], (step, 0))
    assert team.step(0)[0].is_skipped
    with pytest.raises(NonFiniteError, match="norm1"):
        team.step(1)
    team = Team.of(replace(run, precision=rp.Precision(), loss_scale=rp.LossScale(), nonfinite="skip"))
    poison(team.all[0], (0, 1))
    (result,) = team.step(0)
    assert result.is_skipped
    assert result.scale is None


def test_clamped_overflows_make_a_step_and_lower_the_scale():
    spec = rp.LossScale(init=2.0**8, overflow="clamp")
    team = Team.of(replace(TINY, precision=rp.Precision("fp16"), loss_scale=spec, mesh=rp.Mesh(pp=2)))
    poison(team.all[1], (0, 1))
    before = team.weights()
    results = team.step(0)
    assert not any(result.is_skipped for result in results)
    assert all(math.isfinite(result.grad_norm) for result in results)
    assert any(not torch.equal(weight, before[name]) for name, weight in team.weights().items())
    assert {result.scale for result in team.step(1)} == {128.0}
