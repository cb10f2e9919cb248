"""Does the layout compute what one plain process computes? The same steps on both, compared tensor by tensor.

The plain process is a loop that a reader can check: torch, the model, an optimizer; no schedule, no stage, no group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.actors.batches import batch_source
from raypar.actors.lr import lr_at
from raypar.actors.models.build import build_model
from raypar.actors.models.model import as_values
from raypar.actors.optim import build_optimizer, set_lr
from raypar.actors.seeds import derive
from raypar.config import Run, check_run
from raypar.driver import Job, launch

TIED = 1e-6  # relative difference that a tied model may have


@dataclass(frozen=True)
class Difference:
    """Something that is not the same: a loss or a weight, and by how much (relative to its norm)."""

    what: str
    error: float

    def __str__(self) -> str:
        return f"{self.what} differs by {self.error:.3g} of its norm"


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found. ``differences``: losses first, then weights by logical name; none means bitwise equal.

    tolerance  the largest relative difference that is right: 0, and 1e-6 for a tied model, whose two ends add the
               gradients of their microbatches in another order than one process does
    """

    steps: int
    weights: int
    losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    tolerance: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no difference is larger than the tolerance."""
        return all(difference.error <= self.tolerance for difference in self.differences)

    @property
    def bitwise(self) -> bool:
        return not self.differences

    @property
    def worst(self) -> float:
        """The largest relative difference, 0 if bitwise equal."""
        return max((difference.error for difference in self.differences), default=0.0)

    def __str__(self) -> str:
        checked = f"{len(self.losses)} losses and {self.weights} weights after {self.steps} steps"
        if self.bitwise:
            return f"bitwise equal: {checked}"
        if self.ok:
            return f"equal within {self.tolerance:g}: {checked}; worst {self.worst:.3g}"
        return f"{len(self.differences)} differences in {checked}; first: {self.differences[0]}; worst {self.worst:.3g}"


@dataclass(frozen=True)
class Trained:
    """What a plain process ends with: the loss and gradient norm of every step, and the weights by logical name.

    ``tied``: a weight stands in more than one layer.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights: dict[str, Tensor]
    tied: bool


def verify(run: Run, job: Job | None = None) -> Verdict:
    """Train ``run.steps`` steps on the layout and in one plain process; compare every loss and every weight.

    Give a job with a mesh of the same shape to use its actors. Raises ConfigError as ``launch`` does.
    """
    check_run(run)
    plain = train_plainly(run)
    if job is not None:
        job.reset(run)
        return _compare(job, plain)
    with launch(run) as own:
        return _compare(own, plain)


def train_plainly(run: Run) -> Trained:
    """The run in this process: one model, microbatches one after the other."""
    with _threads(run.threads):
        model = build_model(run.model, run.seed)
        layers = model.materialize(range(len(model.names)), run.seed)
        parameters = _named(model.names, layers, {copy: home for home, copy in model.ties})
        optimizer = build_optimizer(run.optim, parameters)
        source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, 1, 0, run.seed)
        weight = torch.tensor(1.0 / run.microbatches)
        losses, norms = [], []
        for step in range(run.steps):
            total = 0.0
            for parameter in parameters.values():
                parameter.grad = None
            for microbatch in range(run.microbatches):
                values = source.inputs("train", step, microbatch)
                for index, layer in enumerate(layers):
                    torch.manual_seed(derive(run.seed, "layer", step, microbatch, index))
                    values = as_values(layer(*values))
                loss = model.loss(values, source.targets("train", step, microbatch))
                if loss.requires_grad:
                    loss.backward(weight.to(loss.dtype))
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), run.clip or float("inf"), foreach=False)
            if optimizer is not None:
                set_lr(optimizer, lr_at(run.optim, step, run.steps))
                optimizer.step()
            losses.append(total / run.microbatches)
            norms.append(float(norm))
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        return Trained(tuple(losses), tuple(norms), weights, bool(model.ties))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of ``wanted`` (over 1 if that is 0)."""
    norm = float(torch.linalg.vector_norm(wanted.double()))
    return float(torch.linalg.vector_norm(found.double() - wanted.double())) / (norm or 1.0)


def _compare(job: Job, plain: Trained) -> Verdict:
    reports = [job.step() for _ in range(job.run.steps)]
    pairs = [
        (
            f"{what} of step {report.step}",
            torch.tensor(found, dtype=torch.float64),
            torch.tensor(wanted, dtype=torch.float64),
        )
        for report, loss, norm in zip(reports, plain.losses, plain.grad_norms, strict=True)
        for what, found, wanted in (("loss", report.loss, loss), ("gradient norm", report.grad_norm, norm))
    ]
    pairs += [(f"weight {name}", weight, plain.weights[name]) for name, weight in job.weights()]
    differences = [
        Difference(what, relative_error(found, wanted))
        for what, found, wanted in pairs
        if not torch.equal(found, wanted)
    ]
    return Verdict(len(reports), len(plain.weights), plain.losses, tuple(differences), TIED if plain.tied else 0.0)


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
