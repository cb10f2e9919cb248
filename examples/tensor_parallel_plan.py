"""Tensor parallelism for modules of your own: an MLP-Mixer on two actors, each with half of every MLP, by a plan.

Run it as a script, or cell by cell (``# %%``) in an editor or a notebook; it takes less than a minute.
"""

# %% An MLP-Mixer (Tolstikhin et al. 2021) in plain PyTorch, without any code for actors
from dataclasses import replace

import torch
from torch import Tensor, nn

import raypar as rp


class Mixer(nn.Module):
    """An MLP that mixes patches, and one that mixes channels: (B, S, D) -> (B, S, D)."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.patches = MLP(patches, 2 * patches)
        self.channels = MLP(channels, 4 * channels)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.patches(self.norm1(x_BSD).mT).mT
        return x_BSD + self.channels(self.norm2(x_BSD))


class MLP(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(size, hidden), nn.Linear(hidden, size), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.gelu(self.up(x))))


class Head(nn.Module):
    """The mean over patches, and a class from it: (B, S, D) -> (B, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, classes)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.out(x_BSD.mean(1))


def layers() -> list[nn.Module]:
    """Pictures (B, 1, 16, 16) in patches of 4 x 4, each a token of 32 channels."""
    patches = nn.Sequential(nn.Unflatten(2, (4, 4)), nn.Unflatten(4, (4, 4)), Patches(), nn.Linear(16, 32))
    return [patches, *(Mixer(16, 32) for _ in range(4)), Head(32, 4)]


class Patches(nn.Module):
    """(B, 1, rows, 4, columns, 4) -> (B, rows x columns, 16)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(1).transpose(2, 3).flatten(3).flatten(1, 2)


def batch(step: int, microbatch: int, dp: int) -> tuple[Tensor, Tensor]:
    """Pictures with a bright quarter, and which quarter it is. The same arguments, the same batch."""
    generator = torch.Generator().manual_seed((1000 * step + microbatch) * 1000 + dp)
    quarter = torch.randint(4, (16,), generator=generator)
    pictures = torch.randn(16, 1, 16, 16, generator=generator)
    for picture, q in zip(pictures, quarter.tolist(), strict=True):
        row, column = divmod(q, 2)
        picture[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 0.5
    return pictures, quarter


# %% The plan names modules: up makes half of the hidden features on each actor, down takes that half and sums
plan = {
    "layers.*.*.up": "column",
    "layers.*.*.drop": "dropout",
    "layers.*.*.down": "row",
    "layers.5.out": "column_gather_output",
}
run = rp.Run(
    model=rp.Layers(layers, loss=nn.functional.cross_entropy, plan=plan),
    mesh=rp.Mesh(tp=2),
    microbatches=2,
    data=rp.Batches(batch),
    optim=rp.AdamW(lr=3e-3),
    steps=30,
)

# %% A plan that does not fit is refused before an actor starts
try:
    rp.launch(rp.Run(model=rp.Layers(layers, run.model.loss, plan={"layers.*.up": "column"}), data=run.data))
except rp.ConfigError as error:
    print(error)

# %% Two actors train. The job returns whole tensors
job = rp.launch(run)
reports = job.train()
print(f"loss from {reports[0].loss:.3f} to {reports[-1].loss:.3f}")
print(job.param("layers.1.channels.up.weight").shape)
print(job.ledger()["pp=0 tp=0"])

# %% The losses are those of one plain process, and so are dropout's masks; only additions have another order
verdict = rp.verify(replace(run, steps=3), job)
print(verdict)
job.close()
