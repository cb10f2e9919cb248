"""Experts in your own modules: your router chooses, ``rp.run_experts`` takes the tokens to their experts and back.

python examples/own_experts.py

The task has four kinds of vectors, each with a function of its own. A small expert can learn one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import raypar as rp

EXPERTS, WIDTH = 4, 16


class Experts(nn.Module):
    """A residual layer with experts: (T, WIDTH) -> (T, WIDTH). Each token goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)
        )
        self.balance, self.load = rp.AuxiliaryLoss("balance", weight=0.01), rp.RouterLoad(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        probs = logits.softmax(-1)
        gates, chosen = probs.topk(1)
        y = x + rp.run_experts(x, self.experts, self.load(chosen, logits), gates)
        share = nn.functional.one_hot(chosen[:, 0], EXPERTS).float().mean(0)
        out: Tensor = self.balance(y, EXPERTS * (share * probs.mean(0)).sum())
        return out


def layers() -> list[nn.Module]:
    return [nn.Linear(8, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, 8)]


def batch(step: int, microbatch: int, dp: int) -> tuple[Tensor, Tensor]:
    """Vectors (64, 8) around one of four centres, and what that centre's function makes of them."""
    fixed = torch.Generator().manual_seed(0)
    centres, functions = torch.randn(4, 8, generator=fixed), torch.randn(4, 8, 8, generator=fixed)
    generator = torch.Generator().manual_seed((1000 * step + microbatch) * 1000 + dp)
    kind = torch.randint(4, (64,), generator=generator)
    x = 2 * centres[kind] + 0.5 * torch.randn(64, 8, generator=generator)
    return x, torch.einsum("td,tde->te", x, functions[kind]).tanh()


def main(steps: int = 60) -> tuple[float, float, float]:
    run = rp.Run(
        model=rp.Layers(layers, loss=nn.functional.mse_loss),
        mesh=rp.Mesh(pp=2),
        data=rp.Batches(batch),
        optim=rp.AdamW(lr=1e-2),
        steps=steps,
    )
    with rp.launch(run) as job:
        reports = job.train()
    loads = reports[-1].loads
    return reports[0].loss, reports[-1].loss, loads.max_load if loads else 0.0


if __name__ == "__main__":
    print("loss from {:.3f} to {:.3f}; the busiest expert has {:.2f} times the mean".format(*main()))
