"""Activations in host memory: the same bits as without, and the bytes that were moved are counted."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.actors.machine.high_water import HighWater
from raypar.actors.pipeline.offloaded_activations import OffloadedActivations
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.schedules.rules import most_in_flight
from tests.support.team import Team

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "seq": 12, "vocab": 256}


def run_of(most, **changes):
    fields = {"model": rp.GPT(**SIZES), "data": rp.Text(), "mesh": rp.Mesh(pp=2), "microbatches": 4, "steps": 2}
    return rp.Run(**fields | {"schedule": "gpipe", "activations_on_device": most, "timeout": 10.0} | changes)


def weights(run):
    team = Team.of(run)
    results = [team.step(number) for number in range(2)]
    losses = [[one.losses for one in each] for each in results]
    planned = most_in_flight(team.programs["train"])
    assert [one.in_flight for one in results[0]] == [planned[team.world.row(rank)] for rank in range(team.world.size)]
    return losses, team.weights(), team


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "1f1b", "backward": "split", "mesh": rp.Mesh(pp=4), "microbatches": 6},
        {"schedule": "zb-v"},
        {"model": rp.Llama(**SIZES, kv_heads=2), "recompute": "selective"},
        {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True},
        {"mesh": rp.Mesh(pp=2, dp=2), "zero": 2},
        {"model": rp.GPT(**SIZES, dropout=0.1), "recompute": ("full", "none", "full", "none"), "mesh": rp.Mesh()},
    ],
    ids=str,
)
def test_the_bits_are_those_without_a_bound(changes):
    most = {"zb-v": 3, "1f1b": 3}.get(changes.get("schedule"), 2)
    losses, values, team = weights(run_of(most, **changes))
    plain_losses, plain_values, _ = weights(run_of(None, **changes))
    assert any(one.member.probe.most()["offloaded"] for one in team.all)
    assert losses == plain_losses
    assert all(torch.equal(values[name], plain_values[name]) for name in plain_values)


def test_what_is_moved_is_counted_and_comes_back():
    _, _, team = weights(run_of(1, backward="whole"))
    held = [one.member.probe.held() for one in team.all]
    assert all(one.most["offloaded"] > 0 and one.now["offloaded"] == 0 for one in held)
    _, _, two = weights(run_of(2, backward="whole"))
    assert all(
        b.member.probe.held().most["offloaded"] < a.most["offloaded"] for a, b in zip(held, two.all, strict=True)
    )


def test_the_most_is_that_of_a_step():
    _, _, team = weights(run_of(1, backward="whole"))
    for one in team.all:
        one.member.begin("train", 2)
    held = [stage.host.held for one in team.all for stage in one.stages.values()]
    assert [one.most for one in held] == [0] * len(team.all)


def test_what_an_interrupted_step_left_is_dropped():
    held = HighWater()
    first, second = OffloadedActivations(held), OffloadedActivations(held)
    x = torch.randn(4, 4, requires_grad=True)
    for host in (first, second):
        with host.keeping(0, 1, [x], []):
            y = x.exp()
        host.offload(0, 1)
        del y
    assert (held.now, held.most) == (128, 128)
    first.begin()
    second.begin()
    assert (held.now, held.most, first.num_away, second.num_away) == (0, 0, 0, 0)


def test_a_storage_is_moved_once_and_weights_stay():
    host = OffloadedActivations(held := HighWater())
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with host.keeping(0, 1, [weight], []):
        y = x.exp()  # keeps its output
        z = (y @ weight) * y.view(16).view(4, 4)
    host.offload(0, 1)
    assert held.now == 2 * 64  # y, and its product with the weight
    with pytest.raises(AssertionError, match="RELOAD"):
        z.sum().backward(retain_graph=True)
    host.reload(0, 1)
    assert held.now == 0
    z.sum().backward()
    other, same = x.detach().requires_grad_(), weight.detach().requires_grad_()
    ((other.exp() @ same) * other.exp()).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(weight.grad, same.grad)


def test_all_that_does_not_combine_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        check_run(run_of(1, recompute="full", zero=3, mesh=rp.Mesh(pp=2, dp=2)))
    assert "recompute" in str(error.value) and "zero" in str(error.value)
    with pytest.raises(ConfigError, match="activations_on_device is 1"):
        check_run(run_of(1, token_slices=2))
    with pytest.raises(ConfigError, match="activations_on_device"):
        check_run(run_of(1, schedule="pipedream", clip=None))
