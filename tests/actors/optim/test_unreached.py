"""Parameters that get no gradient in the first step, of own layers: they are named once, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.reporting.report import reports_of
from tests.support.team import Team

LAYOUTS = {
    "alone": {"pp": 1},
    "pp": {"pp": 2},
    "dp": {"pp": 1, "dp": 2, "zero": 0},
    "zero 3": {"pp": 1, "dp": 2, "zero": 3},
    "flushes": {"pp": 2, "flush_every": 2},
    "recompute": {"pp": 2, "recompute": "full"},
    "halves": {"pp": 2, "schedule": "zb-h1"},
    "servers": {"pp": 2, "dp": 2, "data_parallel": "parameter_server"},
    "bf16, offload": {"pp": 1, "precision": rp.Precision("bf16"), "offload": "optimizer"},
}


class Cut(nn.Module):
    """A layer that one of its parts does not learn in, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.other(x + self.one(x).detach()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_gets_no_gradient_is_named_in_the_first_step(layout):
    team = Team(lambda: [nn.Linear(4, 4), Cut(), nn.Linear(4, 4)], m=4, **LAYOUTS[layout])
    every = LAYOUTS[layout].get("flush_every", 0)
    found = []
    for step in range(0, 4, every or 2):
        results = team.each(lambda actor, at=step: actor.train(at, None, 0, every))
        found += [report.unreached for report in reports_of(step, 1.0, results, team.world)]
    assert found == [("layers.1.one.weight", "layers.1.one.bias"), *[()] * (len(found) - 1)]


def test_a_step_without_targets_says_nothing_of_gradients():
    def data(step, microbatch, dp):
        generator = torch.Generator().manual_seed(10 * step + microbatch)
        x, y = torch.randn(3, 4, generator=generator), torch.randint(4, (3,), generator=generator)
        return x, y if step else torch.full_like(y, -100)

    team = Team(lambda: [Cut(), nn.Linear(4, 4)], pp=1, m=2, data=data, loss=nn.functional.cross_entropy)
    reports = [reports_of(step, 1.0, team.step(step), team.world)[0] for step in range(3)]
    assert [report.loss is None for report in reports] == [True, False, False]
    assert [len(report.unreached) for report in reports] == [0, 2, 0]
