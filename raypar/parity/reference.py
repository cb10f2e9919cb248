"""The reference of the parity check: train a run in one plain process.

It uses torch, the model and an optimizer, and no schedules, stages or groups, so that a reader can check it. It can
also compute in float64, with the same random values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import DispatchMode, map_leaves, written_arguments
from raypar.actors.collective.replicas import ReplicaMembers, enter
from raypar.actors.data.batches import TokenMean, batch_source, cast_source, correction
from raypar.actors.expert_parallel.record import Balanced, Routed, RouterRecord
from raypar.actors.inspect.activations import LOSS, OutputWatch, Spot
from raypar.actors.machine.device import ComputeDevice, device_of
from raypar.actors.machine.offload_storage import DeviceStorage
from raypar.actors.models.build import build_model
from raypar.actors.models.skip_connections import Skipped
from raypar.actors.optim.block_norm import global_norm
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.lr import lr_at
from raypar.actors.optim.masters import masters_of
from raypar.actors.optim.optimizer import build_optimizer, set_lr
from raypar.actors.rng import derive
from raypar.actors.sharding import Sharding
from raypar.actors.specs.model import Layers
from raypar.actors.specs.results import mean_loss
from raypar.actors.specs.run import Run
from raypar.actors.tensors import as_values, cast_floating, dtype_of, sum_dtype
from raypar.errors import ConfigError
from raypar.parity.replica_turns import ReplicaTurns


@dataclass(frozen=True)
class Trained:
    """The results of a run in one plain process.

    Attributes:
        losses: The loss of every step.
        grad_norms: The gradient norm of every step, before clipping.
        gradients: The gradients of the first step, clipped, by logical name.
        weights: The weights after the last step, by logical name.
        tied: Whether a weight belongs to more than one layer.
        layers: The logical names of the layers.
        forwards: The loss of every microbatch of the first step, in the order of their numbers.
        addends: By logical name, the sum of the norms of the gradients of the first step's microbatches, clipped; in
            float64 only.
    """

    losses: tuple[float | None, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    tied: bool
    layers: tuple[str, ...]
    forwards: tuple[float, ...] = ()
    addends: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, Tensor]:
        """Return all figures and tensors by which runs are compared, by their names in messages."""
        found: dict[str, Tensor] = {}
        for step, (loss, norm) in enumerate(zip(self.losses, self.grad_norms, strict=True), 1):
            found |= {f"loss of step {step}": exact_figure(loss), f"gradient norm of step {step}": exact_figure(norm)}
        found |= {gradient_name(name): dense(gradient) for name, gradient in self.gradients.items()}
        return found | {f"weight {name}": weight for name, weight in self.weights.items()}


def gradient_name(name: str) -> str:
    """Return the name of a weight's gradient in messages."""
    return f"gradient {name} of step 1"


def exact_figure(figure: float | None) -> Tensor:
    """Return a figure as a scalar tensor; a missing one is infinite, which equals only another missing one."""
    return torch.tensor(torch.inf if figure is None else figure, dtype=torch.float64)


def dense(gradient: Tensor | None) -> Tensor:
    """Replace a missing gradient by an empty tensor, which equals only another missing one."""
    return torch.empty(0) if gradient is None else gradient


class Watched(NamedTuple):
    """One step of a plain process with all its tensors.

    Attributes:
        tensors: The layers' outputs and gradients, on the CPU, in the order of their computation.
        gradients: The gradients of the weights, clipped, by logical name.
        weights: The weights before the step, by logical name.
        layers: The logical names of the layers.
        has_auxiliary: Whether the objective has auxiliary losses.
    """

    tensors: dict[Spot, Tensor]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    layers: tuple[str, ...]
    has_auxiliary: bool


def train_plainly(run: Run, order: Sequence[int] | None = None, *, exact: bool = False) -> Trained:
    """Train a run in this process: one model, and the microbatches of all replicas one after the other.

    If layers or the loss exchange values of replicas, the microbatches of one number are computed together.

    Args:
        run: The run.
        order: The order of the microbatches of a step; None for that of their numbers, counted over all
            replicas.
        exact: Whether to compute in float64.

    Returns:
        The losses, gradient norms, gradients and weights.
    """
    with _threads(run.num_threads), in_float64() if exact else nullcontext():
        plain = _Plain(run, order, exact=exact)
        losses, norms, gradients = [], [], dict[str, Tensor | None]()
        for step in range(run.steps):
            loss, norm = plain.step(step)
            losses.append(loss)
            norms.append(norm)
            gradients = gradients or plain.gradients()
        found = tuple(losses), tuple(norms), gradients, plain.weights()
        return Trained(*found, bool(plain.model.ties), plain.model.names, plain.forwards, plain.addends)


