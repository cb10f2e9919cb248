"""Optimizers over named parameters move every weight, whatever its dtype and whenever its gradient comes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.optim.optimizer import build_optimizer
from raypar.actors.specs.optim import SGD, AdamW, Muon


@pytest.mark.parametrize("spec", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.0), AdamW(lr=0.1), Muon(lr=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_weight_moves(spec, dtype):
    weight, late = nn.Parameter(torch.linspace(-1, 1, 67).to(dtype)), nn.Parameter(torch.ones(33, dtype=dtype))
    optimizer = build_optimizer(spec, {"weight": weight, "late": late})
    for step in range(2):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        late.grad = torch.ones_like(late) if step else None
        optimizer.step()
        assert (weight != before).all()
    assert (late != 1).all()


def test_adamw_updates_every_element_of_a_weight_with_gaps_and_nothing_else():
    memory = torch.ones(8, 8)
    weight = nn.Parameter(memory[::2, ::2])
    weight.grad = torch.ones_like(weight)
    build_optimizer(AdamW(lr=0.1, weight_decay=0.0), {"w": weight}).step()
    assert torch.allclose(weight.detach(), torch.full((4, 4), 0.9), atol=1e-3)
    assert (memory == 1.0).sum() == 64 - 16
