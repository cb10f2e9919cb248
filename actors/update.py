"""The end of a step: tied gradients, the global norm, clipping and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.actors.group import Group
from raypar.actors.lr import lr_at
from raypar.actors.optim import build_optimizer, gradient_norm, set_lr
from raypar.actors.plan import NonFiniteError
from raypar.actors.specs import SGD, AdamW

_TIE_TAG = 1 << 30  # above every tag of a schedule's messages


@dataclass(frozen=True)
class Tie:
    """A logical weight with a home and a copy, and the pipeline ranks that hold them."""

    home: str
    home_rank: int
    copy: str
    copy_rank: int


class Updater:
    """The optimizer of one actor's parameters, in step with everybody else's.

    parameters  this actor's, by logical name
    names       every logical parameter of the model: the order in which the norm is added up, on every layout
    ties        between different ranks; both ends see the sum of the gradients and make the same update
    group       the pipeline's ranks; None if there is only one
    clip        largest global norm, None for no clipping
    steps       of the whole run, for the learning rate
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[str],
        ties: Sequence[Tie],
        group: Group | None,
        optim: AdamW | SGD,
        clip: float | None,
        steps: int,
    ) -> None:
        self._parameters, self._names, self._ties, self._group = parameters, names, ties, group
        self._spec, self._clip, self._steps = optim, clip, steps
        self._places = {name: place for place, name in enumerate(names)}
        self._optimizer = build_optimizer(optim, parameters)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, step: int, *, sound: bool = True) -> float:
        """Update the parameters; returns the global gradient norm before clipping.

        ``sound`` is this actor's vote: its losses are finite.

        Raises NonFiniteError, on every actor alike and before anybody has changed a weight, if the norm is not finite.
        """
        self._reduce_ties()
        norms, votes = self._all_norms(sound).split_with_sizes([len(self._names), 1])
        total = torch.linalg.vector_norm(norms)
        if not torch.isfinite(total):
            bad = [name for name, norm in zip(self._names, norms.tolist(), strict=True) if not norm < float("inf")]
            raise NonFiniteError(
                f"step {step}: the gradient of {bad[0] if bad else 'the whole model'} is not finite "
                f"({len(bad)} of {len(self._names)} parameters); no weight was changed: lower the learning rate or clip"
            )
        if votes.item() > 0:
            raise NonFiniteError(f"step {step}: the loss is not finite; no weight was changed: look at the batch")
        if self._clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clip, total, foreach=False)
        if self._optimizer is not None:
            set_lr(self._optimizer, lr_at(self._spec, step, self._steps))
            self._optimizer.step()
        return float(total)

    def _all_norms(self, sound: bool) -> Tensor:
        """The gradient norm of every logical parameter, in order, and behind them how many actors vote no.

        Each norm has one home, so adding zeros changes no bit.
        """
        norms = torch.zeros(len(self._names) + 1)
        norms[-1] = 0.0 if sound else 1.0
        for name, parameter in self._parameters.items():
            if name in self._places:
                norms[self._places[name]] = gradient_norm(parameter)
        if self._group is not None:
            self._group.all_reduce(norms).wait()
        return norms

    def _reduce_ties(self) -> None:
        """Home adds the copies' gradients to its own, in order, and sends the sum back."""
        if self._group is None:
            return
        rank = self._group.rank
        for number, tie in enumerate(self._ties):
            tag = _TIE_TAG + 2 * number
            if rank == tie.copy_rank:
                self._group.send(self._gradient(tie.copy), tie.home_rank, tag, "send tied").wait()
            elif rank == tie.home_rank:
                gradient = self._gradient(tie.home)
                other = torch.empty_like(gradient)
                self._group.recv(other, tie.copy_rank, tag, "recv tied").wait()
                gradient.add_(other)
        for number, tie in enumerate(self._ties):
            tag = _TIE_TAG + 2 * number + 1
            if rank == tie.home_rank:
                self._group.send(self._gradient(tie.home), tie.copy_rank, tag, "send tied").wait()
            elif rank == tie.copy_rank:
                self._group.recv(self._gradient(tie.copy), tie.home_rank, tag, "recv tied").wait()

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
