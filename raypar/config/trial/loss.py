"""Try whether the user's loss is a mean over as many elements as microbatches are weighted by. Imports torch.

Only the loss is called, with outputs that are drawn. If it is a mean over elements, its value for two microbatches that
are joined is the mean of its two values, weighted by their elements. So these weights show how many elements it counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.data.batches import batch_source
from raypar.actors.errors import first_line
from raypar.actors.models.base import Model
from raypar.actors.models.own.user_layers import user_metric
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.skip_connections import Skipped
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.tensors import Values, as_values
from raypar.config.trial.calls import may_call, tried_as, unnoticed

log = logging.getLogger(__name__)

Range = Callable[[Tensor], Tensor]

_MICROBATCHES = 4  # that are looked at
_MOST_DRAWN = 1 << 24  # elements of the outputs of two microbatches
_DRAWS = 3
_APART = 0.01  # relative difference of two losses from which on the weights of their mean are looked at
_SUM = 1e-4  # relative difference up to which a loss is the sum of two others, in fp32
_NEAR = 5e-3  # weights that differ by less are the same, in fp32
_MEANT = "fn(target) returns of how many elements the loss is the mean, as an int"
_FIX = f"give rp.Layers(count=fn), where {_MEANT}"
_MEAN = "return a mean, or give rp.Layers(count=lambda target: 1), with which every microbatch weighs the same"
_OTHER_COUNT = "correct rp.Layers(count=fn): " + _MEANT


class _Batch(NamedTuple):
    """What the loss of a microbatch is made of.

    Attributes:
        outputs: The outputs of the last layer, without memory.
        target: The targets.
        counted: How many elements of the targets are counted.
    """

    outputs: Values
    target: Values
    counted: int


class _UnfitError(Exception):
    """The loss can't be looked at; the message says why."""


def warn_of_loss(run: Run, skeleton: Skeleton) -> None:
    """Log a warning if microbatches would be weighted by other numbers than those of the elements in their losses.

    What can't be tried is said on the level of information.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, which stays as it is.
    """
    if not isinstance(run.model, Layers) or not may_call(run, skeleton):
        return
    with unnoticed(), torch.no_grad(), tried_as(run) as replicas:
        torch.manual_seed(0)
        try:
            model = skeleton.copy().model
            batches = list(islice(_batches(run, model), _MICROBATCHES))
            disagreeing = _disagreeing(model, run.model, batches)
            replicas.latest = ""  # of the layers
            found = disagreeing or _misweighted(model, batches, own=run.model.count is not None)
            if replicas.latest:
                raise _UnfitError("it exchanges values with other replicas")
        except Exception as error:  # layers, loss and data are the user's; their faults are found elsewhere
            log.info("of how many elements model.loss is the mean was not tried: %s", first_line(error))
        else:
            if found is not None:
                log.warning("%s", found)


def count_faults(run: Run, skeleton: Skeleton) -> list[str]:
    """Return why the user's function does not count the targets of the first batch.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, which stays as it is.
    """
    if not isinstance(run.model, Layers) or run.model.count is None or not may_call(run, skeleton):
        return []
    source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
    with unnoticed():
        try:
            target = source.targets("train", 0, 0, 0)
        except Exception:  # its files may be where only the actors are
            return []
        try:
            skeleton.model.count(target)
        except Exception as error:  # the user's function may raise anything
            what = "the target" if len(target) == 1 else f"a tuple of {len(target)} targets"
            return [f"model.count fails with {what} of the first batch: {first_line(error)}: {_MEANT}"]
    return []


def metric_faults(run: Run, skeleton: Skeleton) -> list[str]:
    """Return why the user's metrics can't be computed, with outputs that are drawn and the targets of the first batch.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, which stays as it is.
    """
    if not isinstance(run.model, Layers) or not run.model.metrics or not may_call(run, skeleton):
        return []
    model, faults = skeleton.copy().model, list[str]()
    with unnoticed(), torch.no_grad(), tried_as(run):
        try:
            batch = next(_batches(run, model))
            output = _drawn(batch, 1.0, _range_of(model, batch))
        except Exception:  # layers, loss and data are the user's; their faults are found elsewhere
            return []
        for name, metric in run.model.metrics.items():
            try:
                user_metric(name, metric, output, batch.target, model.count)
            except Exception as error:  # the user's function may raise anything
                faults.append(
                    f"model.metrics: {name!r} fails with outputs and targets like those of the first batch: "
                    f"{first_line(error)}: return a mean over what the loss counts, or (sum, count)"
                )
    return faults


def _batches(run: Run, model: Model) -> Iterator[_Batch]:
    """Yield the first microbatches of a run, of all replicas."""
    source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
    known: dict[tuple[torch.Size, ...], Values] = {}
    for place in product(range(run.steps), range(run.microbatches), range(run.mesh.dp)):
        inputs, target = source.inputs("train", *place), source.targets("train", *place)
        shapes = tuple(value.shape for value in inputs)
        if shapes not in known:
            known[shapes] = outputs_of(model, inputs)
        yield _Batch(known[shapes], target, model.count(target))


