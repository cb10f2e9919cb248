"""Users' own layers and data, and teams that train them."""

from __future__ import annotations

import torch
from torch import nn

from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import AdamW
from tests.support.team import Team

mse = nn.functional.mse_loss


def patches(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x_BSC = torch.randn(2, 5, 3, generator=generator)
    return x_BSC, x_BSC.sum(-1, keepdim=True).sin().expand(-1, -1, 4)


def own_generator(weight):
    generator = torch.Generator().manual_seed(5)
    nn.init.normal_(weight, generator=generator)
    nn.init.normal_(weight, generator=generator)


def team_of(fn, plan, tp=2, pp=1, dp=1, m=2, loss=mse, data=patches, **changes):
    fields = {"optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 5, "data": data}
    return Team(None, pp, m, dp=dp, tp=tp, model=Layers(fn, loss, plan=plan), **fields | changes)


def cross_entropy(logits_BSV, labels_BS):
    return nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
