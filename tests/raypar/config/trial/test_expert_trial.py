"""Own layers that do not call their experts as expert actors do are told before any actor starts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp


def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return x, x


class Two(nn.Module):
    """Two lists of experts, called in an order."""

    def __init__(self, order):
        super().__init__()
        self.order, self.router = order, nn.Linear(4, 2)
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(1)
        for name in self.order:
            x = rp.run_experts(x, getattr(self, name), chosen, gates)
        return x


def run_of(*order):
    plan = {"layers.*.first": "expert", "layers.*.second": "expert"}
    model = rp.Layers(lambda: [nn.Linear(4, 4), Two(order)], nn.functional.mse_loss, plan=plan)
    return rp.Run(model=model, data=rp.Batches(batch), mesh=rp.Mesh(expert_actors=2), microbatches=1, steps=1)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (["first"], "layers.1.first"),
        (["second", "first"], "layers.1.second then layers.1.first"),
        (["first", "first", "second"], "layers.1.first then layers.1.first then layers.1.second"),
        ([], "none at all"),
    ],
    ids=["one is not called", "in another order", "one is called twice", "none"],
)
def test_lists_that_are_not_called_once_in_order_are_told(order, told):
    (fault,) = rp.faults(run_of(*order))
    assert fault.startswith(f"model: layers.1 calls experts in a forward in the order {told}, and expert actors wait")
    assert "layers.1.first then layers.1.second: call run_experts once for each list" in fault
    assert rp.faults(replace(run_of(*order), mesh=rp.Mesh())) == []


def test_lists_that_are_called_once_in_order_are_right():
    assert rp.faults(run_of("first", "second")) == []
