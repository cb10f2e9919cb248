"""A training loop in float64: every microbatch of every replica in one process, each target counted once.

It takes plain tensors and numbers, and imports nothing of raypar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle import experts
from tests.oracle.optimizers import Average, Named, Optimizer, clipped, global_norm
from tests.oracle.transformer import compute

IGNORED = -100


class Microbatch(NamedTuple):
    """What one microbatch of one replica has.

    Attributes:
        inputs: Token ids, (B, S), or what an own model takes.
        targets: Labels, (B, S); those of -100 do not count.
        starts: By token the position at which its document begins; None if a sequence is one document.
        lengths: By sequence, how many tokens are not padding; None if all are.
    """

    inputs: Tensor
    targets: Tensor
    starts: Tensor | None = None
    lengths: list[int] | None = None


class Loss(NamedTuple):
    """What a model says of one microbatch.

    Attributes:
        total: The sum of the losses of what counts.
        count: How much counts.
        auxiliary: The sum of auxiliary losses, with their coefficients.
        loads: By layer, how many choices fell on each expert.
        margin: The smallest difference of two scores by which an expert was chosen.
    """

    total: Tensor
    count: int
    auxiliary: Tensor
    loads: Mapping[str, list[int]]
    margin: float = math.inf


@dataclass
class Trained:
    """What a training gives.

    Attributes:
        losses: By step, the mean over all that counts in it.
        auxiliary: By step, the mean over microbatches of their auxiliary losses.
        norms: By step, the global norm of the gradients before clipping.
        gradients: Those of the last step, as the optimizer gets them.
        weights: The weights at the end.
        averages: Their moving averages, if there are any.
        margin: The smallest difference of two scores by which an expert was chosen.
    """

    losses: list[float] = field(default_factory=list)
    auxiliary: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    weights: Named = field(default_factory=dict)
    averages: Named = field(default_factory=dict)
    margin: float = math.inf


Model = Callable[[Named, Microbatch], Loss]
Version = Callable[[str, int], int]  # of a weight by name, in a step: after how many updates the forward takes it


def of_transformer(model: dict[str, Any], biases: dict[str, list[float]] | None = None) -> Model:
    """Return the loss of a GPT or Llama: the mean cross-entropy of its labels."""

    def loss(weights: Named, batch: Microbatch) -> Loss:
        out = compute(weights, model, batch.inputs, batch.starts, biases, batch.lengths)
        return Loss(*cross_entropy(out.logits, batch.targets), out.auxiliary, out.loads, out.margin)

    return loss


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of -log softmax(logits)[label] over the labels that count, and their number."""
    kept = labels != IGNORED
    logits, labels = logits[kept], labels[kept]
    chosen = logits[torch.arange(len(labels)), labels]
    return (torch.logsumexp(logits, -1) - chosen).sum(), len(labels)


def train(
    weights: Mapping[str, Tensor],
    model: Model,
    steps: Iterable[Sequence[Microbatch]],
    optim: Mapping[str, Any],
    *,
    num_steps: int,
    clip: float | None = None,
    ema: float | None = None,
    frozen: Iterable[str] = (),
    biases: tuple[dict[str, list[float]], float] | None = None,
    version: Version | None = None,
    delay_feedback: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """Train a model.

    Args:
        weights: The initial weights by name, of any floating dtype.
        model: The loss of a microbatch.
        steps: Of every step, its microbatches, those of all replicas.
        optim: Fields of the optimizer.
        num_steps: Steps of the whole run, by which the learning rate goes.
        clip: Largest norm of the gradients; None for no limit.
        ema: Decay of the moving average of the weights; None for none.
        frozen: Names of weights that do not learn.
        biases: The biases of experts by block, which are changed after every step, and by how much.
        version: With stale weights, which ones a forward takes; None: the newest.
        delay_feedback: Whether a gradient at stale weights is extended by its change, 2 u(t) - u(t-1).
        dtype: In which all is computed: float64 for what is right, float32 for how far rounding leads from that.
    """
    now = {name: weight.detach().to(dtype, copy=True) for name, weight in weights.items()}
    learns = [name for name in now if name not in set(frozen)]
    optimizer, average = Optimizer(optim, num_steps), None if ema is None else Average(ema)
    history: list[Named] = []
    trained, before = Trained(), dict[str, Tensor]()
    for step, batches in enumerate(steps):
        if version is not None:
            history.append({name: weight.clone() for name, weight in now.items()})
        seen = {
            name: (now[name] if version is None else history[version(name, step)][name])
            .clone()
            .requires_grad_(name in learns)
            for name in now
        }
        losses = [model(seen, batch) for batch in batches]
        trained.margin = min(trained.margin, *(loss.margin for loss in losses))
        count = sum(loss.count for loss in losses)
        total, auxiliary = sum(loss.total for loss in losses), sum(loss.auxiliary for loss in losses) / len(losses)
        trained.losses.append(float(total.detach()) / count if count else math.nan)
        trained.auxiliary.append(float(auxiliary.detach()))
        objective = (total / count if count else 0.0) + auxiliary
        made = torch.autograd.grad(objective, [seen[name] for name in learns], allow_unused=True)
        made = [
            torch.zeros_like(seen[name]) if one is None and ".experts." in name else one  # its gates are 0
            for name, one in zip(learns, made, strict=True)
        ]
        gradients = {name: one for name, one in zip(learns, made, strict=True) if one is not None}
        trained.norms.append(global_norm(gradients))
        used = gradients
        if delay_feedback and version is not None and step > 0:
            used = {n: 2 * g - before[n] if version(n, step) < step else g for n, g in gradients.items()}
        before = gradients
        trained.gradients = clipped(used, trained.norms[-1], clip)
        optimizer.update(now, trained.gradients, step)
        if average is not None:
            average.update({name: now[name] for name in learns})
        if biases is not None:
            table, rate = biases
            for name in table:
                load = [sum(one) for one in zip(*(loss.loads[name] for loss in losses), strict=True)]
                table[name] = experts.moved_bias(table[name], load, rate)
    trained.weights = now
    trained.averages = {} if average is None else average.weights
    return trained
