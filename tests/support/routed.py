"""A small layer with experts of its own: a router with a bias that is balanced, an auxiliary loss, loads."""

from __future__ import annotations

import torch
from torch import nn

from raypar.actors.expert_parallel.record import Balanced, attach_loss

EXPERTS, RATE = 3, 0.05


class Experts(nn.Module, Balanced):
    """One choice a token; the experts are the rows of a table of scales. (B, 4) -> (B, 4)."""

    num_experts, is_balanced = EXPERTS, True

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, EXPERTS, bias=False)
        self.scales = nn.Linear(EXPERTS, 4, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        logits = self.router(x).float()
        probs = logits.softmax(-1)
        chosen = (probs.detach() + self.bias).argmax(-1)
        gates = nn.functional.one_hot(chosen, EXPERTS) * probs
        y = x + self.scales(gates.to(x.dtype))
        asked = torch.bincount(chosen, minlength=EXPERTS)
        loss = 0.1 * logits.pow(2).mean()
        if self.record is not None:
            self.record.scores(self.name, logits)
            self.record.tokens(self.name, asked, asked // 2)
            self.record.loss(self.name, "z", loss)
        return attach_loss(y, loss, self.record)

    def balance(self, asked_E):
        load = asked_E.float()
        self.bias += RATE * (load.mean() - load).sign()


def routed(count=4):
    return [layer for _ in range(count // 2) for layer in (Experts(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))]
