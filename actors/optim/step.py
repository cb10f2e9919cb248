"""End a step: sum the gradients of tied weights, count the votes, clip by the global norm, run the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
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
from raypar.actors.optim.offloaded import OffloadedOptimizer, reserve_states
from raypar.actors.optim.optimizer import Optimizer, build_optimizer, gradient_norm, keep, kept_by, set_lr
from raypar.actors.optim.votes import GradientTally, PendingReport, ReportedGradients
from raypar.actors.optim.weight_average import WeightAverage
from raypar.actors.specs.optim import AnyOptimizer
from raypar.actors.specs.precision import FP16_MAX, Nonfinite
from raypar.actors.specs.results import Updated
from raypar.actors.tensor_parallel.gradients import ShardedGradients

_TIE_TAG = 1 << 30  # tag of the first message about tied weights, above every tag of a schedule's messages


class ParameterUpdate(Protocol):
    """What a worker does at the end of a step, once the gradients are summed over the replicas.

    The methods are those of ``Updater``.
    """

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Update the weights, or raise NonFiniteError."""

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer's state for a checkpoint."""

    def load(self, read: Read) -> None:
        """Load the optimizer's state from a checkpoint."""

    def use_averages(self, *, use: bool) -> None:
        """Let the weights have their averages' values, or again their own."""


