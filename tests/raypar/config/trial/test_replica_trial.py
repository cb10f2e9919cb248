"""Layers and losses that exchange values with other replicas (``rp.replicas``), before a launch."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.job.start.before_launch import look_ahead
from raypar.job.start.resume import prepared

mse = nn.functional.mse_loss


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    x = torch.randn(3, 4, generator=generator)
    return x, x[:, :2].sin()


class Gathers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        made = self.inner(x)
        own = rp.replicas.all_gather(made).view(rp.replicas.count, -1, 2)[rp.replicas.index]
        return own - rp.replicas.all_reduce(made, "mean")


class OwnNorm(nn.SyncBatchNorm):
    pass


def gathering_loss(output, target):
    return (output - rp.replicas.all_gather(target).mean(0)).square().mean()


RUN = rp.Run(
    model=rp.Layers(lambda: [Gathers()], gathering_loss), data=rp.Batches(batch), mesh=rp.Mesh(dp=2), microbatches=2
)
REFUSED = [
    ({"data_parallel": "parameter_server"}, "take all_reduce"),
    ({"mesh": rp.Mesh(pp=2, rank_dp=(2, 1)), "microbatches": 2}, "give dp and tp"),
    ({"recheck_every": 2}, "set it to 0"),
    ({"executor": "tasks", "order": "dynamic"}, "set order to 'row'"),
    ({"compile": True}, "leave compile out"),
]


def test_replicas_that_can_exchange_values_are_launched(caplog):
    assert rp.faults(RUN) == []
    look_ahead(prepared(RUN, None))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(("changes", "fix"), REFUSED)
@pytest.mark.parametrize(
    ("fn", "loss"), [(lambda: [Gathers(), nn.Tanh()], mse), (lambda: [nn.Linear(4, 2), nn.Tanh()], gathering_loss)]
)
def test_replicas_that_can_not_are_refused(fn, loss, changes, fix):
    (fault,) = rp.faults(replace(RUN, model=rp.Layers(fn, loss), **changes))
    assert fault.startswith("model: its layers or its loss use rp.replicas, and ") and fix in fault


@pytest.mark.parametrize(("changes", "fix"), REFUSED)
def test_statistics_of_replicas_that_can_not_exchange_them_are_refused(changes, fix):
    model = rp.Layers(lambda: [nn.Linear(4, 2), nn.Sequential(nn.Tanh(), nn.SyncBatchNorm(2))], mse)
    (fault,) = rp.faults(replace(RUN, model=model, **changes))
    assert fault.startswith("model.fn: layers.1.1 is a SyncBatchNorm, and ") and fix in fault
    assert rp.faults(replace(RUN, model=model)) == []


def test_a_norm_of_their_own_is_refused_where_there_are_several_replicas():
    run = replace(RUN, model=rp.Layers(lambda: [nn.Linear(4, 2), OwnNorm(2)], mse))
    (fault,) = rp.faults(run)
    assert "layers.1 is a OwnNorm, a subclass of SyncBatchNorm" in fault
    assert rp.faults(replace(run, mesh=rp.Mesh())) == []
