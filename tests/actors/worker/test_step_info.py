"""Layers and losses that go by the step and the microbatch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import raypar as rp
from raypar.actors.specs.optim import SGD
from raypar.parity.reference import train_plainly
from tests.support.team import Team

LAYOUTS = {
    "plain": {"pp": 1, "dp": 1},
    "pipeline": {"pp": 2, "dp": 2},
    "full": {"pp": 2, "dp": 2, "recompute": "full"},
    "zero3": {"pp": 2, "dp": 2, "zero": 3},
}


class Scheduled(nn.Module):
    """A layer with a temperature that depends on the step and the microbatch; a part computes itself again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def scaled(self, x):
        info = rp.step_info()
        return self.linear(x).tanh() * (1 + info.step + 0.25 * info.microbatch)

    def forward(self, x):
        assert rp.step_info().trains
        return self.scaled(x) if self.linear.bias[0] > 2 else checkpoint(self.scaled, x, use_reentrant=False)


def layers():
    return [Scheduled(), Scheduled()]


def loss(output, target):
    info = rp.step_info()
    return (output - target).square().mean() * (1 + info.step) * (1 + info.microbatch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_and_losses_find_the_step_and_the_microbatch_over_all_replicas(layout):
    team = Team(layers, loss=loss, m=2, optim=SGD(lr=0.01), **LAYOUTS[layout])
    plain = train_plainly(team.run)
    for step in range(team.run.steps):
        results = team.step(step)
        found = [one for result in results for one in result.losses]
        assert sum(found) / len(found) == pytest.approx(plain.losses[step], rel=1e-6)
    torch.testing.assert_close(team.weights(), plain.weights, rtol=1e-6, atol=1e-6)
    assert rp.step_info() == (None, None, False)


def test_an_evaluation_does_not_train():
    seen = []

    def noted(output, target):
        seen.append(rp.step_info())
        return (output - target).square().mean()

    team = Team(lambda: [nn.Linear(4, 4)], loss=noted, m=2, pp=1, dp=1)
    seen.clear()  # the loss was tried before the launch
    team.step(0, "evaluate")
    assert [info.trains for info in seen] == [False, False] and {info.microbatch for info in seen} == {0, 1}
    assert rp.step_info() == (None, None, False)