def watch_plainly(run: Run, step: int, modules: Iterable[str] = (), *, auxiliary: bool = True) -> Watched:
    """Train a run up to a step in this process, and return every tensor of that step.

    Args:
        run: The run.
        step: The step to watch.
        modules: Logical names of modules to watch besides the layers.
        auxiliary: Whether auxiliary losses belong to the objective of that step.

    Returns:
        The step's tensors.
    """
    with _threads(run.num_threads):
        plain = _Plain(run)
        for number in range(step):
            plain.step(number)
        weights = {name: weight.clone() for name, weight in plain.weights().items()}
        layers = plain.model.names
        watch = OutputWatch(dict(zip(layers, plain.layers, strict=True)), dict.fromkeys(modules, Sharding()))
        plain.step(step, watch, auxiliary=auxiliary)
        tensors = {spot: sight.tensor for spot, sight in watch.seen.items()}
        return Watched(tensors, plain.gradients(), weights, layers, plain.has_auxiliary)


class _Plain:
    """The whole model and its optimizer."""

    def __init__(self, run: Run, order: Sequence[int] | None = None, *, exact: bool = False) -> None:
        self._run, self._device = run, _device_of(run)
        self._order = range(run.microbatches * run.mesh.dp) if order is None else order
        self.forwards, self.addends = tuple[float, ...](), dict[str, float]()
        self.model = build_model(run.model, run.seed, run.precision.compute)
        self.layers = self.model.materialize(range(len(self.model.names)), run.seed)
        self._device.settle(self.layers)
        if exact:
            for layer in self.layers:
                layer.double()
        self._added: list[Tensor] = []  # the auxiliary losses of a microbatch, with their graphs
        self._record = RouterRecord(self._add)
        self._balanced = [one for one in self._routed() if isinstance(one, Balanced) and one.is_balanced]
        self._parameters = _named(self.model.names, self.layers, {copy: owner for owner, copy in self.model.ties})
        self._masters = masters_of(run.precision, DeviceStorage(self._device.device), self.layers, self._parameters)
        for parameter in self._parameters.values():
            if parameter.grad_dtype is None:  # here each gradient is cast before it is added
                parameter.grad_dtype = sum_dtype(parameter)
        self._optimizer = build_optimizer(run.optim, self._masters.parameters)
        self._scaler = LossScaler(run.loss_scale if run.loss_scale.is_on(run.precision) else None)
        m, num_dp = run.microbatches, run.mesh.dp
        self._source = batch_source(run.data, run.model, run.micro_batch_size, m, num_dp, run.seed)
        if run.precision.is_half:
            self._source = cast_source(self._source, dtype_of(run.precision.layers))
        self._exact = exact
        if exact:
            self._source = cast_source(self._source, torch.float64, targets=True)
        self._mean = TokenMean(self.model, self._source, m, num_dp)
        self._correction = 1.0  # of the step under way
        entered = in_float64 if exact else nullcontext
        exchanges = isinstance(run.model, Layers) and num_dp > 1 and run.replica_fault is None
        self._turns = ReplicaTurns(num_dp, self._device.device, entered) if exchanges else None

    def step(
        self, step: int, watch: OutputWatch | None = None, *, auxiliary: bool = True
    ) -> tuple[float | None, float]:
        """Train one step, and return its loss and its gradient norm before clipping.

        Without targets it has no loss, and changes nothing.

        Args:
            step: The step.
            watch: Records the tensors; None to record none.
            auxiliary: Whether auxiliary losses belong to the objective.
        """
        run, parameters = self._run, self._masters.parameters
        found = dict[int, tuple[float, int]]()
        self._record.begin(1.0)
        self._correction = self._ahead(step)
        for parameter in (*self._parameters.values(), *parameters.values()):
            parameter.grad = None
        for layer in self.layers:
            layer.train()
        sums = _MeasuredSums(parameters) if self._exact and not self.addends else None
        for number in self._order:
            if number in found:
                continue
            with nullcontext() if watch is None else watch.of(number):
                found |= self._microbatches(step, number, watch, auxiliary=auxiliary)
            if sums is not None:
                sums.take()
        losses, counts = zip(*(found[number] for number in sorted(found)), strict=True)
        self.forwards = self.forwards or losses
        if sums is not None:
            sums.publish()
        self._masters.take_gradients(1.0 / self._scaler.scale)
        _scale(parameters, self._correction or 1.0)
        gradients = {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}
        norm = global_norm(gradients, parameters)
        if not sum(counts):
            return None, float(norm)
        if sums is not None:
            share = 1.0 if run.clip is None else min(1.0, run.clip / (float(norm) + 1e-6))
            self.addends = {name: size * share * (self._correction or 1.0) for name, size in sums.sizes.items()}
        if run.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), run.clip, norm, foreach=False)
        if run.counts_skips and not torch.isfinite(norm):
            self._scaler.skipped += 1
            self._scaler.fall()
        elif self._optimizer is not None:
            set_lr(self._optimizer, lr_at(run.optim, step - self._scaler.skipped, run.steps))
            self._optimizer.step()
            self._masters.publish()
            self._scaler.grow()
            with torch.no_grad():
                for router in self._balanced:
                    router.balance(self._record.asked(router.name, router.num_experts))
        return mean_loss(losses, counts), float(norm)

    def _ahead(self, step: int) -> float:
        """Return the factor that corrects the gradients of a step; auxiliary losses are divided by it beforehand."""
        run, num_dp = self._run, self._run.mesh.dp
        every = product(range(run.microbatches), range(num_dp))
        targets = [self._source.targets("train", step, *at) for at in every]
        return correction(sum(map(self.model.count, targets)), num_dp * self._mean.expected)

    @property
    def has_auxiliary(self) -> bool:
        """Whether the latest step had auxiliary losses."""
        return bool(self._record.losses())

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the latest step, clipped, on the CPU, by logical name."""
        return {name: None if p.grad is None else p.grad.cpu() for name, p in self._masters.parameters.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, on the CPU, by logical name."""
        return {name: master.detach().cpu() for name, master in self._masters.parameters.items()}

    def _microbatches(
        self, step: int, number: int, watch: OutputWatch | None, *, auxiliary: bool
    ) -> dict[int, tuple[float, int]]:
        """Run forward and backward of a microbatch, and of those of other replicas that it exchanges values with.

        The objective is the sum of the losses, each times the share of its tokens, and of the auxiliary losses as a
        mean over the microbatches.

        Returns:
            By number of a microbatch its loss and the number of elements in its mean.
        """
        self._added.clear()
        forward = partial(self._forward, step, watch)
        microbatch, dp = divmod(number, self._run.mesh.dp)
        if self._turns is None:
            made = {number: forward(number, None)}
        else:
            first = microbatch * self._run.mesh.dp
            every = self._turns.compute(
                dp,
                lambda index, members: forward(first + index, members),
                lambda index: self._turn_to(first + index, watch),
            )
            made = {first + index: one for index, one in every.items()}
        objective = torch.stack([one for one, _, _ in made.values()]).sum() if len(made) > 1 else made[number][0]
        if self._added and auxiliary and self._correction:
            share = self._scaler.scale / (self._run.microbatches * self._run.mesh.dp) / self._correction
            objective = objective + torch.stack(self._added).sum() * share
        if objective.requires_grad:
            objective.backward()
        return {one: (loss, count) for one, (_, loss, count) in made.items()}

    def _forward(
        self, step: int, watch: OutputWatch | None, number: int, replicas: ReplicaMembers | None
    ) -> tuple[Tensor, float, int]:
        """Run the forward of a microbatch; return its weighted loss, its loss and the number of elements in its mean.

        Args:
            step: The step.
            watch: Records the tensors; None to record none.
            number: The microbatch.
            replicas: The replicas that the layers and the loss exchange values with; None if they can't.
        """
        self._turn_to(number, watch)
        microbatch, dp = divmod(number, self._run.mesh.dp)
        values = self._device.to(self._source.inputs("train", step, microbatch, dp))
        target = self._device.to(self._source.targets("train", step, microbatch, dp))
        if self.model.documents is not None:
            self.model.documents.turn(self._source.extents("train", step, microbatch, dp).on(self._device), number)
        count = self.model.count(target)
        if self.model.labels is not None:
            self.model.labels.now = target if count else ()
        skipped = Skipped(self.model.skips, self.model.names)
        for index, layer in enumerate(self.layers):
            torch.manual_seed(derive(self._run.seed, "layer", step, number, index))
            enter(replicas, self.model.names[index])
            values = as_values(layer(*skipped.inputs(index, values)))
            skipped.keep(index, values)
        if self._run.precision.is_half:
            values = cast_floating(values, torch.float32)
        enter(replicas, "the loss")
        loss = self.model.loss(values, target) if count else self.model.no_loss(values)
        weight = self._mean.weight(count, self._scaler.scale).to(loss)
        if watch is not None:
            watch.keep(Spot(LOSS, number), loss)
            watch.keep(Spot(LOSS, number, backward=True), weight)
        return loss * weight, loss.item(), count

    def _turn_to(self, number: int, watch: OutputWatch | None) -> None:
        """Report from now on what belongs to a microbatch."""
        self._record.open(number)
        if watch is not None:
            watch.turn_to(number)

    def _add(self, x: Tensor, loss: Tensor) -> Tensor:
        """Add an auxiliary loss to the objective of the microbatch, where a stage attaches it to the output."""
        self._added.append(loss)
        return x

    def _routed(self) -> Iterator[Routed]:
        """Yield the modules that report auxiliary losses and tokens, and make them report to this object."""
        for layer_name, layer in zip(self.model.names, self.layers, strict=True):
            for name, module in layer.named_modules(prefix=layer_name):
                if isinstance(module, Routed):
                    module.record, module.name = self._record, name
                    yield module


