"""What routers and other modules tell of a step beside their outputs: auxiliary losses, and the load of each expert."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from raypar.actors.expert_parallel.shadowing import ShadowChoice
from raypar.actors.specs.results import AddedLoss, ExpertLoad, Shadowed
from raypar.schedules.float_sum import float_sum

Attach = Callable[[Tensor, Tensor], Tensor]  # an output and an auxiliary loss -> the output


class RouterRecord:
    """What the modules of one actor tell in a training step.

    It listens only between ``open`` and ``close``, in the first forward of a microbatch. So what a recomputation tells
    once more does not count twice, while a module that is called twice in a forward counts twice.

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
        # By layer: microbatches, and what was told of them. The values are on the device and were not read yet.
        self._losses: defaultdict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)  # by layer and kind
        self._scores: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        self._loads: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._shadows: dict[str, Shadowed] = {}

    def begin(self, weight: float) -> None:
        """Begin a step, and drop what the one before has left.

        Args:
            weight: The ``weight`` of the step.
        """
        self.close()
        self.weight = weight
        self._microbatches.clear()
        for table in (self._losses, self._scores, self._loads, self._shadows):
            table.clear()

    def open(self, microbatch: int) -> None:
        """Listen from now on: the first forward of a microbatch begins."""
        self.microbatch = microbatch
        self._microbatches.add(microbatch)

    def close(self) -> None:
        """Listen no more."""
        self.microbatch = None

    # --- what modules tell ---

    def loss(self, layer: str, kind: str, value: Tensor) -> None:
        """Tell an auxiliary loss as it is added to the objective: with its coefficient, without the weight.

        Args:
            layer: Logical name of the module.
            kind: Name of the loss.
            value: A scalar. It is detached, and not read before the end of the step.
        """
        if self.microbatch is not None:
            self._losses[layer, kind].append((self.microbatch, value.detach().float()))

    def scores(self, layer: str, scores: Tensor) -> None:
        """Tell the scores of a router, of any shape: if one is NaN, the step's error names the layer."""
        if self.microbatch is not None:
            self._scores[layer].append((self.microbatch, scores.detach().sum(dtype=torch.float32)))

    def tokens(self, layer: str, asked_E: Tensor, dropped_E: Tensor) -> None:
        """Tell how many of this actor's tokens have chosen each expert, and how many of those were dropped.

        Args:
            layer: Logical name of the router.
            asked_E: (E,) integers: choices, those that were dropped included.
            dropped_E: (E,) integers: choices over the capacity.
        """
        if self.microbatch is not None:
            self._loads[layer].append((asked_E.detach(), dropped_E.detach()))

    def shadows(self, layer: str, experts: int, choice: ShadowChoice) -> None:
        """Tell which experts of a list are shadowed.

        Args:
            layer: Logical name of the list.
            experts: Number of experts.
            choice: Which are, and the predicted seconds.
        """
        if self.microbatch is not None:
            _, times, *seconds = self._shadows.get(layer, Shadowed(layer, (0,) * experts, 0.0, 0.0))
            times = tuple(count + (slot in choice.slots) for slot, count in enumerate(times))
            self._shadows[layer] = Shadowed(layer, times, seconds[0] + choice.without, seconds[1] + choice.having)

    # --- what comes of it ---

    def shadowed(self) -> tuple[Shadowed, ...]:
        """Return which experts were shadowed, and how often."""
        return tuple(self._shadows.values())

    def losses(self) -> tuple[AddedLoss, ...]:
        """Return the auxiliary losses, summed over the calls of a forward, and as means over the microbatches."""
        m = max(1, len(self._microbatches))
        read = _read(self._losses)
        return tuple(
            AddedLoss(layer, kind, float_sum(value for _, value in told) / m) for (layer, kind), told in read.items()
        )

    def loads(self) -> tuple[ExpertLoad, ...]:
        """Return the tokens of each expert."""
        sums = {layer: torch.stack([torch.stack(pair) for pair in told]).sum(0) for layer, told in self._loads.items()}
        if not sums:
            return ()
        numbers = iter(torch.cat([each.flatten() for each in sums.values()]).tolist())
        loads = []
        for layer, each in sums.items():
            asked, dropped = (tuple(int(next(numbers)) for _ in range(each.shape[1])) for _ in range(2))
            loads.append(ExpertLoad(layer, asked, dropped))
        return tuple(loads)

    def asked(self, layer: str, experts: int) -> Tensor:
        """Return how many tokens have chosen each expert of a layer: (E,) int64 on the CPU, zeros if none were told."""
        told = self._loads.get(layer)
        if not told:
            return torch.zeros(experts, dtype=torch.int64)
        return torch.stack([asked for asked, _ in told]).sum(0).to("cpu", torch.int64)

    def not_finite(self) -> tuple[str, int] | None:
        """Return the first router whose scores had NaN or infinity, in the order of the calls, and the microbatch."""
        return next(
            (
                (layer, microbatch)
                for layer, told in _read(self._scores).items()
                for microbatch, total in told
                if not math.isfinite(total)
            ),
            None,
        )

    def _attach(self, x: Tensor, loss: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and loss.requires_grad):
            return x
        attached: Tensor = _Attach.apply(x, loss.float(), self)  # type: ignore[no-untyped-call]
        return attached


class Routed:
    """Mixin for modules that tell something of a step: a stage gives them the record and their name.

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
        is_balanced: Whether it is changed so.
    """

    num_experts: int
    is_balanced: bool

    def balance(self, asked_E: Tensor) -> None:
        """Change the router, which must be a function of its buffers and of the argument only.

        Args:
            asked_E: (E,) int64 on the CPU: how many tokens of the step, over all replicas, have chosen each expert.
        """
        raise NotImplementedError


def attach_loss(x: Tensor, loss: Tensor, record: RouterRecord | None) -> Tensor:
    """Add an auxiliary loss to the objective of the step.

    The objective is the loss plus the sum of all auxiliary losses, each a mean over the microbatches of the step. The
    backward that goes through the returned tensor gives ``loss`` the gradient ``record.weight``, as an extra root of
    the stage's backward would. So the gradient of the loss comes about where a microbatch's backward passes: with
    recomputation, with split backwards, and on any pipeline stage.

    Args:
        x: An output of the module, of any shape and floating dtype, that the loss of the model depends on.
        loss: The auxiliary loss, a scalar, best in fp32. For a microbatch.
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
        return x.detach()  # no view of x for autograd, which would forbid to write into it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, device = ctx.like
        return gradient, torch.full(shape, ctx.record.weight, device=device), None


def _read(table: Mapping[Any, list[tuple[int, Tensor]]]) -> dict[Any, list[tuple[int, float]]]:
    """Read the values of a table all at once, because on a GPU reading waits for the computation."""
    values = [value.reshape(()) for told in table.values() for _, value in told]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return {key: [(microbatch, next(numbers)) for microbatch, _ in told] for key, told in table.items()}
