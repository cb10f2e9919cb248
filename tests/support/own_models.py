"""Small models as users write them, drawn at random, each with data, an optimizer and a layout."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.parity.verify import verify
from tests.support.thread_jobs import TeamJob


class Residual(nn.Module):
    """What its module makes of x is added to it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return x + self.module(x)


class Recurrent(nn.Module):
    """A recurrent network, of which the outputs go on."""

    def __init__(self, kind, width):
        super().__init__()
        self.cell = kind(width, width, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    """Attention with residual."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y, y, need_weights=False)[0]


class Pooled(nn.Module):
    """The mean over all places."""

    def forward(self, x):
        return x.mean((2, 3)) if x.dim() == 4 else x.mean(1)


class Both(nn.Module):
    """A layer between two tensors: each goes on."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, y=None):
        y = x if y is None else y
        return torch.tanh(self.left(x)) + y, self.right(y)


class Joined(nn.Module):
    """The sum of two tensors."""

    def forward(self, x, y):
        return x + y


def linears(draw, width, outputs, dropout):
    """A multilayer perceptron of some form."""
    act = draw.choice((nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid))
    norm = draw.choice((None, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm))
    modules = []
    for _ in range(draw.randint(1, 4)):
        inner = [nn.Linear(width, width, bias=draw.random() < 0.8), act()]
        inner += [norm(width)] if norm else []
        inner += [nn.Dropout(0.2)] if dropout else []
        modules.append(Residual(nn.Sequential(*inner)) if draw.random() < 0.3 else nn.Sequential(*inner))
    if draw.random() < 0.2:
        modules += [Both(width), Both(width), Joined()]
    if draw.random() < 0.1:
        modules.append(modules[0])
    return [*modules, nn.Linear(width, outputs)]


def images(draw, width, outputs, dropout):
    """A convolutional network."""
    norm = draw.choice((None, nn.BatchNorm2d, partial(nn.GroupNorm, 2)))
    modules = []
    channels = 1
    for _ in range(draw.randint(1, 3)):
        inner = [nn.Conv2d(channels, width, 3, padding=1, bias=draw.random() < 0.8)]
        inner += [norm(width)] if norm else []
        inner.append(nn.ReLU())
        inner += [nn.Dropout2d(0.2)] if dropout else []
        inner += [nn.MaxPool2d(2)] if draw.random() < 0.3 else []
        modules.append(nn.Sequential(*inner))
        channels = width
    return [*modules, nn.Sequential(Pooled(), nn.Linear(width, outputs))]


def sequences(draw, width, outputs, dropout):
    """Recurrent networks or attention over sequences."""
    kinds = (partial(Recurrent, nn.GRU), partial(Recurrent, nn.LSTM), partial(Recurrent, nn.RNN), Attention)
    modules = [draw.choice(kinds)(width) for _ in range(draw.randint(1, 3))]
    modules += [nn.Dropout(0.1)] if dropout else []
    return [*modules, Pooled(), nn.Linear(width, outputs)]


def pairs(draw, width, outputs, dropout):
    """Pairs of linear layers, between which tensor parallelism divides."""
    modules = [
        Residual(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))
        for _ in range(draw.randint(1, 3))
    ]
    return [*modules, nn.LayerNorm(width), nn.Linear(width, outputs)]


PLAN = {"layers.*.module.0": "column", "layers.*.module.2": "row"}

FAMILIES = {
    "pairs": (pairs, lambda rows, width: (rows, width)),
    "linears": (linears, lambda rows, width: (rows, width)),
    "images": (images, lambda rows, width: (rows, 1, 8, 8)),
    "sequences": (sequences, lambda rows, width: (rows, 5, width)),
}


def ranked(output, target):
    """A loss that may be of either sign: how much larger one output is than another."""
    return (output[:, 0] * target - 0.1 * output.pow(2).mean(1)).mean()


LOSSES = {
    "classes": nn.functional.cross_entropy,
    "some classes": nn.functional.cross_entropy,
    "numbers": nn.functional.mse_loss,
    "far numbers": nn.functional.smooth_l1_loss,
    "yes or no": nn.functional.binary_cross_entropy_with_logits,
    "signed": ranked,
}


def batch(shape, outputs, loss, seed, step, microbatch, dp):
    """Inputs and targets, those of classes in unequal counts."""
    generator = torch.Generator().manual_seed(seed + 1000 * step + 10 * microbatch + dp)
    x = torch.randn(shape, generator=generator)
    rows = shape[0]
    if loss in ("classes", "some classes"):
        y = torch.randint(outputs, (rows,), generator=generator)
        if loss == "some classes":
            y[: int(torch.randint(rows, (1,), generator=generator))] = -100
        return x, y
    y = torch.randn(rows, *(() if loss == "signed" else (outputs,)), generator=generator)
    if loss == "yes or no":
        y = (y > 0).float()
    return x, y + 30 if loss == "far numbers" else y


OPTIMIZERS = rp.SGD(lr=0.1), rp.SGD(lr=0.03, momentum=0.0), rp.AdamW(lr=1e-2), rp.Muon(lr=1e-2, adamw=())