class _MeasuredSums:
    """The sums of the gradients of a step's microbatches, with the norm of each addend.

    Attributes:
        sizes: The sum of their norms, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._sums = parameters, dict[str, Tensor]()
        self.sizes: dict[str, float] = {}

    def take(self) -> None:
        """Add the gradients of a microbatch to the sums, and measure them."""
        for name, parameter in self._parameters.items():
            if (gradient := parameter.grad) is not None:
                self.sizes[name] = self.sizes.get(name, 0.0) + float(torch.linalg.vector_norm(gradient))
                self._sums[name] = gradient if name not in self._sums else self._sums[name] + gradient
                parameter.grad = None

    def publish(self) -> None:
        """Make the sums the gradients of the parameters."""
        for name, total in self._sums.items():
            self._parameters[name].grad = total


def _device_of(run: Run) -> ComputeDevice:
    try:
        return device_of("cuda" if run.device == "cuda" else "cpu")
    except RuntimeError as error:
        raise ConfigError([f"device is 'cuda', and the plain process has no GPU ({error}): verify on 'cpu'"]) from error


def _scale(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply the gradients by a factor, if it is not 1."""
    for parameter in parameters.values():
        if factor != 1.0 and parameter.grad is not None:
            parameter.grad.mul_(factor)


def _named(names: tuple[str, ...], layers: list[nn.Module], owner_of: dict[str, str]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by logical name. Tied weights become one parameter."""
    parameters: dict[str, nn.Parameter] = {}
    for layer_name, layer in zip(names, layers, strict=True):
        for inner, parameter in list(layer.named_parameters()):
            name = f"{layer_name}.{inner}"
            if name in owner_of:
                owner, _, last = inner.rpartition(".")
                layer.get_submodule(owner)._parameters[last] = parameters[owner_of[name]]
            elif parameter.requires_grad:
                parameters[name] = parameter
    return parameters


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use ``count`` torch threads in the block; restore the number and the random state afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default dtype in the block, with the same random values as in float32."""
    with _default(torch.float64), _SameDraws():
        yield


class _SameDraws(DispatchMode):
    """Draws float64 values as float32, which takes other bits of the generator, and widens them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _default(torch.float32):
            drawn = func(*map_leaves(_narrow, args), **map_leaves(_narrow, kwargs))
        if written_arguments(func) and args and isinstance(args[0], Tensor):
            return args[0].copy_(drawn)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wanted = [tensor.dtype for tensor in tensors] or [kwargs.get("dtype") or torch.float64]
        return map_leaves(_wide, drawn) if torch.float64 in wanted else drawn


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype the default of new tensors in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _narrow(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.float()
    return torch.float32 if value is torch.float64 else value


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
