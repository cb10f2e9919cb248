"""The end of a step: sum the gradients of tied weights, count the votes, clip by the global norm, run the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import scale_each
from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group
from raypar.actors.data.batches import correction
from raypar.actors.errors import NonFiniteError
from raypar.actors.models.tied_weights import Ends
from raypar.actors.optim.block_norm import BlockNorms, GradientBlocks
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.lr import lr_at
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.muon.matrix_exchange import CutMatrices, DividedMatrices
from raypar.actors.optim.muon.muon_with_adamw import Optimizer
from raypar.actors.optim.optimizer import build_optimizer, load_state, reserve_states, set_lr, state_tensors
from raypar.actors.optim.votes import GradientTally, PendingReport, ReadBallot, ReportedGradients
from raypar.actors.optim.weight_average import WeightAverage
from raypar.actors.optim.whole_squares import whole_squares
from raypar.actors.specs.precision import FP16_MAX
from raypar.actors.specs.results import Updated
from raypar.actors.specs.run import Run
from raypar.actors.tensor_parallel.gradients import ShardedGradients

_TIE_TAG = 1 << 30  # tag of the first message about tied weights, above every tag of a schedule's messages


class ParameterUpdate(Protocol):
    """The interface of the end of a step on a worker, after the gradients are summed over the replicas.

    The methods are those of ``Updater``.
    """

    def step(self, step: int, ballot: ReadBallot) -> Updated:
        """Update the weights, or raise NonFiniteError."""

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer's state for a checkpoint."""

    def load(self, read: Read) -> None:
        """Load the optimizer's state from a checkpoint."""

    def use_averages(self, *, use: bool) -> None:
        """Replace the weights by their averages, or restore them."""


