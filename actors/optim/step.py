"""The end of a step: sum the gradients of tied weights, count the votes, clip by the global norm, run the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group
from raypar.actors.data.batches import correction
from raypar.actors.errors import NonFiniteError
from raypar.actors.models.tied_weights import Ends
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.lr import lr_at
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.optimizer import (
    OffloadedOptimizer,
    Optimizer,
    build_optimizer,
    gradient_norm,
    load_state,
    reserve_states,
    set_lr,
    state_tensors,
)
from raypar.actors.optim.votes import GradientTally, PendingReport, ReportedGradients
from raypar.actors.optim.weight_average import WeightAverage
from raypar.actors.specs.precision import FP16_MAX
from raypar.actors.specs.results import Updated
from raypar.actors.specs.run import Run
from raypar.actors.tensor_parallel.gradients import ShardedGradients

_TIE_TAG = 1 << 30  # tag of the first message about tied weights, above every tag of a schedule's messages


class ParameterUpdate(Protocol):
    """The interface of the end of a step on a worker, after the gradients are summed over the replicas.

    The methods are those of ``Updater``.
    """

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Update the weights, or raise NonFiniteError."""

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer's state for a checkpoint."""

    def load(self, read: Read) -> None:
        """Load the optimizer's state from a checkpoint."""

    def use_averages(self, *, use: bool) -> None:
        """Replace the weights by their averages, or restore them."""


