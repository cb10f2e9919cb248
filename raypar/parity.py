"""Does the layout compute what one plain process computes? The same steps on both, compared tensor by tensor.

The plain process is a loop that a reader can check: torch, the model, an optimizer; no schedule, no stage, no group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.averaging import TokenMean, correction
from raypar.actors.batches import batch_source
from raypar.actors.lr import lr_at
from raypar.actors.models.build import build_model
from raypar.actors.models.model import as_values
from raypar.actors.optim import build_optimizer, set_lr
from raypar.actors.place import Place, place_of
from raypar.actors.seeds import derive
from raypar.config import ConfigError, Run, check_run, unrecorded
from raypar.driver import Job
from raypar.report import Report, mean_loss
from raypar.start import launch

CLOSE = 1e-6  # relative difference where the same numbers are added in another order
DRIFTED = 1e-3  # the same for weights that AdamW has updated from such gradients


class Bounds(NamedTuple):
    """The largest relative differences that are right."""

    loss: float
    gradient: float
    weight: float


BITWISE, TIED, REPLICAS = Bounds(0.0, 0.0, 0.0), Bounds(CLOSE, CLOSE, CLOSE), Bounds(CLOSE, CLOSE, DRIFTED)
DIVIDED = Bounds(1e-5, 2e-5, DRIFTED)  # products of parts of a layer, added up
ON_GPUS = Bounds(1e-5, 1e-5, 1e-2)  # kernels that add up in an order of the moment


@dataclass(frozen=True)
class Difference:
    """Something that is not the same: a loss, a norm, a gradient or a weight; and by how much, relative to its norm.

    allowed  the largest error that is right
    """

    what: str
    error: float
    allowed: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} differs by {self.error:.3g} of its norm"


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found. ``differences``: losses and norms first, then gradients and weights by logical name; none
    means bitwise equal.

    Sums of more than two numbers depend on the order of their additions. Where that order is not the one process' own,
    the right answer is not bitwise:

    - a tied model adds the gradients of its two ends once a step; every difference may be 1e-6
    - replicas add their microbatches first; losses, norms and the first step's gradients may differ by 1e-6. A weight
      may by 1e-3: AdamW divides a gradient by its own size, so that one which is only rounding noise moves its weight
      by a full step. With two microbatches in all, one a replica, there is one addition, and no difference is allowed
    - tensor and context parallelism add up parts of products, and of sums over tokens: losses may differ by 1e-5, norms
      and the first step's gradients by 2e-5, weights by 1e-3
    - on GPUs, where kernels add up in any order: 1e-5, and of a weight 1e-2

    The weights of all replicas must always be the same bits.
    """

    steps: int
    gradients: int
    weights: int
    losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    replicas: int = 1

    @property
    def ok(self) -> bool:
        """Whether no difference is larger than what is allowed for it."""
        return all(difference.error <= difference.allowed for difference in self.differences)

    @property
    def bitwise(self) -> bool:
        return not self.differences

    @property
    def worst(self) -> float:
        """The largest relative difference, 0 if bitwise equal."""
        return max((difference.error for difference in self.differences), default=0.0)

    def __str__(self) -> str:
        losses = f"{len(self.losses)} losses and gradient norms"
        weights = f"{self.weights} weights{f' on {self.replicas} replicas' if self.replicas > 1 else ''}"
        checked = f"{losses}, {self.gradients} gradients of step 0 and {weights} after {self.steps} steps"
        if self.bitwise:
            return f"bitwise equal: {checked}"
        if not self.ok:
            wrong = [difference for difference in self.differences if not difference.error <= difference.allowed]
            return f"{len(wrong)} differences in {checked}; first: {wrong[0]}; worst {self.worst:.3g}"
        kinds: dict[float, list[Difference]] = {}
        for difference in self.differences:
            kinds.setdefault(difference.allowed, []).append(difference)
        worst = [max(same, key=lambda difference: difference.error) for _, same in sorted(kinds.items())]
        bounds = ", ".join(f"{one.what} {one.error:.3g} (bound {one.allowed:g})" for one in worst)
        return f"equal within bounds: {checked}; largest differences, of the tensor's norm: {bounds}"


