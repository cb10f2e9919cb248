"""Your own modules in a pipeline: a list of layers, a loss, a metric, batches as a function of (step, microbatch, dp).

python examples/own_model.py

With ``Mesh(pp=3, dp=2)`` two replicas train, each on batches of its own: ``dp`` is the replica of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import raypar as rp


def layers() -> list[nn.Module]:
    """Any modules, with any shapes in between. Each takes what the one before it returned."""
    return [
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 6 * 6, 4),
    ]


def batch(step: int, microbatch: int, dp: int) -> tuple[Tensor, Tensor]:
    """Pictures (16, 1, 16, 16) with a bright quarter, and which quarter it is. The same arguments, the same batch."""
    generator = torch.Generator().manual_seed((1000 * step + microbatch) * 1000 + dp)
    quarter = torch.randint(4, (16,), generator=generator)
    pictures = torch.randn(16, 1, 16, 16, generator=generator)
    for picture, q in zip(pictures, quarter.tolist(), strict=True):
        row, column = divmod(q, 2)
        picture[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 0.5
    return pictures, quarter


def unseen(step: int, microbatch: int, dp: int) -> tuple[Tensor, Tensor]:
    """Batches of steps that no training reaches."""
    return batch(1_000_000 + step, microbatch, dp)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of pictures whose quarter is found. ``job.evaluate()`` reports it besides the loss."""
    return (output.argmax(1) == target).float().mean()


def main(steps: int = 30) -> tuple[float, float]:
    run = rp.Run(
        model=rp.Layers(layers, loss=nn.functional.cross_entropy, metrics={"accuracy": accuracy}),
        mesh=rp.Mesh(pp=3),
        schedule="gpipe",
        microbatches=4,
        data=rp.Batches(batch, validate=unseen),
        optim=rp.AdamW(lr=3e-3),
        steps=steps,
    )
    with rp.launch(run) as job:
        print(job.schedule)
        reports = job.train()
        print(job.evaluate())
    return reports[0].loss, reports[-1].loss


if __name__ == "__main__":
    print("loss from {:.3f} to {:.3f}".format(*main()))
