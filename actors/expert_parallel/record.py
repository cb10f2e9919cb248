"""The record of a step by routers and other modules: auxiliary losses, and the load of each expert."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.expert_parallel.shadowing import ShadowChoice
from raypar.actors.specs.results import AddedLoss, ExpertLoad, Shadowed
from raypar.schedules.float_sum import float_sum

Attach = Callable[[Tensor, Tensor], Tensor]  # an output and an auxiliary loss -> the output
ReadBack = Callable[[Tensor], Callable[[], Tensor]]  # a tensor -> what waits for its copy on the host


class RouterRecord:
    """The values that the modules of one actor record in a training step.

    It records only between ``open`` and ``close``, in the first forward of a microbatch. So a recomputation is not
    counted again, while a module that is called twice in a forward counts twice.

    Args:
        attach: Adds an auxiliary loss to the objective of the step, and returns the output. By default the backward of
            the output gives the loss the gradient ``weight``.

    Attributes:
        weight: Weight of one microbatch's auxiliary losses in the objective, times the scale of the loss.
        microbatch: Number in the whole step, over all replicas, of the microbatch whose forward runs; else None.
    """

    def __init__(self, attach: Attach | None = None) -> None:
        self.attach: Attach = attach or self._attach
        self.weight = 1.0
        self.microbatch: int | None = None
        self._microbatches = set[int]()
        # By layer: (microbatch, value). The values are on the device and not read yet.
        self._losses: defaultdict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)  # by layer and kind
        self._scores: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        self._loads: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._shadows: dict[str, Shadowed] = {}
        self._copying: list[Callable[[], None]] = []  # of what waits for copies to the host

    def begin(self, weight: float) -> None:
        """Begin a step, and drop the values of the previous one.

        Args:
            weight: The ``weight`` of the step.
        """
        self.close()
        self.weight = weight
        self._microbatches.clear()
        for table in (self._losses, self._scores, self._loads, self._shadows, self._copying):
            table.clear()

    def open(self, microbatch: int) -> None:
        """Start to record: the first forward of a microbatch begins."""
        self.microbatch = microbatch
        self._microbatches.add(microbatch)

    def close(self) -> None:
        """Stop to record."""
        self.microbatch = None

    # --- called by modules ---

    def loss(self, layer: str, kind: str, value: Tensor) -> None:
        """Record an auxiliary loss as it is added to the objective: with its coefficient, without the weight.

        Args:
            layer: Logical name of the module.
            kind: Name of the loss.
            value: A scalar. It is detached, and not read before the end of the step.
        """
        if self.microbatch is not None:
            self._losses[layer, kind].append((self.microbatch, value.detach().float()))

    def scores(self, layer: str, scores: Tensor) -> None:
        """Record the scores of a router, of any shape: if one is NaN, the step's error names the layer."""
        if self.microbatch is not None:
            self._scores[layer].append((self.microbatch, scores.detach().sum(dtype=torch.float32)))

    def tokens(self, layer: str, asked_E: Tensor, dropped_E: Tensor) -> None:
        """Record how many of this actor's tokens chose each expert, and how many of these choices were dropped.

        Args:
            layer: Logical name of the router.
            asked_E: (E,) integers: choices, including dropped ones.
            dropped_E: (E,) integers: choices over the capacity.
        """
        if self.microbatch is not None:
            self._loads[layer].append((asked_E.detach(), dropped_E.detach()))

    def shadows(self, layer: str, experts: int, choice: ShadowChoice) -> None:
        """Record which experts of a list are shadowed.

        Args:
            layer: Logical name of the list.
            experts: Number of experts.
            choice: The shadowed experts, and the predicted seconds.
        """
        if self.microbatch is not None:
            _, times, *seconds = self._shadows.get(layer, Shadowed(layer, (0,) * experts, 0.0, 0.0))
            times = tuple(count + (slot in choice.slots) for slot, count in enumerate(times))
            self._shadows[layer] = Shadowed(layer, times, seconds[0] + choice.without, seconds[1] + choice.having)

    # --- results of the step ---

    def copy(self, read_back: ReadBack) -> None:
        """Start to copy the losses and the loads of the step to the host, all at once.

        Args:
            read_back: Starts to copy a tensor, and returns a function that waits for the copy and returns it.
        """
        losses = [(pairs, index) for pairs in self._losses.values() for index in range(len(pairs))]
        loads = [(calls, index) for calls in self._loads.values() for index in range(len(calls))]
        if losses:
            values = read_back(torch.stack([pairs[index][1].reshape(()) for pairs, index in losses]))
            self._copying.append(partial(_put_losses, losses, values))
        if loads:
            counts = read_back(torch.cat([each for calls, index in loads for each in calls[index]]))
            self._copying.append(partial(_put_loads, loads, counts))

    def _wait(self) -> None:
        """Wait for the copies, and keep them instead of the tensors on the device."""
        for put in self._copying:
            put()
        self._copying.clear()

    def shadowed(self) -> tuple[Shadowed, ...]:
        """Return the number of times that each expert was shadowed, and the predicted seconds, by layer."""
        return tuple(self._shadows.values())

    def losses(self) -> tuple[AddedLoss, ...]:
        """Return the auxiliary losses, summed over the calls of a forward, and as means over the microbatches."""
        self._wait()
        m = max(1, len(self._microbatches))
        read = _read(self._losses)
        return tuple(
            AddedLoss(layer, kind, float_sum(value for _, value in values) / m)
            for (layer, kind), values in read.items()
        )

    def loads(self) -> tuple[ExpertLoad, ...]:
        """Return the tokens of each expert."""
        self._wait()
        sums = {
            layer: torch.stack([torch.stack(pair) for pair in loads]).sum(0) for layer, loads in self._loads.items()
        }
        if not sums:
            return ()
        numbers = iter(torch.cat([each.flatten() for each in sums.values()]).tolist())
        found = []
        for layer, each in sums.items():
            asked, dropped = (tuple(int(next(numbers)) for _ in range(each.shape[1])) for _ in range(2))
            found.append(ExpertLoad(layer, asked, dropped))
        return tuple(found)

    def asked(self, layer: str, experts: int) -> Tensor:
        """Return how many tokens chose each expert of a layer: (E,) int64 on the CPU; zeros without a record."""
        self._wait()
        loads = self._loads.get(layer)
        if not loads:
            return torch.zeros(experts, dtype=torch.int64)
        return torch.stack([asked for asked, _ in loads]).sum(0).to("cpu", torch.int64)

    def not_finite(self) -> tuple[str, int] | None:
        """Return the first router whose scores had NaN or infinity, in the order of the calls, and the microbatch."""
        return next(
            (
                (layer, microbatch)
                for layer, scores in _read(self._scores).items()
                for microbatch, total in scores
                if not math.isfinite(total)
            ),
            None,
        )

    def _attach(self, x: Tensor, loss: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and loss.requires_grad):
            return x
        return apply_function(_Attach, x, loss.float(), self)


