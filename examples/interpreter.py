"""Perform a schedule in one process, as actors do: python examples/interpreter.py zb-v"""

from __future__ import annotations

import sys
from collections import deque

import torch
from torch import Tensor, nn

from raypar.schedules import Action, Op, build, lower, text

RANKS, MICROBATCHES, WIDTH, RATE = 2, 4, 8, 0.1
data = torch.rand(MICROBATCHES, 3, WIDTH, generator=torch.Generator().manual_seed(0))
Messages = dict[tuple[str, int, int], Tensor]  # by kind (F or B), receiving stage, microbatch


class Rank:
    """A pipeline rank: its row and the stages that it owns. Messages stay in ``links`` until they are received."""

    def __init__(self, row: tuple[Action, ...], model: nn.ModuleList, own: list[int], links: Messages) -> None:
        self.todo, self.model, self.own, self.links = deque(row), model, own, links
        self.here: Messages = {}  # between stages on this rank
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output, from F to W

    def perform(self) -> bool:
        """Perform the next action of the row. Return False if it is a RECV whose message was not sent yet."""
        stage, op, mb, _ = self.todo[0]  # the last field is for asynchronous schedules
        if op in (Op.RECV_F, Op.RECV_B):
            key = (op.value[-1], stage, mb)
            if key not in self.links:
                return False
            self.here[key] = self.links.pop(key)
        elif op in (Op.SEND_F, Op.SEND_B):
            key = ("F", stage + 1, mb) if op is Op.SEND_F else ("B", stage - 1, mb)
            self.links[key] = self.here.pop(key)
        elif op is Op.F:
            x = self.here.pop(("F", stage, mb)).requires_grad_() if stage else data[mb]
            y = self.model[stage](x)
            if stage == len(self.model) - 1:
                y = y.square().mean() / MICROBATCHES  # the loss
            self.saved[stage, mb] = x, y
            self.here["F", stage + 1, mb] = y.detach()
        elif op is Op.STEP:
            for weight in nn.ModuleList(self.model[stage] for stage in self.own).parameters():
                weight.data -= RATE * weight.grad
        elif op in (Op.B, Op.I, Op.W):
            self.backward(stage, op, mb)
        self.todo.popleft()
        return True

    def backward(self, stage: int, op: Op, mb: int) -> None:
        """Perform I (the gradient of the stage's input), W (the gradients of its weights), or B, which is both."""
        (x, y), gradient = self.saved[stage, mb], self.here.get(("B", stage, mb))
        if op is not Op.W and stage:
            (self.here["B", stage - 1, mb],) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        if op is not Op.I:
            weights = list(self.model[stage].parameters())
            for weight, its in zip(weights, torch.autograd.grad(y, weights, gradient), strict=True):
                weight.grad = its if weight.grad is None else weight.grad + its
            del self.saved[stage, mb]


def new_model(stages: int) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))


schedule = lower(build(sys.argv[1] if len(sys.argv) > 1 else "1f1b", RANKS, MICROBATCHES))
print(text(schedule))
model, plain, links = new_model(schedule.num_stages), new_model(schedule.num_stages), Messages()
owns = [[stage for stage, holder in enumerate(schedule.placement) if holder == rank] for rank in range(RANKS)]
ranks = [Rank(row, model, own, links) for row, own in zip(schedule.rows, owns, strict=True)]
while any(rank.todo for rank in ranks):
    assert any(rank.todo and rank.perform() for rank in ranks), "a deadlock: all ranks wait"
for x in data:  # the same in one process
    (nn.Sequential(*plain)(x).square().mean() / MICROBATCHES).backward()
pairs = zip(model.parameters(), plain.parameters(), strict=True)
print("gradients are those of one process, bitwise:", all(one.grad.equal(other.grad) for one, other in pairs))