def run_of(draw, *, dropout=True, shares_draws=True):
    """Return a random run of an own model that can be launched.

    If actors share draws, as threads do, there is dropout on one actor only.
    """
    while True:
        family = draw.choice(sorted(FAMILIES))
        make, shape_of = FAMILIES[family]
        width, loss, rows = draw.choice((4, 6, 8, 16)), draw.choice(sorted(LOSSES)), draw.randint(2, 7)
        outputs = draw.choice((1, 2, 3, 5)) if "class" not in loss else draw.choice((2, 3, 10))
        pp, dp = draw.choice((1, 1, 2, 2, 3)), draw.choice((1, 2, 2, 3))
        has_dropout, made = dropout and (pp * dp == 1 or not shares_draws) and draw.random() < 0.5, draw.getrandbits(30)

        def layers(make=make, width=width, outputs=outputs, has_dropout=has_dropout, made=made):
            return make(type(draw)(made), width, outputs, has_dropout)

        data = partial(batch, shape_of(rows, width), outputs, loss, draw.getrandbits(20))
        optim = draw.choice(
            (rp.SGD(lr=0.1), rp.SGD(lr=0.03, momentum=0.0), rp.AdamW(lr=1e-2), rp.Muon(lr=1e-2, adamw=()))
        )
        run = rp.Run(
            model=rp.Layers(layers, LOSSES[loss], plan=PLAN if family == "pairs" else {}),
            mesh=rp.Mesh(pp=pp, dp=dp, tp=draw.choice((1, 2, 2)) if family == "pairs" and not has_dropout else 1),
            schedule=draw.choice(("1f1b", "gpipe", "zb-h1", "1f1b")) if pp > 1 else "1f1b",
            microbatches=draw.randint(1, 5),
            zero=draw.choice((0, 0, 0, 1, 2, 3)),
            recompute=draw.choice(("none", "none", "full")),
            data=rp.Batches(data),
            optim=optim,
            clip=draw.choice((None, 1.0, 0.1)),
            steps=draw.randint(1, 3),
            seed=draw.getrandbits(16),
            timeout=20.0,
        )
        if not rp.faults(run):
            return run


def wrongly_judged(run, _):
    """Why verify is wrong of a right run, None if it is not, and what the run is an example of."""
    job = TeamJob(run)
    try:
        verdict = verify(run, job)
    finally:
        job.close()
    beside = any(one.beside for one in verdict.differences)
    kind = "bitwise" if verdict.bitwise else "beside float64" if beside else "within bounds"
    return None if verdict.ok else str(verdict), [kind, *_kinds(run)]


def _kinds(run):
    return [f"pp={run.mesh.pp}", f"dp={run.mesh.dp}", f"tp={run.mesh.tp}", f"zero={run.zero}", run.optim.kind]


class Faulty(TeamJob):
    """A job with one gradient that is wrong, by ``size`` of its norm."""

    def __init__(self, run, name, size, how, seed):
        self._fault = name, size, how, seed
        super().__init__(run)

    def gradients(self):
        """The gradients, one of them wrong."""
        found = dict(self._inspection.gradients())
        name, size, how, seed = self._fault
        right = found[name]
        if how == "factor":
            found[name] = right.double().mul(1 + size).float()
            return found
        away = torch.randn(right.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if how == "element":
            away = torch.zeros_like(away)
            away.view(-1)[seed % away.numel()] = 1.0
        found[name] = (right + away * (size * right.double().norm() / away.norm())).float()
        return found


def gradients_in(run, dtype, order):
    """The gradients of step 1 in one process, clipped, in plain torch; by name."""
    built = build_model(run.model, run.seed)
    modules = built.materialize(range(len(built.names)), run.seed)
    for module in modules:
        module.to(dtype).train()
    numbers = [(mb, dp) for mb in range(run.microbatches) for dp in range(run.mesh.dp)]
    batches = [run.data.fn(0, mb, dp) for mb, dp in numbers]
    counts = [int((y != -100).sum()) if not y.is_floating_point() else y.numel() for _, y in batches]
    for at in order(range(len(numbers))):
        x, y = (one.to(dtype) if one.is_floating_point() else one for one in batches[at])
        values = (x,)
        for module in modules:
            made = module(*values)
            values = made if isinstance(made, tuple) else (made,)
        if counts[at]:
            (run.model.loss(*values, y) * (counts[at] / sum(counts))).backward()
    names = {
        id(p): f"layers.{n}.{inner}" for n, m in reversed([*enumerate(modules)]) for inner, p in m.named_parameters()
    }
    weights = {names[id(p)]: p for module in modules for p in module.parameters()}
    if run.clip is not None:
        torch.nn.utils.clip_grad_norm_(weights.values(), run.clip)
    return {name: p.grad.double() for name, p in weights.items() if p.grad is not None}


def fault_missed(run, draw):
    """Why verify is wrong of a run with one gradient that is off, None if it is not, and of what kind it is.

    It is off by 1e-5 of its norm, or 10 times as far as float32 is from float64, if that is more.
    """
    right = gradients_in(run, torch.float64, list)
    plain = [gradients_in(run, torch.float32, order) for order in (list, lambda all: [*all][::-1])]
    rounded = {
        name: max(float((one[name] - exact).norm()) for one in plain) / float(exact.norm())
        for name, exact in right.items()
        if exact.norm() > 0
    }
    names = [name for name, size in rounded.items() if size < 1e-2]
    name, how = draw.choice(names), draw.choice(("factor", "direction", "element"))
    size = max(1e-5, 10 * rounded[name]) * 1.001
    job = Faulty(run, name, size, how, draw.getrandbits(20))
    try:
        verdict = verify(run, job)
    finally:
        job.close()
    wrong = [one.what for one in verdict.differences if not one.ok]
    missed = f"gradient {name} of step 1" not in wrong
    return f"{name} is off by {size:.3g} ({how}), found are {wrong}: {verdict}" if missed else None, [how, *_kinds(run)]