class Updater:
    """Optimizer of the parameters that one actor owns. All actors that own parts of the model step together.

    Args:
        masters: The weights that this actor updates.
        names: Names of all logical parameters of the model. Every layout sums the global norm in this order, so that it
            has the same bits.
        ties: Tied weights whose home and copy are on different ranks. Both ends get the sum of the gradients and make
            the same update.
        group: All actors that update parts of one model: the ranks of the pipeline, or all servers. None if there is
            only one.
        tensors: Which parameters a tensor-parallel group shards, and what it must sum.
        told: What of this actor's numbers counts.
        optim: Kind and settings of the optimizer.
        clip: Largest global gradient norm; None for no clipping.
        steps: Number of steps of the whole run; the learning rate depends on it.
        scaler: The scale of the loss.
        nonfinite: What becomes of a step that is not finite although the scale of the loss can't fall any more.
        ema: Decay of the moving average of the weights; None for no average.
        reached: Parameters that should have a gradient in the first update.
    """

    def __init__(
        self,
        masters: Masters,
        names: Sequence[str],
        ties: Sequence[Ends],
        group: Group | None,
        tensors: ShardedGradients,
        told: ReportedGradients,
        optim: AnyOptimizer,
        clip: float | None,
        steps: int,
        scaler: LossScaler,
        nonfinite: Nonfinite,
        ema: float | None = None,
        reached: Collection[str] = (),
    ) -> None:
        self._masters, self._parameters = masters, masters.parameters
        self._names, self._ties, self._group = names, ties, group
        self._scaler, self._nonfinite, self._told = scaler, nonfinite, told
        self._tensors = tensors
        self._spec = optim
        self._clip = clip
        self._steps = steps
        self._places = {name: place for place, name in enumerate(names)}
        self._optimizer: Optimizer | None = build_optimizer(optim, self._parameters, tensors)
        if masters.home.is_apart and self._optimizer is not None:
            self._optimizer = OffloadedOptimizer(self._optimizer, masters.home)
            reserve_states(masters.home, optim, self._parameters)
        self._average = None if ema is None else WeightAverage(ema, masters)
        self._reached = reached

    def step(self, step: int, ballot: Tensor | None, change: Callable[[], object] | None = None) -> Updated:
        """Clip the gradients and update the parameters, unless a gradient or a loss is not finite on any actor.

        A step without targets changes nothing either: no weight, no state of the optimizer, no scale of the loss.

        Args:
            step: Number of the step, from 0.
            ballot: Sum over the replicas of what ``ballot_of`` returns, (3,) float64, if this actor has it. Of exactly
                one member of the group it counts.
            change: Changes the gradients after their norm is known, right before the update; None: nothing does.

        Returns:
            The global gradient norm before clipping, the learning rate of the update, and the scale of the loss; or
            that the step is skipped.

        Raises:
            NonFiniteError: The norm is not finite, or a replica voted no. Every actor raises it, and no actor has
                changed a weight.
        """
        self._prepare()
        return self._decide(step, ballot, self._count(ballot), change)

    def begin(self, ballot: Tensor | None) -> PendingReport:
        """Tell the gradients' norms to the group, for a step whose outcome ``conclude`` says when all have told theirs.

        Args:
            ballot: As in ``step``.
        """
        self._prepare()
        known, numbers = self._numbers(ballot)
        own = GradientTally.of(
            known
        )  # alike on all that share a stage, though one of them reports it: they update together
        is_plain = self._is_plain(own if ballot is not None else own._replace(correction=1.0))
        handle = None if self._group is None else self._group.host.all_reduce(numbers)
        return PendingReport(ballot, numbers, handle, is_plain)

    def apply(self, step: int) -> float:
        """Update the parameters by their gradients as they are, and return the learning rate."""
        lr = lr_at(self._spec, step - self._scaler.skipped, self._steps)
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)
            self._optimizer.step()
        if self._average is not None:
            self._average.update()
        self._masters.publish()
        self._masters.home.check()
        return lr

    def conclude(self, step: int, vote: PendingReport, undo: Callable[[], object]) -> tuple[Updated, bool]:
        """Wait for the votes of all, and let the weights be those that ``step`` would have made.

        Args:
            step: Number of the step.
            vote: What ``begin`` returned; the parameters were updated with ``apply`` if it ``is_plain``.
            undo: Restores weights and states as they were before ``apply``.

        Returns:
            What ``step`` returns, and whether the weights are those of ``apply``.

        Raises:
            NonFiniteError: As ``step`` does; no weight is changed then.
        """
        if vote.handle is not None:
            vote.handle.wait()
        tally = GradientTally.of(vote.numbers)
        if vote.is_plain and self._is_plain(tally):
            scale = self._scaler.scale if self._scaler.is_on else None
            lr = lr_at(self._spec, step - self._scaler.skipped, self._steps)
            self._scaler.grow()
            return Updated(float(torch.linalg.vector_norm(tally.norms)), lr, scale, unreached=self._unreached()), True
        if vote.is_plain:
            undo()
        return self._decide(step, vote.ballot, tally), False

    def _prepare(self) -> None:
        """Bring the gradients of masters together: unscaled, summed over tensor groups and ties."""
        self._masters.take_gradients(1.0 / self._scaler.scale)
        self._tensors.complete(self._parameters)
        self._reduce_ties()

    def _is_plain(self, tally: GradientTally) -> bool:
        """Return whether the update takes the gradients as they are: finite, uncorrected and within the clip."""
        total = torch.linalg.vector_norm(tally.norms)
        fits = self._clip is None or not bool(self._clip / (total + 1e-6) < 1.0)
        return tally.is_finite and tally.correction == 1.0 and bool(torch.isfinite(total)) and fits

    def _decide(
        self, step: int, ballot: Tensor | None, tally: GradientTally, change: Callable[[], object] | None = None
    ) -> Updated:
        """Clip the gradients and update the parameters, or not, as all say; see ``step``."""
        scale = self._scaler.scale if self._scaler.is_on else None
        if tally.correction == 0.0:  # the step has no targets
            return Updated(float(torch.linalg.vector_norm(tally.norms)), None, scale, is_skipped=True)
        overflow = not tally.is_finite
        if overflow and self._scaler.clamps:
            most = FP16_MAX / self._scaler.scale
            self._change_gradients(lambda gradient: gradient.nan_to_num_(math.nan, most, -most))
            tally = self._count(ballot)
        if tally.correction != 1.0:
            self._change_gradients(lambda gradient: gradient.mul_(tally.correction))
            tally = self._count(ballot)
        total = torch.linalg.vector_norm(tally.norms)
        if not tally.is_finite or not torch.isfinite(total):
            self._refuse(step, tally)
            return Updated(float(total), None, scale, is_skipped=True)
        if self._clip is not None and (share := self._clip / (total + 1e-6)) < 1.0:  # as torch's clip_grad_norm_
            self._change_gradients(lambda gradient: gradient.mul_(share.to(gradient.device)))
        if change is not None:
            change()
        unreached = self._unreached()
        lr = self.apply(step)
        if overflow:
            self._scaler.fall()
        else:
            self._scaler.grow()
        return Updated(float(total), lr, scale, unreached=unreached)

    def _unreached(self) -> tuple[str, ...]:
        """Return, once, the parameters without a gradient that should have one."""
        asked, self._reached = self._reached, ()
        return tuple(name for name, parameter in self._parameters.items() if name in asked and parameter.grad is None)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield this actor's parameters and their optimizer state: (logical name, key, tensor).

        The key is "" for the parameter itself, else the optimizer's state key, such as ``exp_avg``.
        """
        yield from ((name, "", parameter) for name, parameter in self._parameters.items())
        if self._optimizer is not None:
            yield from kept_by(self._optimizer, self._parameters)
        if self._average is not None:
            yield from self._average.state()

    def load(self, read: Read) -> None:
        """Load saved optimizer state. The parameters themselves are loaded by the stages that hold them.

        Args:
            read: Returns the saved tensor for (logical name, state key), or None.
        """
        if self._optimizer is not None:
            keep(self._optimizer, self._spec.kind, self._parameters, self._masters.home, read)
        if self._average is not None:
            self._average.load(read)

    def use_averages(self, *, use: bool) -> None:
        """Let the weights have their averages' values, or again their own. No step may begin in between.

        Args:
            use: Whether to use the averages; a second call with the same does nothing.
        """
        if self._average is not None:
            self._average.use(use=use)

    def _refuse(self, step: int, tally: GradientTally) -> None:
        """Skip a step that is not finite: lower the scale of the loss, if it can fall.

        Raises:
            NonFiniteError: It can't fall, and the run does not skip such steps.
        """
        if self._scaler.can_fall or self._nonfinite == "skip":
            self._scaler.skipped += 1
            self._scaler.fall()
            return
        pairs = zip(self._names, tally.norms.tolist(), strict=True)
        bad = [name for name, norm in pairs if not norm < float("inf")]
        if tally.against:
            nor = f", nor are the gradients of {len(bad)} of {len(self._names)} parameters ({bad[0]})" if bad else ""
            or_lower = ", or lower the learning rate" if bad else ""
            told = f"step {step + 1}: the loss is not finite{nor}; no weight was changed: look at the batch{or_lower}"
            raise NonFiniteError(told)
        fix = "lower the learning rate or clip"
        if self._scaler.is_on:
            fix = f"the scale of the loss, {self._scaler.scale:g}, is at its floor: lower loss_scale.floor, or {fix}"
        raise NonFiniteError(
            f"step {step + 1}: the gradient of {bad[0] if bad else 'the whole model'} is not finite "
            f"({len(bad)} of {len(self._names)} parameters); no weight was changed: {fix}"
        )

    def _change_gradients(self, change: Callable[[Tensor], object]) -> None:
        """Change all gradients in place."""
        for _, _, gradient in self._masters.with_gradients(writes=True):
            change(gradient)

    def _count(self, ballot: Tensor | None) -> GradientTally:
        """Collect the gradient norms, the loss correction and the votes from all actors.

        Each of these numbers is known to one actor and zero on the others, so the all_reduce is exact to the last bit.
        Only votes are sums.

        Args:
            ballot: As in ``step``.
        """
        _, numbers = self._numbers(ballot)
        if self._group is not None:
            self._group.host.all_reduce(numbers).wait()
        return GradientTally.of(numbers)

    def _numbers(self, ballot: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what this actor knows and, in another tensor, what of that it reports to the group.

        Norms in the order of the names, correction, votes against, overflows; 0 where it knows, or reports, nothing.
        """
        numbers = torch.zeros(len(self._names) + 3)
        if ballot is not None:
            tokens, expected, against = ballot.tolist()
            numbers[-3], numbers[-2] = correction(tokens, expected), against
        made = {
            name: gradient_norm(gradient)
            for name, _, gradient in self._masters.with_gradients()
            if name in self._places
        }
        if made:
            norms, numbers[-1] = self._tensors.norms(list(made), torch.stack(list(made.values())).cpu())
            numbers[[self._places[name] for name in made]] = norms
        reported = numbers.clone()
        if self._told.names is not None:
            reported[[place for name, place in self._places.items() if name not in self._told.names]] = 0.0
        if not self._told.ballot:
            reported[-3:-1] = 0.0
        return numbers, reported

    def _reduce_ties(self) -> None:
        """Sum the gradients of each tied weight over its ranks.

        Those that hold the home add the copies' gradients to their own, in the order of the ties, and send the sum back
        to each.
        """
        if self._group is None or not self._ties:
            return
        group, rank, ties = self._group, self._group.rank, self._used_ties(self._group)
        for number, tie in ties:
            tag = _TIE_TAG + 2 * number
            if rank in tie.copies:
                with self._gradient(tie.copy, group) as gradient:
                    for place, home in enumerate(tie.homes):
                        if tie.copy_for(place) == rank:
                            group.send(gradient, home, tag, "send tied").wait()
            elif rank in tie.homes:
                with self._gradient(tie.home, group) as gradient:
                    other = torch.empty_like(gradient)
                    group.recv(other, tie.copy_for(tie.homes.index(rank)), tag, "recv tied").wait()
                    gradient.add_(other)
        for number, tie in ties:
            tag = _TIE_TAG + 2 * number + 1
            if rank in tie.homes:
                with self._gradient(tie.home, group) as gradient:
                    for place, copy in enumerate(tie.copies):
                        if tie.home_for(place) == rank:
                            group.send(gradient, copy, tag, "send tied").wait()
            elif rank in tie.copies:
                with self._gradient(tie.copy, group) as gradient:
                    group.recv(gradient, tie.home_for(tie.copies.index(rank)), tag, "recv tied").wait()

    def _used_ties(self, group: Group) -> list[tuple[int, Ends]]:
        """Return the ties (with their indices) of the weights for which some rank has a gradient.

        The others are left out, so that a weight that no microbatch used keeps the gradient None on every rank.
        """
        made = torch.zeros(len(self._ties), dtype=torch.int64)
        for number, tie in enumerate(self._ties):
            ends = (tie.homes, tie.home), (tie.copies, tie.copy)
            made[number] = sum(group.rank in at and self._parameters[name].grad is not None for at, name in ends)
        group.host.all_reduce(made).wait()
        used = {tie.home for tie, count in zip(self._ties, made.tolist(), strict=True) if count}
        return [(number, tie) for number, tie in enumerate(self._ties) if tie.home in used]

    @contextmanager
    def _gradient(self, name: str, group: Group) -> Iterator[Tensor]:
        """Yield a parameter's gradient on a group's device. What is written to it is the parameter's.

        If it is None, it is set to zeros first.
        """
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad(), self._masters.home.at_hand([parameter.grad], writes=True):
            gradient = parameter.grad.to(group.device)
            yield gradient
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)
