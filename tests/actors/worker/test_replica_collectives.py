"""Layers and losses that exchange values with other replicas, against plain torch on the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raypar as rp
from raypar.actors.collective.replicas import CALL_BYTES
from raypar.actors.errors import ActionError
from raypar.actors.optim.lr import lr_at
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD
from raypar.parity.reference import train_plainly
from tests.support.team import Team, batch

STEPS, ROWS = 3, 3
OPTIM = SGD(lr=0.1, momentum=0.0)
LAYOUTS = {
    "dp2": {"pp": 1, "dp": 2},
    "pipeline": {"pp": 2, "dp": 2, "zero": 2},
    "dp3": {"pp": 1, "dp": 3, "zero": 3},
}
OTHERS = {
    "zero1": ("vicreg", {"pp": 1, "dp": 2, "zero": 1}),
    "recompute": ("norm", {"pp": 2, "dp": 2, "recompute": "full"}),
    "split": ("clip", {"pp": 2, "dp": 2, "schedule": "zb-h1"}),
}
close = {"rtol": 1e-6, "atol": 1e-6}


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


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(name, layout, id=f"{name}-{key}") for name in CASES for key, layout in LAYOUTS.items()]
    + [pytest.param(*other, id=key) for key, other in OTHERS.items()],
)
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


def one_layer(forward):
    """A layer of a linear map and then ``forward``."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return forward(self.linear(x))

    return lambda: [nn.Tanh(), Layer()]


def errors_of(forward, **fields):
    """The errors of both replicas in a step of a layer with this forward."""
    team = Team(one_layer(forward), pp=1, dp=2, m=1, **fields)
    return team.each(lambda actor: actor.train(0))


def one_sided(x):
    x = rp.replicas.all_reduce(x, "mean")
    return x if rp.replicas.index else rp.replicas.all_reduce(x)


def other_order(x):
    first, second = (rp.replicas.all_reduce, rp.replicas.all_gather)[:: 1 if rp.replicas.index else -1]
    return x + first(x).sum() + second(x).sum()


def other_shape(x):
    return x + rp.replicas.all_gather(x[rp.replicas.index :]).sum()


def other_backward(x):
    every = rp.replicas.all_gather(x)
    return x + (every if rp.replicas.index else every.detach()).sum() + rp.replicas.all_reduce(x.sin())


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (
            other_order,
            "calls rp.replicas.all_gather in layers.1 of (3, 4) float32, and replica 1 rp.replicas.all_reduce",
        ),
        (
            other_shape,
            "calls rp.replicas.all_gather in layers.1 of (3, 4) float32, and replica 1 rp.replicas.all_gather",
        ),
    ],
)
def test_replicas_that_make_other_calls_say_which(forward, says):
    for rank, error in enumerate(errors_of(forward)):
        assert isinstance(error, ActionError)
        assert error.actor == f"pp=0 dp={rank}" and "layers.1" in str(error)
    assert says in str(errors_of(forward)[0])


@pytest.mark.parametrize("forward", [one_sided, other_backward])
def test_a_call_of_one_replica_ends_within_the_deadline_and_names_the_layer(forward):
    for error in errors_of(forward, timeout=1.0):
        assert isinstance(error, ActionError)
        assert "rp.replicas.all_" in str(error) and " in layers.1" in str(error)


def test_an_error_of_one_replica_is_the_cause_of_the_others():
    def forward(x):
        if rp.replicas.index:
            raise ValueError("here")
        return rp.replicas.all_reduce(x)

    errors = errors_of(forward)
    assert [error.secondary for error in errors] == [True, False]


def test_the_ledger_counts_the_bytes_of_a_ring():
    dp = 3
    teams = [
        Team(one_layer(forward), pp=1, dp=dp, m=1)
        for forward in (lambda x: x, lambda x: x + rp.replicas.all_gather(x).mean(0))
    ]
    for team in teams:
        team.step()
    part, text = ROWS * 4 * 4, CALL_BYTES
    for without, having in zip(*(team.ledger("dp") for team in teams), strict=True):
        sent = {op: having[op][1] - without.get(op, (0, 0))[1] for op in having}
        # there the rows and back their gradients, each after the text of the call
        assert sent.pop("all_gather") == (dp - 1) * (part + 2 * text)
        assert sent.pop("reduce_scatter") == (dp - 1) * part
        assert not any(sent.values())


def test_an_evaluation_exchanges_values_too():
    team = Team(towers, loss=clip_loss, data=pairs, pp=1, dp=2, m=1)
    results = team.step(program="evaluate")
    weights = {name: one.clone() for name, one in team.weights().items()}
    losses, *_ = by_hand(towers, weights, whole_clip_loss, pairs, 2, 1)
    torch.testing.assert_close(sum(one for result in results for one in result.losses) / 2, losses[0], **close)


def test_with_one_replica_and_outside_of_a_run_nothing_is_exchanged():
    x = torch.randn(2, 3)
    assert (rp.replicas.index, rp.replicas.count) == (0, 1)
    assert rp.replicas.all_gather(x) is x and rp.replicas.all_reduce(x, "max") is x
    with pytest.raises(ValueError, match="one dimension or more"):
        rp.replicas.all_gather(x.sum())
    with pytest.raises(ValueError, match="no op 'min'"):
        rp.replicas.all_reduce(x, "min")
    seen = []

    def forward(x):
        seen.append((rp.replicas.index, rp.replicas.count))
        return rp.replicas.all_gather(x)

    Team(one_layer(forward), pp=1, m=1).step()
    assert set(seen) == {(0, 1)}


def test_the_largest_value_gets_the_gradient():
    def forward(x):
        return rp.replicas.all_reduce(x, "max")

    def whole(x):
        return torch.stack(x.chunk(2)).amax(0).repeat(2, 1)

    team = Team(one_layer(forward), pp=1, dp=2, m=1, optim=OPTIM)
    begin = {name: one.clone() for name, one in team.weights().items()}
    for step in range(STEPS):
        team.step(step)
    *_, weights, _ = by_hand(one_layer(whole), begin, mse, batch, 2, 1)
    torch.testing.assert_close(team.weights(), weights, **close)


class Halves(nn.Module):
    """Two linear layers, which a plan divides over tensor ranks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        return y - rp.replicas.all_reduce(y.mean(0), "mean")


def test_tensor_ranks_exchange_values_with_those_of_other_replicas():
    plan = {"layers.*.up": "column", "layers.*.down": "row"}

    def halves():
        return [Halves(), nn.SyncBatchNorm(4)]

    def whole():
        return [Halves(), nn.BatchNorm1d(4)]

    model = Layers(halves, mse, plan=plan)
    team = Team(halves, model=model, pp=1, dp=2, tp=2, m=2, optim=OPTIM)
    begin = {name: one.clone() for name, one in team.weights().items()}
    for step in range(STEPS):
        team.step(step)
    *_, weights, _ = by_hand(whole, begin, mse, batch, 2, 2)
    torch.testing.assert_close(team.weights(), weights, **close)


def test_tensors_of_integers_and_without_a_gradient_are_gathered():
    seen = []

    def forward(x):
        labels = torch.arange(2) + 10 * rp.replicas.index
        seen.append((rp.replicas.all_gather(labels).tolist(), rp.replicas.all_gather(labels > 5).tolist()))
        return x + rp.replicas.all_reduce(labels).sum()

    Team(one_layer(forward), pp=1, dp=2, m=1).step()
    assert seen == [([0, 1, 10, 11], [False, False, True, True])] * 2