@dataclass(eq=False)
class Updater:
    """Optimizer of what one actor updates. All actors that update parts of the model step together.

    Attributes:
        masters: The weights that this actor updates.
        names: Names of all logical parameters of the model.
        ties: Tied weights whose two ends are on different ranks. Both ends get the sum of the gradients, and the same
            update.
        group: All actors that update parts of one model: the ranks of the pipeline, or all servers. None if there is
            only one.
        tensors: The parameters that a tensor-parallel group shards, and the gradients that it must sum.
        reports: The numbers that this actor reports to the group.
        experts: The parameters of experts that are divided over actors.
        run: The run, with the settings of the optimizer.
        scaler: The scale of the loss.
        reached: Parameters that must have a gradient in the first update; others are reported.
        cuts: How replicas divide the elements of matrices, for an optimizer that updates these as a whole.
    """

    masters: Masters
    names: Sequence[str]
    ties: Sequence[Ends]
    group: Group | None
    tensors: ShardedGradients
    reports: ReportedGradients
    experts: Collection[str]
    run: Run
    scaler: LossScaler
    reached: Collection[str]
    cuts: Sequence[CutMatrices] = ()

    def __post_init__(self) -> None:
        storage, self._parameters = self.masters.storage, self.masters.parameters
        self._logical = frozenset(self.names)
        elements = {name: math.prod(shape) for name, shape in self.masters.shapes.items()}
        self._blocks = GradientBlocks(self._parameters, elements)
        self._optimizer: Optimizer | None = build_optimizer(
            self.run.optim, self._parameters, DividedMatrices(self.tensors, self.cuts), self.masters.parts, storage
        )
        reserve_states(storage, self.run.optim, self._parameters, self.masters.shapes)
        self._average = None if self.run.ema is None else WeightAverage(self.run.ema, self.masters)

    def step(self, step: int, ballot: ReadBallot, change: Callable[[], object] | None = None) -> Updated:
        """Clip the gradients and update the parameters, unless a gradient or a loss is not finite on any actor.

        A step without targets changes nothing: no weight, no state of the optimizer, no scale of the loss.

        Args:
            step: Number of the step, from 0.
            ballot: The sum of ``ballot_of`` over the replicas. Exactly one member of the group reports it. It is
                called once, after the norms were read: on a GPU nothing is left to wait for then.
            change: Changes the gradients after their norm is known, directly before the update; None for no change.

        Returns:
            The global gradient norm before clipping, the learning rate of the update, the scale of the loss, and
            whether the step is skipped.

        Raises:
            NonFiniteError: The norm is not finite, or a replica voted no. Every actor raises it, and no actor changes
                a weight.
        """
        self._prepare()
        norms = self._block_norms()
        votes = ballot()
        return self._decide(step, votes, self._count(votes, norms), change)

    def begin(self, ballot: Tensor | None) -> PendingReport:
        """Start to sum the gradients' norms over the group. ``conclude`` ends the step with the sum.

        Args:
            ballot: The sum of ``ballot_of`` over the replicas, if this actor has it.
        """
        self._prepare()
        # The first is equal on all actors of a stage: all update, or none.
        own, reported = self._tallies(ballot, self._block_norms())
        is_plain = self._is_plain(own if ballot is not None else own._replace(correction=1.0))
        message = reported.message()
        handle = None if self.group is None else self.group.host.all_reduce(message)
        return PendingReport(ballot, message, handle, is_plain)

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
        tally = GradientTally.read(vote.message)
        if vote.is_plain and self._is_plain(tally):
            scale = self.scaler.scale if self.scaler.is_on else None
            lr = lr_at(self.run.optim, step - self.scaler.skipped, self.run.steps)
            self.scaler.grow()
            return Updated(float(tally.norm()), lr, scale, unreached=self._unreached()), True
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
        total = tally.norm()
        fits = self.run.clip is None or not bool(self.run.clip / (total + 1e-6) < 1.0)
        return tally.is_finite and tally.correction == 1.0 and bool(torch.isfinite(total)) and fits

    def _decide(
        self, step: int, ballot: Tensor | None, tally: GradientTally, change: Callable[[], object] | None = None
    ) -> Updated:
        """Clip the gradients and update the parameters, or skip the step, by the sum of all reports; see ``step``."""
        scale = self.scaler.scale if self.scaler.is_on else None
        if tally.correction == 0.0:  # the step has no targets
            return Updated(float(tally.norm()), None, scale, is_skipped=True)
        overflow = not tally.is_finite
        if overflow and self.scaler.clamps:
            most = FP16_MAX / self.scaler.scale
            for gradients in self.masters.gradients(writes=True):
                for gradient in gradients.values():
                    gradient.nan_to_num_(math.nan, most, -most)
            tally = self._count(ballot, self._block_norms())
        if tally.correction != 1.0:
            self._scale_gradients(tally.correction)
            tally = self._count(ballot, self._block_norms())
        total = tally.norm()
        if not tally.is_finite or not torch.isfinite(total):
            self._skip_or_raise(step, tally)
            return Updated(float(total), None, scale, is_skipped=True)
        if self.run.clip is not None and (share := self.run.clip / (total + 1e-6)) < 1.0:  # as torch's clip_grad_norm_
            self._scale_gradients(share)
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
        bad = self._bad_gradients()
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

    def _bad_gradients(self) -> list[str]:
        """Return the parameters whose gradients are not finite on any actor, in the order of the names.

        All actors call it at once, and only before they raise an error: its message grows with the model.
        """
        norms = self._block_norms()
        bad = torch.tensor([name in norms.names and not bool(norms.of(name).isfinite().all()) for name in self.names])
        counts = bad.long()
        for group in (self.tensors.group, self.group):
            if group is not None:
                group.host.all_reduce(counts).wait()
        return [name for name, count in zip(self.names, counts.tolist(), strict=True) if count]

    def _scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or by a tensor () on the host."""
        for gradients in self.masters.gradients(writes=True):
            own = list(gradients.values())
            scale_each(own, factor.to(own[0].device) if own and isinstance(factor, Tensor) else factor)

    def _count(self, ballot: Tensor | None, norms: BlockNorms) -> GradientTally:
        """Sum the gradient norms, the loss correction and the votes over all actors.

        The sums are those of integers, and one actor knows the correction, so no bit depends on the actors.

        Args:
            ballot: As in ``begin``.
            norms: The norms of this actor's gradients.
        """
        _, reported = self._tallies(ballot, norms)
        if self.group is None:
            return reported
        message = reported.message()
        self.group.host.all_reduce(message).wait()
        return GradientTally.read(message)

    def _tallies(self, ballot: Tensor | None, norms: BlockNorms) -> tuple[GradientTally, GradientTally]:
        """Return the report on all that this actor knows, and the part of it that it reports to the group."""
        dense, experts = whole_squares(norms, self.tensors, self.experts)
        own = GradientTally(dense + experts)
        if ballot is not None:
            tokens, expected, against = ballot.tolist()
            own = own._replace(correction=correction(tokens, expected), against=int(against))
        kinds = (dense, self.reports.dense), (experts, self.reports.experts)
        first, second = (squares if reports else squares.without_units() for squares, reports in kinds)
        reported = own._replace(squares=first + second)
        return own, reported if self.reports.ballot else reported._replace(correction=0.0, against=0)

    def _block_norms(self) -> BlockNorms:
        """Measure the gradients of this actor's parameters; copies of tied weights are left out."""
        return BlockNorms.joined(
            self._blocks.norms({name: one for name, one in gradients.items() if name in self._logical})
            for gradients in self.masters.gradients()
        )

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