@dataclass(frozen=True)
class Trained:
    """What a plain process ends with: the loss and gradient norm of every step, the weights by logical name, and the
    gradients of the first step, clipped.

    ``tied``: a weight stands in more than one layer.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    tied: bool


def verify(run: Run, job: Job | None = None) -> Verdict:
    """Train ``run.steps`` steps on the layout and in one plain process; compare every loss, gradient norm and weight,
    and the gradients of the first step.

    Give a job with actors of the same number and kind to use them. Device "auto" is CPUs, whose bits are everywhere the
    same; with "cuda" the plain process uses a GPU of its own. Raises ConfigError as ``launch`` does.
    """
    run = unrecorded(run)
    run = replace(run, device="cpu") if run.device == "auto" else run
    check_run(run)
    plain = train_plainly(run)
    if job is not None:
        job.reset(run)
        return _compare(job, plain)
    with launch(run) as own:
        return _compare(own, plain)


def train_plainly(run: Run) -> Trained:
    """The run in this process: one model, the microbatches of all replicas one after the other."""
    place = _place_of(run)
    with _threads(run.threads):
        model = build_model(run.model, run.seed)
        layers = model.materialize(range(len(model.names)), run.seed)
        place.settle(layers)
        parameters = _named(model.names, layers, {copy: home for home, copy in model.ties})
        optimizer = build_optimizer(run.optim, parameters)
        m, num_dp = run.microbatches, run.mesh.dp
        source = batch_source(run.data, run.model, run.micro_batch_size, m, num_dp, run.seed)
        mean = TokenMean(model, source, m, num_dp)
        losses, norms, gradients = [], [], dict[str, Tensor | None]()
        for step in range(run.steps):
            parts, counts = list[float](), list[int]()
            for parameter in parameters.values():
                parameter.grad = None
            for number in range(m * num_dp):
                microbatch, dp = divmod(number, num_dp)
                values = place.to(source.inputs("train", step, microbatch, dp))
                target = place.to(source.targets("train", step, microbatch, dp))
                for index, layer in enumerate(layers):
                    torch.manual_seed(derive(run.seed, "layer", step, number, index))
                    values = as_values(layer(*values))
                loss, count = model.loss(values, target), model.count(target)
                if loss.requires_grad:
                    loss.backward(mean.weight(count).to(loss))
                parts.append(loss.item())
                counts.append(count)
            _scale(parameters, correction(sum(counts), num_dp * mean.expected))
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), run.clip or float("inf"), foreach=False)
            if optimizer is not None:
                set_lr(optimizer, lr_at(run.optim, step, run.steps))
                optimizer.step()
            losses.append(mean_loss(parts, counts))
            norms.append(float(norm))
            gradients = gradients or {n: None if p.grad is None else p.grad.cpu() for n, p in parameters.items()}
        weights = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
        return Trained(tuple(losses), tuple(norms), gradients, weights, bool(model.ties))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of ``wanted`` (over 1 if that is 0)."""
    norm = float(torch.linalg.vector_norm(wanted.double()))
    return float(torch.linalg.vector_norm(found.double() - wanted.double())) / (norm or 1.0)


def _compare(job: Job, plain: Trained) -> Verdict:
    run = job.run
    bounds = _allowed(run, plain.tied)
    reports, gradients = list[Report](), dict[str, Tensor | None]()
    for _ in range(run.steps):
        reports.append(job.step())
        gradients = gradients or {name: job.grad(name) for name in plain.gradients}
    figures: list[tuple[str, Tensor, Tensor, float]] = []
    for r, loss, norm in zip(reports, plain.losses, plain.grad_norms, strict=True):
        figures.append((f"loss of step {r.step}", _exact(r.loss), _exact(loss), bounds.loss))
        figures.append((f"gradient norm of step {r.step}", _exact(r.grad_norm), _exact(norm), bounds.gradient))
    figures += [
        (f"gradient {name} of step 0", _dense(gradients[name]), _dense(wanted), bounds.gradient)
        for name, wanted in plain.gradients.items()
    ]
    weights = [(f"weight {name}", weight, plain.weights[name], bounds.weight) for name, weight in job.weights()]
    replicas = [
        (f"weight {name} of dp={dp}, beside dp=0,", other, weight, 0.0)
        for dp in range(1, run.mesh.dp)
        for (name, other), (_, weight, *_) in zip(job.weights(dp), weights, strict=True)
    ]
    differences = [
        Difference(what, relative_error(ours, theirs), allowed)
        for what, ours, theirs, allowed in (*figures, *weights, *replicas)
        if not torch.equal(ours, theirs)
    ]
    return Verdict(
        len(reports), len(plain.gradients), len(plain.weights), plain.losses, tuple(differences), run.mesh.dp
    )


def _allowed(run: Run, tied: bool) -> Bounds:
    if run.device == "cuda":
        return Bounds(*map(max, DIVIDED, ON_GPUS)) if run.mesh.tp * run.mesh.cp > 1 else ON_GPUS
    if run.mesh.tp * run.mesh.cp > 1:
        return DIVIDED
    if run.mesh.dp == 1 or run.microbatches * run.mesh.dp == 2:
        return TIED if tied else BITWISE
    return REPLICAS


def _place_of(run: Run) -> Place:
    try:
        return place_of("cuda" if run.device == "cuda" else "cpu")
    except RuntimeError as error:
        raise ConfigError([f"device is 'cuda', and the plain process has no GPU ({error}): verify on 'cpu'"]) from error


def _exact(figure: float) -> Tensor:
    return torch.tensor(figure, dtype=torch.float64)


def _dense(gradient: Tensor | None) -> Tensor:
    """A gradient that nobody made as an empty tensor, which is equal to itself only."""
    return torch.empty(0) if gradient is None else gradient


def _scale(parameters: dict[str, nn.Parameter], factor: float) -> None:
    """Multiply the gradients, if there is need to."""
    for parameter in parameters.values():
        if factor != 1.0 and parameter.grad is not None:
            parameter.grad.mul_(factor)


def _named(names: tuple[str, ...], layers: list[nn.Module], home_of: dict[str, str]) -> dict[str, nn.Parameter]:
    """The trainable parameters by logical name, with tied ones made one."""
    parameters: dict[str, nn.Parameter] = {}
    for layer_name, layer in zip(names, layers, strict=True):
        for inner, parameter in list(layer.named_parameters()):
            name = f"{layer_name}.{inner}"
            if name in home_of:
                owner, _, last = inner.rpartition(".")
                layer.get_submodule(owner)._parameters[last] = parameters[home_of[name]]
            elif parameter.requires_grad:
                parameters[name] = parameter
    return parameters


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(before)