@dataclass(eq=False)
class Updater:
    """Optimizer of the parameters that one actor owns. All actors that own parts of the model step together.

    Attributes:
        masters: The weights that this actor updates.
        names: Names of all logical parameters of the model. Every layout sums the global norm in this order, so that it
            has the same bits.
        ties: Tied weights whose two ends are on different ranks. Both ends get the sum of the gradients, and the same
            update.
        group: All actors that update parts of one model: the ranks of the pipeline, or all servers. None if there is
            only one.
        tensors: The parameters that a tensor-parallel group shards, and the gradients that it must sum.
        reports: The numbers that this actor reports to the group.
        run: The run, with the settings of the optimizer.
        scaler: The scale of the loss.
        reached: Parameters that must have a gradient in the first update; others are reported.
    """

    masters: Masters
    names: Sequence[str]
    ties: Sequence[Ends]
    group: Group | None
    tensors: ShardedGradients
    reports: ReportedGradients
    run: Run
    scaler: LossScaler
    reached: Collection[str]

    def __post_init__(self) -> None:
        storage, self._parameters = self.masters.storage, self.masters.parameters
        self._positions = {name: position for position, name in enumerate(self.names)}
        self._optimizer: Optimizer | None = build_optimizer(
            self.run.optim, self._parameters, self.tensors, self.masters.shapes
        )
        if storage.is_off_device and self._optimizer is not None:
            self._optimizer = OffloadedOptimizer(self._optimizer, storage)
            reserve_states(storage, self.run.optim, self._parameters)
        self._average = None if self.run.ema is None else WeightAverage(self.run.ema, self.masters)

    def step(self, step: int, ballot: Tensor | None, change: Callable[[], object] | None = None) -> Updated:
        """Clip the gradients and update the parameters, unless a gradient or a loss is not finite on any actor.

        A step without targets changes nothing: no weight, no state of the optimizer, no scale of the loss.

        Args:
            step: Number of the step, from 0.
            ballot: Sum of ``ballot_of`` over the replicas, (3,) float64, if this actor has it. Exactly one member of
                the group reports it.
            change: Changes the gradients after their norm is known, directly before the update; None for no change.

        Returns:
            The global gradient norm before clipping, the learning rate of the update, the scale of the loss, and
            whether the step is skipped.

        Raises:
            NonFiniteError: The norm is not finite, or a replica voted no. Every actor raises it, and no actor changes
                a weight.
        """
        self._prepare()
        return self._decide(step, ballot, self._count(ballot), change)

    def begin(self, ballot: Tensor | None) -> PendingReport:
        """Start to sum the gradients' norms over the group. ``conclude`` ends the step with the sum.

        Args:
            ballot: As in ``step``.
        """
        self._prepare()
        known, numbers = self._numbers(ballot)
        own = GradientTally.of(known)  # equal on all actors of a stage, so that all of them update, or none
        is_plain = self._is_plain(own if ballot is not None else own._replace(correction=1.0))
        handle = None if self.group is None else self.group.host.all_reduce(numbers)
        return PendingReport(ballot, numbers, handle, is_plain)

    def apply(self, step: int) -> float:
        """Update the parameters by their gradients, unchanged, and return the learning rate."""
        lr = lr_at(self.run.optim, step - self.scaler.skipped, self.run.steps)
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)
            self._optimizer.step()
        if self._average is not None:
            self._average.update()
        self.masters.publish()
        self.masters.storage.check()
        return lr

    def conclude(self, step: int, vote: PendingReport, undo: Callable[[], object]) -> tuple[Updated, bool]:
        """Wait for the reports of all actors, and set the weights to those that ``step`` would compute.

        Args:
            step: Number of the step.
            vote: The result of ``begin``; the parameters were updated with ``apply`` if it ``is_plain``.
            undo: Restores weights and states before ``apply``.

        Returns:
            The result of ``step``, and whether the weights are those of ``apply``.

        Raises:
            NonFiniteError: As ``step``; no weight is changed then.
        """
        if vote.handle is not None:
            vote.handle.wait()
        tally = GradientTally.of(vote.numbers)
        if vote.is_plain and self._is_plain(tally):
            scale = self.scaler.scale if self.scaler.is_on else None
            lr = lr_at(self.run.optim, step - self.scaler.skipped, self.run.steps)
            self.scaler.grow()
            return Updated(float(torch.linalg.vector_norm(tally.norms)), lr, scale, unreached=self._unreached()), True
        if vote.is_plain:
            undo()
        return self._decide(step, vote.ballot, tally), False

    def _prepare(self) -> None:
        """Complete the gradients of masters: unscale them, and sum them over tensor groups and ties."""
        self.masters.take_gradients(1.0 / self.scaler.scale)
        self.tensors.complete(self._parameters)
        self._reduce_ties()

    def _is_plain(self, tally: GradientTally) -> bool:
        """Return whether the update uses the gradients unchanged: finite, uncorrected and within the clip."""
        total = torch.linalg.vector_norm(tally.norms)
        fits = self.run.clip is None or not bool(self.run.clip / (total + 1e-6) < 1.0)
        return tally.is_finite and tally.correction == 1.0 and bool(torch.isfinite(total)) and fits

    def _decide(
        self, step: int, ballot: Tensor | None, tally: GradientTally, change: Callable[[], object] | None = None
    ) -> Updated:
        """Clip the gradients and update the parameters, or skip the step, by the sum of all reports; see ``step``."""
        scale = self.scaler.scale if self.scaler.is_on else None
        if tally.correction == 0.0:  # the step has no targets
            return Updated(float(torch.linalg.vector_norm(tally.norms)), None, scale, is_skipped=True)
        overflow = not tally.is_finite
        if overflow and self.scaler.clamps:
            most = FP16_MAX / self.scaler.scale
            self._change_gradients(lambda gradient: gradient.nan_to_num_(math.nan, most, -most))
            tally = self._count(ballot)
        if tally.correction != 1.0:
            self._change_gradients(lambda gradient: gradient.mul_(tally.correction))
            tally = self._count(ballot)
        total = torch.linalg.vector_norm(tally.norms)
        if not tally.is_finite or not torch.isfinite(total):
            self._skip_or_raise(step, tally)
            return Updated(float(total), None, scale, is_skipped=True)
        if self.run.clip is not None and (share := self.run.clip / (total + 1e-6)) < 1.0:  # as torch's clip_grad_norm_
            self._change_gradients(lambda gradient: gradient.mul_(share.to(gradient.device)))
        if change is not None:
            change()
        unreached = self._unreached()
        lr = self.apply(step)
        if overflow:
            self.scaler.fall()
        else:
            self.scaler.grow()
        return Updated(float(total), lr, scale, unreached=unreached)

    def _unreached(self) -> tuple[str, ...]:
        """Return, once, the parameters without a gradient that should have one."""
        names, self.reached = self.reached, ()
        return tuple(name for name, parameter in self._parameters.items() if name in names and parameter.grad is None)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield this actor's parameters and their optimizer state: (logical name, key, tensor).

        The key is "" for the parameter itself, else the optimizer's state key, such as ``exp_avg``.
        """
        yield from ((name, "", parameter) for name, parameter in self._parameters.items())
        if self._optimizer is not None:
            yield from state_tensors(self._optimizer, self._parameters)
        if self._average is not None:
            yield from self._average.state()

    def load(self, read: Read) -> None:
        """Load saved optimizer state. The parameters themselves are loaded by the stages that hold them.

        Args:
            read: Returns the saved tensor for (logical name, state key), or None.
        """
        if self._optimizer is not None:
            load_state(self._optimizer, self.run.optim.kind, self._parameters, self.masters.storage, read)
        if self._average is not None:
            self._average.load(read)

    def use_averages(self, *, use: bool) -> None:
        """Replace the weights by their averages, or restore them. No step may begin in between.

        Args:
            use: Whether to use the averages; a repeated call does nothing.
        """
        if self._average is not None:
            self._average.use(use=use)

    def _skip_or_raise(self, step: int, tally: GradientTally) -> None:
        """Skip a step that is not finite: lower the scale of the loss, if it can fall.

        Raises:
            NonFiniteError: It can't fall, and the run does not skip such steps.
        """
        if self.scaler.can_fall or self.run.nonfinite == "skip":
            self.scaler.skipped += 1
            self.scaler.fall()
            return
        pairs = zip(self.names, tally.norms.tolist(), strict=True)
        bad = [name for name, norm in pairs if not norm < float("inf")]
        if tally.against:
            nor = f", nor are the gradients of {len(bad)} of {len(self.names)} parameters ({bad[0]})" if bad else ""
            or_lower = ", or lower the learning rate" if bad else ""
            raise NonFiniteError(
                f"step {step + 1}: the loss is not finite{nor}; no weight was changed: look at the batch{or_lower}"
            )
        fix = "lower the learning rate or clip"
        if self.scaler.is_on:
            fix = f"the scale of the loss, {self.scaler.scale:g}, is at its floor: lower loss_scale.floor, or {fix}"
        raise NonFiniteError(
            f"step {step + 1}: the gradient of {bad[0] if bad else 'the whole model'} is not finite "
            f"({len(bad)} of {len(self.names)} parameters); no weight was changed: {fix}"
        )

    def _change_gradients(self, change: Callable[[Tensor], object]) -> None:
        """Change all gradients in place."""
        for _, _, gradient in self.masters.with_gradients(writes=True):
            change(gradient)

    def _count(self, ballot: Tensor | None) -> GradientTally:
        """Collect the gradient norms, the loss correction and the votes from all actors.

        Each of these numbers is known to one actor and zero on the others, so the all_reduce is exact to the last bit.
        Only votes are sums.

        Args:
            ballot: As in ``step``.
        """
        _, numbers = self._numbers(ballot)
        if self.group is not None:
            self.group.host.all_reduce(numbers).wait()
        return GradientTally.of(numbers)

    def _numbers(self, ballot: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of this actor, and those of them that it reports to the group.

        Each tensor has the squares of the norms in the order of the names, correction, votes against and overflows; 0
        where there is none. Replicas that have different parts of a gradient add their squares.
        """
        numbers = torch.zeros(len(self.names) + 3, dtype=torch.float64)
        if ballot is not None:
            tokens, expected, against = ballot.tolist()
            numbers[-3], numbers[-2] = torch.tensor(correction(tokens, expected)), against
        own = {
            name: gradient_norm(gradient)
            for name, _, gradient in self.masters.with_gradients()
            if name in self._positions
        }
        norms = torch.zeros(len(self.names))
        if own:
            norms[[self._positions[name] for name in own]] = torch.stack(list(own.values())).cpu()
        whole, numbers[-1] = self.tensors.norms(self.names, norms)
        numbers[:-3] = whole.double().square()
        reported = numbers.clone()
        if self.reports.names is not None:
            left_out = [at for name, at in self._positions.items() if name not in self.reports.names]
            reported[left_out] = 0.0
        if not self.reports.ballot:
            reported[-3:-1] = 0.0
        return numbers, reported

    def _reduce_ties(self) -> None:
        """Sum the gradients of each tied weight over its ranks.

        The ranks with the original weight add the copies' gradients to theirs, in the order of the ties, and send the
        sum back to each.
        """
        if self.group is None or not self.ties:
            return
        ties = [(number, tie) for number, tie in self._used_ties(self.group) if self._has_end_of(tie)]
        for number, tie in ties:
            self._pass_gradient(self.group, tie.reversed(), _TIE_TAG + 2 * number, adds=True)
        for number, tie in ties:
            self._pass_gradient(self.group, tie, _TIE_TAG + 2 * number + 1, adds=False)

    def _pass_gradient(self, group: Group, tie: Ends, tag: int, *, adds: bool) -> None:
        """Send a gradient from the originals of a tie to its copies.

        Args:
            group: The group of the members.
            tie: The tie.
            tag: Tag of the messages.
            adds: Whether the gradient is added to that of the copies, and does not replace it.
        """
        if group.rank in tie.originals:
            with self._gradient(tie.original, group) as gradient:
                for index, copy in enumerate(tie.copies):
                    if tie.original_for(index) == group.rank:
                        group.send(gradient, copy, tag, "send tied").wait()
        elif group.rank in tie.copies:
            with self._gradient(tie.copy, group) as gradient:
                received = torch.empty_like(gradient) if adds else gradient
                group.recv(received, tie.original_for(tie.copies.index(group.rank)), tag, "recv tied").wait()
                if adds:
                    gradient.add_(received)

    def _used_ties(self, group: Group) -> list[tuple[int, Ends]]:
        """Return the ties (with their indices) of the weights for which some rank has a gradient.

        All other ties are left out, so that a weight that no microbatch used keeps the gradient None on every rank.
        """
        counts = torch.zeros(len(self.ties), dtype=torch.int64)
        for number, tie in enumerate(self.ties):
            ends = (tie.originals, tie.original), (tie.copies, tie.copy)
            here = (self._parameters[name] for at, name in ends if group.rank in at and name in self._parameters)
            counts[number] = sum(parameter.grad is not None for parameter in here)
        group.host.all_reduce(counts).wait()
        used = {tie.original for tie, count in zip(self.ties, counts.tolist(), strict=True) if count}
        return [(number, tie) for number, tie in enumerate(self.ties) if tie.original in used]

    def _has_end_of(self, tie: Ends) -> bool:
        """Return whether this actor updates an end of a tie; with many replicas, some have no part of a weight."""
        return tie.original in self._parameters or tie.copy in self._parameters

    @contextmanager
    def _gradient(self, name: str, group: Group) -> Iterator[Tensor]:
        """Yield a parameter's gradient on a group's device, and write changes of it back.

        If the gradient is None, it is set to zeros first.
        """
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad(), self.masters.storage.accessible([parameter.grad], writes=True):
            gradient = parameter.grad.to(group.device)
            yield gradient
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)