def outputs_of(model: Model, inputs: Values) -> Values:
    """Return the outputs of the last layer, without memory.

    Args:
        model: The model.
        inputs: The inputs of a microbatch.
    """
    values, skipped = tuple(value.to("meta") for value in inputs), Skipped(model.skips, model.names)
    for index, layer in enumerate(model.skeleton):
        values = as_values(layer(*skipped.inputs(index, values)))
        skipped.keep(index, values)
    if not all(value.is_meta and value.is_floating_point() for value in values):
        raise _UnfitError("the last layer makes something else than floating numbers")
    return values


def _disagreeing(model: Model, layers: Layers, batches: Sequence[_Batch]) -> str | None:
    """Say that several targets do not count in proportion, so that the first can't stand for all of them."""
    if layers.count is not None:
        return None
    counts = [[model.count((target,)) for target in batch.target] for batch in batches]
    for one, other in combinations(counts, 2):
        if any(one[0] * theirs != other[0] * ours for ours, theirs in zip(one[1:], other[1:], strict=False)):
            return (
                f"of several targets {_listed(one)} elements count in one microbatch, and {_listed(other)} in another, "
                f"and microbatches are weighted by those of the first target alone: {_FIX}"
            )
    return None


def _misweighted(model: Model, batches: Sequence[_Batch], *, own: bool) -> str | None:
    """Say that a microbatch weighs something else in the loss than by the elements that are counted.

    Args:
        model: The model.
        batches: The first microbatches.
        own: Whether a function of the user's own counts them.
    """
    by, fix = ("its count", _OTHER_COUNT) if own else ("the elements of its targets", _FIX)
    for batch in batches:
        if batch.counted:
            continue
        loss = _loss(model, _drawn(batch, 1.0, _range_of(model, batch)), batch.target)
        if loss and math.isfinite(loss):
            return f"no target of a microbatch counts, so its loss, as {loss:.4g}, counts for nothing: {fix}"
    counting = [batch for batch in batches if batch.counted]
    for other in counting[1:]:
        first = counting[0]
        (found, is_sum), counted = _share(model, first, other), first.counted / (first.counted + other.counted)
        if is_sum and first.counted != other.counted:
            return (
                "model.loss of two microbatches in one is the sum of theirs, and a step is the mean of what they "
                f"return, weighted by {by}, {first.counted:,} and {other.counted:,}: {_MEAN}"
            )
        if found is not None and abs(found - counted) > _NEAR:
            return (
                f"model.loss of two microbatches in one weighs the first {found:.3f}, and a step weighs it "
                f"{counted:.3f}, by {by}, {first.counted:,} and {other.counted:,}: {fix}"
            )
    return None


def _share(model: Model, one: _Batch, other: _Batch) -> tuple[float | None, bool]:
    """Return the weight of the first of two microbatches in the loss of both, and whether that is the sum of theirs.

    The weight is None if it is no mean of theirs.
    """
    if sum(value.numel() for value in (*one.outputs, *other.outputs)) > _MOST_DRAWN:
        raise _UnfitError("the outputs of a microbatch are too large")
    target, shares, sums = _joined(one.target, other.target), list[float](), list[bool]()
    within = _range_of(model, one)
    for _ in range(_DRAWS):
        ours, theirs = _drawn(one, 1.0, within), _drawn(other, 4.0, within)
        first, second = _loss(model, ours, one.target), _loss(model, theirs, other.target)
        both = _loss(model, _joined(ours, theirs), target)
        if not abs(first - second) > _APART * max(abs(first), abs(second)):
            raise _UnfitError("two microbatches have nearly the same loss, or one that is not finite")
        shares.append((both - second) / (first - second))
        sums.append(math.isclose(both, first + second, rel_tol=_SUM))
    is_mean = max(shares) - min(shares) < _NEAR and min(shares) > -_NEAR and max(shares) < 1 + _NEAR
    return sum(shares) / len(shares) if is_mean else None, all(sums)


def _loss(model: Model, outputs: Values, target: Values) -> float:
    return model.loss(outputs, target).item()


def _range_of(model: Model, batch: _Batch) -> Range:
    """Return of which outputs the loss can be computed: of any numbers, or of those between 0 and 1."""
    try:
        fits = math.isfinite(_loss(model, _drawn(batch, 4.0, _any), batch.target))
    except RuntimeError:
        fits = False
    return _any if fits else torch.sigmoid


def _any(drawn: Tensor) -> Tensor:
    return drawn


def _drawn(batch: _Batch, scale: float, within: Range) -> Values:
    """Draw outputs that spread with the scale."""
    return tuple(within(scale * torch.randn(value.shape)).to(value.dtype) for value in batch.outputs)


def _joined(ours: Values, theirs: Values) -> Values:
    """Put the samples of two microbatches together. Raises _UnfitError if they can't be."""
    pairs = list(zip(ours, theirs, strict=True))
    if any(not one.dim() or one.shape[1:] != other.shape[1:] for one, other in pairs):
        raise _UnfitError("two microbatches can't be joined along their first dimension")
    return tuple(torch.cat(pair) for pair in pairs)


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(f"{count:,}" for count in counts)