class Routed:
    """Mixin for modules that write to the record of a step: a stage sets the record and their name.

    Attributes:
        record: The record; None outside of a stage.
        name: Logical name of the module.
        divides_tokens: Whether the ranks of a tensor group have different tokens here, and not all the same.
        adds_losses: Whether it adds auxiliary losses to the objective.
    """

    record: RouterRecord | None = None
    name: str = ""
    divides_tokens: bool = False
    adds_losses: bool = False


class Balanced(Routed):
    """Mixin for modules whose router may be changed once a step, after the update, without a gradient.

    Attributes:
        num_experts: Number of experts E.
        is_balanced: Whether the router is changed.
    """

    num_experts: int
    is_balanced: bool

    def balance(self, asked_E: Tensor) -> None:
        """Change the router, which must be a function of its buffers and of the argument only.

        Args:
            asked_E: (E,) int64 on the CPU: number of tokens of the step, over all replicas, that chose each expert.
        """
        raise NotImplementedError


def attach_loss(x: Tensor, loss: Tensor, record: RouterRecord | None) -> Tensor:
    """Add an auxiliary loss to the objective of the step.

    The objective is the loss plus the sum of all auxiliary losses, each a mean over the microbatches of the step. The
    backward through the returned tensor gives ``loss`` the gradient ``record.weight``, like an additional root of the
    stage's backward. So the gradient of the loss is computed in a microbatch's backward: with recomputation, with split
    backwards, and on any pipeline stage.

    Args:
        x: An output of the module, of any shape and floating dtype, that the loss of the model depends on.
        loss: The auxiliary loss of a microbatch, a scalar, best in fp32.
        record: The module's record; None outside of a stage, where nothing is added.

    Returns:
        ``x``, with the same values, in the same memory.
    """
    return x if record is None else record.attach(x, loss)


class _Attach(torch.autograd.Function):
    """Pass a tensor on unchanged; the backward gives the auxiliary loss its weight as a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, record: RouterRecord) -> Tensor:
        ctx.record, ctx.like = record, (loss.shape, loss.device)
        return x.detach()  # not a view of x for autograd, which would forbid writing into it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, device = ctx.like
        return gradient, torch.full(shape, ctx.record.weight, device=device), None


def _put_losses(places: Sequence[tuple[list[tuple[int, Tensor]], int]], values: Callable[[], Tensor]) -> None:
    for (pairs, index), value in zip(places, values().unbind(), strict=True):
        pairs[index] = (pairs[index][0], value)


def _put_loads(places: Sequence[tuple[list[tuple[Tensor, Tensor]], int]], values: Callable[[], Tensor]) -> None:
    sizes = [len(each) for calls, index in places for each in calls[index]]
    parts = iter(values().split(sizes))
    for calls, index in places:
        calls[index] = (next(parts), next(parts))


def _read(table: Mapping[Any, list[tuple[int, Tensor]]]) -> dict[Any, list[tuple[int, float]]]:
    """Read the values of a table all at once, because on a GPU reading waits for the computation."""
    values = [value.reshape(()) for pairs in table.values() for _, value in pairs]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return {key: [(microbatch, next(numbers)) for microbatch, _ in pairs] for key, pairs in table.items()}
