"""The parity check: run the same steps on the layout and in one plain process, and compare tensor by tensor.

The distance of float32 from float64 in a run is measured, so that rounding does not count as a fault.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.optim.groups import is_matrix, rule_of
from raypar.actors.optim.lr import lr_at
from raypar.actors.optim.muon.muon_with_adamw import scale_of
from raypar.actors.specs.optim import SGD, Muon
from raypar.actors.specs.run import Run
from raypar.config.arguments import checked_arguments
from raypar.config.run import check_run, unrecorded
from raypar.errors import ConfigError
from raypar.job.job import Job
from raypar.job.launch import launch
from raypar.job.start.batch_checks import demand_pure
from raypar.parity.compare import norm_of, relative_error, scales_of
from raypar.parity.diagnosis import Diagnosis, diagnose
from raypar.parity.reference import Trained, dense, exact_figure, gradient_name, train_plainly
from raypar.schedules.action import Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.schedule import Schedule

CLOSE = 1e-6  # relative difference if the same numbers are added in another order


DRIFTED = 1e-3  # relative difference of weights that AdamW or Muon has updated from such gradients


NOISY = 1.0  # share of the largest distance by which they can move apart weights with gradients of rounding noise


_WIDER = "AdamW divides a gradient by its own size, and Muon by its singular values (see docs/troubleshooting.md)"


_WHY = " of how far AdamW or Muon can move it: its gradient is rounding noise"


_TIMES = 4.0  # most distance of a right result from float64, in multiples of that of plain float32


_ROUNDED = 2.0**-22  # four roundings of float32, relative to the rounded value: a figure, or the addends of a sum


_SAME = 1e-3  # relative difference of losses beyond which float64 computes another function, as with fixed dtypes


@dataclass(frozen=True)
class Rounding:
    """A run in float64, and in plain float32 with its microbatches added in several orders.

    Attributes:
        exact: The run in float64, by name of the figure or tensor.
        plain: The run in float32, a mapping for each order.
        addends: For sums over microbatches, by name: the sum of the norms of the addends.
    """

    exact: Mapping[str, Tensor]
    plain: tuple[Mapping[str, Tensor], ...]
    addends: Mapping[str, float]

    def error(self, what: str, found: Tensor, scale: float | None = None) -> float:
        """Return the distance of a figure or tensor from float64.

        Args:
            what: Its name.
            found: The figure or tensor.
            scale: The norm by which the distance is divided; None for the norm in float64.
        """
        return relative_error(found, self.exact[what], scale)

    def allowed(self, what: str, scale: float | None = None) -> float:
        """Return the largest distance from float64 of a right figure or tensor; for ``scale`` see ``error``."""
        rounded = [relative_error(plain[what], self.exact[what], scale) for plain in self.plain]
        norm = norm_of(self.exact[what]) if scale is None else scale
        return max(_TIMES * max(rounded), _ROUNDED * max(1.0, self.addends.get(what, 0.0) / (norm or 1.0)))


def rounding_of(run: Run, plain: Trained) -> Rounding | None:
    """Train a run in float64, and in float32 with its microbatches in two more orders.

    An order in which the microbatches of the first step have other losses does not count: then forwards change a state
    of the model that other microbatches read.

    Args:
        run: The run.
        plain: Its results in plain float32.

    Returns:
        The distance of float32 from float64; None if layers compute in half precision, or if the model can't run in
        float64, or computes another function there.
    """
    if run.precision.is_half:
        return None
    log = logging.getLogger(__name__)
    try:
        exact = train_plainly(run, exact=True)
    except Exception as error:  # of any kind: the user's layers raise it
        log.warning("the model can't run in float64 (%s: %s): judged beside float32 alone", type(error).__name__, error)
        return None
    if not all(map(_alike, exact.forwards, plain.forwards)):
        log.warning("the model has other losses in float64: judged beside float32 alone")
        return None
    count = run.microbatches * run.mesh.dp
    orders = [[*range(count)][::-1], [*range(0, count, 2), *range(1, count, 2)]]
    reordered = [train_plainly(run, order) for order in orders]
    alike = [plain, *(one for one in reordered if one.forwards == plain.forwards)]
    addends = {gradient_name(name): size for name, size in exact.addends.items()}
    return Rounding(exact.figures(), tuple(one.figures() for one in alike), addends)


def _alike(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= _SAME * abs(other) or (math.isnan(one) and math.isnan(other))


class Bounds(NamedTuple):
    """The largest relative differences that count as right.

    Attributes:
        loss: For losses.
        gradient: For gradient norms and gradients.
        weight: For weights.
    """

    loss: float
    gradient: float
    weight: float

    def __str__(self) -> str:
        wider = f", wider because {_WIDER}" if self.weight > self.gradient else ""
        return f"bounds: losses {self.loss:g}, gradients {self.gradient:g}, weights {self.weight:g}{wider}"


BITWISE, TIED, REPLICAS = Bounds(0.0, 0.0, 0.0), Bounds(CLOSE, CLOSE, DRIFTED), Bounds(CLOSE, CLOSE, DRIFTED)


DIVIDED = Bounds(1e-5, 5e-6, DRIFTED)  # tensor, context and expert parallelism, tiles: sums of a layer's parts


# Layers in half precision, whose products are added in another order and rounded to 8 bits. A bias that begins at 0 is
# the sum of AdamW's steps alone, whose signs small gradients decide.
HALF = Bounds(2e-3, 3e-2, 0.25)


# Products in fp8, which round to 4 bits what comes 8 bits wide: about three times what layouts were seen to differ by
# (docs/decisions/numerics.md, 2026-11-30), also those whose rows and scales are whole (cp).
FP8 = Bounds(5e-3, 0.15, 0.5)


ON_GPUS = Bounds(1e-5, 1e-5, 1e-2)  # GPU kernels add in an order that varies from call to call


@dataclass(frozen=True)
class Difference:
    """A loss, norm, gradient or weight that is not bitwise the same.

    Attributes:
        what: Its name in messages.
        error: The norm of the difference, relative to its norm.
        allowed: The largest error that counts as right.
        step: The step of the run; for a weight, the step after which it was compared.
        beside: The reference: "" for the plain process, "float64" for the plain process in float64.
    """

    what: str
    error: float
    allowed: float = 0.0
    step: int = 0
    beside: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the error is within its bound."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.beside:
            return f"{self.what} is {self.error:.3g} of its norm from {self.beside}, and rounding is {self.allowed:.3g}"
        return f"{self.what} differs by {self.error:.3g} of its norm"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of ``verify``.

    A sum of more than two numbers depends on the order of its additions. Where the layout's order is not that of one
    process, the right result is not bitwise equal, and these relative bounds apply:

    - Tied model: it adds the gradients of a weight's two uses once a step. Losses, norms and the gradients of the first
      step may differ by 1e-6. Weights may differ by 1e-3, because AdamW divides a gradient by its own size: a gradient
      that is only rounding noise moves its weight by a full step.
    - Replicas: each first adds its own microbatches; the same bounds apply. With two microbatches in all, one for each
      replica, there is only one addition, and no difference is allowed.
    - A schedule that does not compute a stage's weight gradients in the order of the microbatches: the same bounds.
    - Tensor, context and expert parallelism, and tiles: they add parts of products and of sums over tokens, and experts
      compute the tokens of several replicas together. Losses may differ by 1e-5, norms and the gradients of the first
      step by 5e-6, weights by 1e-3.
    - GPUs, whose kernels add in any order: 1e-5, and 1e-2 for weights.
    - Layers in half precision, where any of these applies: losses 2e-3, norms and gradients 3e-2, weights 0.25 (of
      a bias that begins at 0 AdamW makes steps whose signs small gradients decide). With products in fp8: 5e-3, 0.15
      and 0.5. The plain process computes in the run's precision too.

    Outputs that are not contiguous arrive with their order in memory, and gradients with the order of the outputs.
    Where one process would have another order in memory, kernels may add in another order too; there are no bounds for
    that.

    A result beyond its bound is compared with the plain process in float64. It is right if its distance from that is at
    most 4 times that of the plain process in float32, whose microbatches are added in three orders, or that of four
    roundings of a sum's addends: a gradient whose addends cancel has no more digits. For layers in half precision, and
    models that can't run in float64, the bounds alone count.

    The weights of all replicas must always be bitwise equal.

    A gradient that is 0 in exact arithmetic, like that of the bias of attention keys, is only rounding noise: its error
    is divided by the norm of all gradients of its layer. AdamW and Muon make steps of full size of such a gradient, on
    both sides. So where weights may differ at all, a weight with such a gradient may differ by the largest distance
    that these steps can move two weights apart.

    Attributes:
        steps: Number of steps taken.
        gradients: Number of gradients compared.
        weights: Number of weights compared.
        losses: The losses of the plain process.
        differences: All results that are not bitwise equal, also those within their bounds (``difference.ok``): losses
            and norms first, then gradients and weights by logical name. A test asserts ``ok``, not that there are none.
        replicas: Number of replicas.
        diagnosis: The first tensor that differs and the likely cause, if the verdict is not ok.
        bounds: The relative bounds of the layout.
    """

    steps: int
    gradients: int
    weights: int
    losses: tuple[float | None, ...]
    differences: tuple[Difference, ...]
    replicas: int = 1
    diagnosis: Diagnosis | None = None
    bounds: Bounds = BITWISE

    @property
    def ok(self) -> bool:
        """Return whether every difference is within its bound."""
        return all(difference.ok for difference in self.differences)

    @property
    def bitwise(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    @property
    def worst(self) -> float:
        """Return the largest relative difference, 0 if everything is bitwise equal."""
        return max((difference.error for difference in self.differences), default=0.0)

    def __repr__(self) -> str:
        """Return the text of ``str``, for REPLs and notebooks."""
        return str(self)

    def __str__(self) -> str:
        losses = f"{len(self.losses)} losses and gradient norms"
        weights = f"{self.weights} weights{f' on {self.replicas} replicas' if self.replicas > 1 else ''}"
        checked = f"{losses}, {self.gradients} gradients of step 1 and {weights} after {self.steps} steps"
        if self.bitwise:
            return f"bitwise equal: {checked}"
        if not self.ok:
            wrong = [difference for difference in self.differences if not difference.ok]
            found = f"{len(wrong)} differences in {checked}; first: {wrong[0]}; worst {self.worst:.3g}"
            return found if self.diagnosis is None else f"{found}\n{self.diagnosis}"
        kinds: dict[float, list[Difference]] = {}
        for difference in self.differences:
            if not difference.beside:
                kinds.setdefault(difference.allowed, []).append(difference)
        worst = [max(same, key=lambda difference: difference.error) for _, same in sorted(kinds.items())]
        bounds = ", ".join(
            f"{one.what} {one.error:.3g} (bound {one.allowed:g}{_WHY if one.allowed == NOISY else ''})" for one in worst
        )
        lines = [f"equal within bounds: {checked}", str(self.bounds)]
        lines += [f"largest differences, of the tensor's norm: {bounds}"] if bounds else []
        if rounded := [difference for difference in self.differences if difference.beside]:
            last = max(rounded, key=lambda difference: difference.error / (difference.allowed or 1.0))
            lines.append(f"{len(rounded)} more than that, by float32's rounding alone; nearest to being wrong: {last}")
        return "\n".join(lines)


@checked_arguments
def verify(run: Run, job: Job | None = None) -> Verdict:
    """Train a run on its layout and in one plain process, and compare the results.

    Compares every loss and gradient norm, the gradients of the first step, and the weights after the last step.

    Args:
        run: The run. Device "auto" means CPUs here, whose results are bitwise the same everywhere. With "cuda" the
            plain process uses a separate GPU. Muon's iterations are in fp32 here, on both sides: in bf16 the order of
            additions changes its updates by a percent.
        job: A job with enough actors to reuse, or None to launch one.

    Returns:
        The verdict.

    Raises:
        ConfigError: The errors of ``launch``, or if the batch function is not pure, or the schedule asynchronous.
    """
    run = unrecorded(run)
    run = replace(run, device="cpu") if run.device == "auto" else run
    if isinstance(run.optim, Muon):
        run = replace(run, optim=replace(run.optim, precision="fp32"))
    if check_run(run)["train"].stream:
        raise ConfigError(
            [
                f"verify compares with one plain process, in which no steps overlap, and schedule {run.schedule!r} is "
                "asynchronous: its gradients are those of older weights. Verify the run with a synchronous one, as 1f1b"
            ]
        )
    demand_pure(run)
    plain = train_plainly(run)
    if job is not None:
        job.reset(run)
        return _judge(job, plain)
    with launch(run) as own:
        return _judge(own, plain)


def _judge(job: Job, plain: Trained) -> Verdict:
    """Compare, and add the diagnosis if the verdict is not ok."""
    verdict = _compare(job, plain)
    if verdict.ok:
        return verdict
    run, bounds = job.run, _allowed(job.run, job.schedule, plain.tied)
    later = min(difference.step for difference in verdict.differences if not difference.ok)
    return replace(verdict, diagnosis=diagnose(job, run, bounds.gradient, max(bounds.gradient, bounds.weight), later))


def _compare(job: Job, plain: Trained) -> Verdict:
    """Train the run on the layout, and compare losses, norms, gradients, weights and replicas."""
    run = job.run
    bounds = _allowed(run, job.schedule, plain.tied)
    gradients = dict[str, Tensor | None]()
    known, figures = plain.figures(), list[_Pair]()
    for _ in range(run.steps):
        r = job.step()
        gradients = gradients or job.gradients()
        for what, figure, bound in ("loss", r.loss, bounds.loss), ("gradient norm", r.grad_norm, bounds.gradient):
            name = f"{what} of step {r.step + 1}"
            figures.append(_Pair(name, exact_figure(figure), known[name], bound, r.step))
    scales = scales_of({name: dense(gradient) for name, gradient in plain.gradients.items()}, plain.layers)
    figures += [
        _Pair(what := gradient_name(name), dense(gradients[name]), known[what], bounds.gradient, 0, scales[name])
        for name in plain.gradients
    ]
    last = max(0, run.steps - 1)
    noise = {name for name, wanted in plain.gradients.items() if norm_of(dense(wanted)) < scales[name]}
    drifts = noise if bounds.weight and not isinstance(run.optim, SGD) else set()
    weights = [
        _Pair(f"weight {name}", weight, plain.weights[name], NOISY, last, _largest_drift(run, name, weight))
        if name in drifts
        else _Pair(f"weight {name}", weight, plain.weights[name], bounds.weight, last)
        for name, weight in job.weights().ends()
    ]
    # with masters, the replicas have other weights than the optimizer
    first = [*job.weights(0).ends()] if run.precision.is_mixed else [(pair.what, pair.found) for pair in weights]
    replicas = [
        _Pair(f"weight {name} of dp={dp}, beside dp=0,", other, found, 0.0, last)
        for dp in range(1, run.mesh.ways("dp"))
        for (name, other), (_, found) in zip(job.weights(dp).ends(), first, strict=True)
    ]
    unequal = [pair for pair in (*figures, *weights, *replicas) if not torch.equal(pair.found, pair.wanted)]
    differences = [pair.difference() for pair in unequal]
    if any(one.what in known and not one.ok for one in differences) and (rounding := rounding_of(run, plain)):
        differences = [
            one if one.ok or one.what not in known else _beside_float64(pair, rounding)
            for pair, one in zip(unequal, differences, strict=True)
        ]
    counts = run.steps, len(plain.gradients), len(plain.weights)
    return Verdict(*counts, plain.losses, tuple(differences), run.mesh.ways("dp"), bounds=bounds)


class _Pair(NamedTuple):
    """Two tensors to compare.

    Attributes:
        what: Name of the tensor in messages.
        found: The layout's tensor.
        wanted: The plain process's tensor.
        allowed: The largest error that counts as right.
        step: As in ``Difference``.
        scale: The norm by which the error is divided, or None for that of ``wanted``.
    """

    what: str
    found: Tensor
    wanted: Tensor
    allowed: float
    step: int
    scale: float | None = None

    def difference(self) -> Difference:
        """Return the difference of the layout's tensor from that of the plain process."""
        return Difference(self.what, relative_error(self.found, self.wanted, self.scale), self.allowed, self.step)


def _beside_float64(pair: _Pair, rounding: Rounding) -> Difference:
    """Return the difference of the layout's tensor from float64, with the bound that plain float32 gives."""
    error = rounding.error(pair.what, pair.found, pair.scale)
    allowed = max(pair.allowed, rounding.allowed(pair.what, pair.scale))
    return Difference(pair.what, error, allowed, pair.step, beside="float64")


def _allowed(run: Run, schedule: Schedule, tied: bool) -> Bounds:
    """Choose the bounds that apply to a run."""
    bounds = _in_fp32(run, schedule, tied)
    rounds = run.precision.is_half or (run.precision.tf32 and run.device == "cuda")  # TF32 has fp16's mantissa
    if not rounds or bounds == BITWISE:
        return bounds
    return Bounds(*map(max, FP8 if run.precision.compute == "fp8" else HALF, bounds))


def _in_fp32(run: Run, schedule: Schedule, tied: bool) -> Bounds:
    """Choose the bounds that apply to a run in fp32."""
    divides = run.mesh.ways("tp") * run.mesh.cp > 1 or run.mesh.divides_experts or run.tile != 1
    if run.device == "cuda":
        return Bounds(*map(max, DIVIDED, ON_GPUS)) if divides else ON_GPUS
    if divides:
        return DIVIDED
    replicas = run.mesh.ways("dp") > 1 and run.microbatches * run.mesh.dp > 2
    if replicas or run.order == "dynamic" or not _in_order(schedule):
        return REPLICAS
    return TIED if tied else BITWISE


def _in_order(schedule: Schedule) -> bool:
    """Return whether every stage adds the gradients of its weights in the order of the microbatches."""
    orders: defaultdict[int | None, list[int]] = defaultdict(list)
    for row in schedule.rows:
        for stage, op, microbatch, _ in row:
            if op in (Op.B, Op.W) and microbatch is not None:
                orders[stage].append(microbatch)
    return all(order == sorted(order) for order in orders.values())


def _largest_drift(run: Run, name: str, weight: Tensor) -> float:
    """Compute the largest distance by which AdamW or Muon can move two weights apart.

    In every step AdamW moves each element by the learning rate. Muon moves each singular value by up to 1.2 times its
    scaled learning rate.
    """
    rule = rule_of(run.optim, name, weight.dim())
    moved = 2 * rule.rate * float_sum(lr_at(run.optim, step, run.steps) for step in range(run.steps))
    if isinstance(run.optim, Muon) and is_matrix(run.optim, name, weight.dim()):
        return moved * 1.2 * scale_of(run.optim.scale, *weight.shape) * math.sqrt(min(weight.shape))
    return moved * math.sqrt(weight.numel())
