"""Layers and losses that exchange values with other replicas, against plain torch on the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raypar as rp
from raypar.actors.collective.replicas import CALL_BYTES
from raypar.actors.errors import ActionError
from raypar.actors.optim.lr import lr_at
from raypar.actors.specs.optim import SGD
from raypar.parity.reference import train_plainly
from tests.support.team import Team, batch

STEPS, ROWS = 3, 3
OPTIM = SGD(lr=0.1, momentum=0.0)
LAYOUTS = [
    {"pp": 1, "dp": 2},
    {"pp": 1, "dp": 3},
    {"pp": 2, "dp": 2},
    {"pp": 1, "dp": 2, "zero": 1},
    {"pp": 2, "dp": 2, "zero": 2},
    {"pp": 1, "dp": 3, "zero": 3},
    {"pp": 2, "dp": 2, "recompute": "full"},
    {"pp": 2, "dp": 2, "schedule": "zb-h1"},
]
close = {"rtol": 1e-6, "atol": 1e-6}


def ids(layout):
    return "-".join(f"{name}{value}" for name, value in layout.items())


class Towers(nn.Module):
    """A tower of images and one of texts, which a pair of inputs goes through side by side."""

    def __init__(self, width):
        super().__init__()
        self.image, self.text = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, image, text):
        return self.image(image).tanh(), self.text(text).tanh()


def towers():
    return [Towers(4), Towers(4)]


def pairs(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return (x, y * (1 + dp)), torch.arange(ROWS)


def clip_loss(output, target, gather=rp.replicas.all_gather):
    """The contrastive loss of CLIP (Radford et al. 2021) of this replica's rows against those of all replicas."""
    image, text = (F.normalize(one, dim=1) for one in output)
    images, texts = gather(image), gather(text)
    labels = target + rp.replicas.index * ROWS
    return (F.cross_entropy(4 * image @ texts.T, labels) + F.cross_entropy(4 * text @ images.T, labels)) / 2


def whole_clip_loss(output, target):
    image, text = (F.normalize(one, dim=1) for one in output)
    logits, labels = 4 * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def embedding():
    return [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)]


def vicreg_loss(output, target):
    """Variance and covariance over all replicas, and invariance (VICReg: Bardes et al. 2022)."""
    count = rp.replicas.count * len(output)
    mean = rp.replicas.all_reduce(output.mean(0), "mean")
    centered = output - mean
    covariance = rp.replicas.all_reduce(centered.T @ centered) / (count - 1)
    off = covariance - torch.diag(covariance.diagonal())
    variance = F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
    return F.mse_loss(output, target) + variance + off.square().sum() / output.shape[1]


def normed():
    return [
        nn.Linear(4, 6),
        nn.SyncBatchNorm(6),
        nn.Sequential(nn.Tanh(), nn.SyncBatchNorm(6, momentum=None)),
        nn.Linear(6, 4),
    ]


def whole_normed():
    return [
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Sequential(nn.Tanh(), nn.BatchNorm1d(6, momentum=None)),
        nn.Linear(6, 4),
    ]


def images(step, microbatch, dp):
    x, _ = batch(step, microbatch, dp)
    return x[:, :, None, None].expand(-1, -1, 3, 2) + torch.arange(6.0).view(3, 2).sin(), x.cos()


def pixels():
    return [nn.Conv2d(4, 5, 2), nn.SyncBatchNorm(5, affine=False), nn.Flatten(), nn.Linear(10, 4)]


def whole_pixels():
    return [nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5, affine=False), nn.Flatten(), nn.Linear(10, 4)]


def mse(output, target):
    return F.mse_loss(output, target)


CASES = {
    "clip": (towers, clip_loss, pairs, towers, whole_clip_loss),
    "vicreg": (embedding, vicreg_loss, batch, embedding, vicreg_loss),
    "norm": (normed, mse, batch, whole_normed, mse),
    "pixels": (pixels, mse, images, whole_pixels, mse),
}


def joined(values):
    if isinstance(values[0], tuple):
        return tuple(map(torch.cat, zip(*values, strict=True)))
    return torch.cat(values)


def by_hand(make, weights, loss, data, dp, m):
    """Train plain torch modules, each microbatch of which is those of all replicas in one."""
    layers = make()
    nn.ModuleList(layers).load_state_dict(
        {name.removeprefix("layers."): one for name, one in weights.items()}, strict=False
    )
    parameters = dict(nn.ModuleList(layers).named_parameters(prefix="layers"))
    losses, first = [], {}
    for step in range(STEPS):
        losses.append(0.0)
        for one in range(m):
            values, target = map(joined, zip(*(data(step, one, replica) for replica in range(dp)), strict=True))
            for layer in layers:
                values = layer(*values) if isinstance(values, tuple) else layer(values)
            found = loss(values, target) / m
            found.backward()
            losses[-1] += found.item()
        first = first or {name: p.grad.clone() for name, p in parameters.items()}
        with torch.no_grad():
            for p in parameters.values():
                p -= lr_at(OPTIM, step, STEPS) * p.grad
                p.grad = None
    buffers = {f"layers.{name}": one for name, one in nn.ModuleList(layers).named_buffers()}
    return losses, first, {name: p.detach() for name, p in parameters.items()}, buffers


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_replicas_compute_what_one_process_does_with_the_whole_batch(name, layout):
    make, loss, data, whole, whole_loss = CASES[name]
    m = 2
    team = Team(make, loss=loss, data=data, m=m, optim=OPTIM, **layout)
    begin = {name: one.clone() for name, one in team.weights().items()}
    losses, gradients = [], {}
    for step in range(STEPS):
        results = team.step(step)
        found = [one for result in results for one in result.losses]
        losses.append(sum(found) / len(found))
        gradients = gradients or {name: one.clone() for name, one in team.gradients().items()}
    wanted_losses, wanted_gradients, weights, buffers = by_hand(whole, begin, whole_loss, data, layout["dp"], m)
    torch.testing.assert_close(losses, wanted_losses, **close)
    torch.testing.assert_close(gradients, wanted_gradients, **close)
    torch.testing.assert_close(team.weights(), weights, **close)
    for worker in team.workers:
        for stage in worker.stages.values():
            for key, buffer in stage.buffers().items():
                torch.testing.assert_close(buffer, buffers[key], **close)


@pytest.mark.parametrize("name", CASES)
def test_the_plain_process_computes_replicas_together(name):
    make, loss, data, whole, whole_loss = CASES[name]
    team = Team(make, loss=loss, data=data, dp=3, pp=1, m=2, optim=OPTIM)
    begin = {name: one.clone() for name, one in team.weights().items()}
    losses, gradients, weights, _ = by_hand(whole, begin, whole_loss, data, 3, 2)
    for plain in (train_plainly(team.run), train_plainly(team.run, [5, 4, 3, 2, 1, 0])):
        torch.testing.assert_close([*plain.losses], losses, **close)
        torch.testing.assert_close(plain.gradients, gradients, **close)
        torch.testing.assert_close(plain.weights, weights, **close)
