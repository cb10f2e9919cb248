"""The plain process sets modules to training as the actors do, whatever mode they were built in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.parity.reference import train_plainly
from tests.support.team import Team


class Frozen(nn.Module):
    """The idiom that keeps the statistics of a BatchNorm while it trains."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize("layer", [Frozen, lambda: nn.Dropout(0.5).eval()], ids=["frozen norm", "built in eval"])
def test_both_train_in_the_same_mode(layer):
    team = Team(lambda: [nn.Linear(4, 4), layer(), nn.Linear(4, 4)], 1, 2, steps=2)
    for step in range(2):
        team.step(step)
    wanted = train_plainly(team.run).weights
    assert all(torch.equal(weight, wanted[name]) for name, weight in team.weights().items())
