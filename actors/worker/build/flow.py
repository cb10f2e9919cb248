"""The flow of values through the stages of an actor: batches, values between stages, gradients and losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.actors.data.batches import BatchSource, TokenMean, correction
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.votes import ballot_of
from raypar.actors.pipeline.stage import Stage
from raypar.actors.tensors import Values, nbytes
from raypar.actors.worker.build.program import Program
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.schedules.action import SENDS, Action, Op
from raypar.schedules.rules import provides, taken


class StageExchange:
    """Supplies the inputs of an actor's stages, and takes their outputs. One object serves all steps of a run.

    This class is the flow of an expert actor, which exchanges tokens inside its layers: there are no losses.

    Args:
        inputs: The inputs of each forward and backward; those of an expert actor have no rows.
    """

    def __init__(self, inputs: Values = ()) -> None:
        self._inputs = inputs

    def begin(self, step: StepState, program: Program) -> None:
        """Begin a step."""

    def auxiliary(self, microbatch: int) -> float:
        """Return the weight of a microbatch's auxiliary losses, before its step's gradients are corrected."""
        return 0.0

    def inputs(self, action: Action) -> tuple[Values, Values]:
        """Return the inputs of a forward (a batch, or the outputs of the stage before), and the last stage's targets.

        If no target counts, there are none.
        """
        return self._inputs, ()

    def made(self, action: Action, outputs: Values) -> None:
        """Take the outputs of a forward."""

    def gradients(self, action: Action) -> Values:
        """Return the gradients of a stage's outputs, with which its backward (B or I) begins."""
        return self._inputs

    def passed(self, action: Action, gradients: Values) -> None:
        """Take the gradients of a stage's inputs that its backward (B or I) has computed."""

    def send(self, action: Action) -> None:
        """Send the outputs of F or I to the peer, and drop them."""

    def expect(self, action: Action) -> None:
        """Post a receive before its turn in the row."""

    def receive(self, action: Action) -> None:
        """Wait for the values that the peer sends."""

    def ballot(self, microbatches: Collection[int]) -> Tensor | None:
        """Return this actor's report of a step's losses, see ``ballot_of``; None if it computes no loss."""
        return None

    def seen(self, action: Action) -> Values:
        """Return the outputs of an action that was just performed: values for other actions, or its loss."""
        return ()


@dataclass(eq=False)
class TokenFlow(StageExchange):
    """The flow of an actor that has tokens.

    Attributes:
        context: The actor's rank, device and groups.
        stages: Its stages by number.
        source: The batches.
        mean: The weights of the microbatches in the loss.
        scaler: The scale of the loss.
        counts_ahead: Whether a step's targets are counted before its first forward, for the weight of auxiliary losses.
    """

    context: RankContext
    stages: Mapping[int, Stage]
    source: BatchSource
    mean: TokenMean
    scaler: LossScaler
    counts_ahead: bool
    _corrections: list[float] = field(default_factory=list)  # by step under way
    _sources: dict[Action, tuple[Action, ...]] = field(default_factory=dict)  # by action, those whose values it takes

    def begin(self, step: StepState, program: Program) -> None:
        self._step, self._program = step, program
        if self.counts_ahead and step.is_train:
            self._corrections = self._corrections_ahead(step, program)

    def auxiliary(self, microbatch: int) -> float:
        """Return the weight, so that after the correction by the step's targets it is the same share of every step."""
        weight = self.mean.auxiliary(self.scaler.scale)
        if not self._corrections:
            return weight
        factor = self._corrections[microbatch // self._step.length]
        return weight / factor if factor else 0.0

    def inputs(self, action: Action) -> tuple[Values, Values]:
        """Return the inputs; the first stage reads the inputs of the batch, the last one the targets."""
        step, (stage, microbatch) = self._step, numbers_of(action)
        number, index = step.step_and_index(microbatch)
        number += self.scaler.left_out if step.is_train else 0
        batch = step.program, number, index, self.context.replica(step.further)
        inputs = self._take(action) or self.context.device.to(self.source.inputs(*batch))
        if not self.stages[stage].is_last:
            return inputs, ()
        target = self.source.targets(*batch)
        counted = step.counts[microbatch] = self.stages[stage].model.count(target)
        step.samples += len(target[0]) if target[0].dim() else 1
        return inputs, self.context.device.to(target) if counted else ()

    def made(self, action: Action, outputs: Values) -> None:
        """Keep the outputs of a forward: the loss and the metrics of the last stage, or values for later stages."""
        stage, microbatch = numbers_of(action)
        if self.stages[stage].is_last:
            self._step.computed[microbatch] = outputs[0]
            if len(outputs) > 1:
                self._step.metrics[microbatch] = outputs[1]
            return
        self._step.values[action], skipped = self.stages[stage].ends.given(outputs)
        for target, values in skipped.items():
            self._step.values[action._replace(peer=target)] = values

    def gradients(self, action: Action) -> Values:
        """Return the gradients; for the last stage, the weight of the loss, which is proportional to its tokens."""
        stage, microbatch = numbers_of(action)
        if not self.stages[stage].is_last:
            return self._take(action)
        return self.context.device.to((self.mean.weight(self._step.counts[microbatch], self.scaler.scale),))

    def passed(self, action: Action, gradients: Values) -> None:
        if (stage := numbers_of(action)[0]) > 0:
            backward = Action(stage, Op.I, action.microbatch)
            self._step.values[backward], skipped = self.stages[stage].ends.divided_gradients(gradients)
            for source, values in skipped.items():
                self._step.values[backward._replace(peer=source)] = values

    def send(self, action: Action) -> None:
        values = self._take(action)
        self._step.num_bytes = sum(map(nbytes, values))
        self._program.courier.send(action, values)

    def expect(self, action: Action) -> None:
        self._program.courier.expect(action)

    def receive(self, action: Action) -> None:
        values = self._step.values[action] = self._program.courier.receive(action)
        self._step.num_bytes = sum(map(nbytes, values))

    def ballot(self, microbatches: Collection[int]) -> Tensor | None:
        """Return the report; of several replicas of the last stage, each reports its microbatches."""
        if not any(stage.is_last for stage in self.stages.values()):
            return None
        step = self._step
        step.read_losses()
        own = [microbatch for microbatch in microbatches if microbatch in step.counts]
        sound = all(math.isfinite(step.losses[microbatch]) for microbatch in own)
        tokens = sum(map(step.counts.__getitem__, own))
        return ballot_of(tokens, self._expected(len(own), len(microbatches)), sound=sound)

    def seen(self, action: Action) -> Values:
        computed, values = self._step.computed, self._step.values
        if action.op is Op.F and action.microbatch in computed and self.stages[numbers_of(action)[0]].is_last:
            return (computed[action.microbatch],)
        return next((values[value] for value in provides(action) if value in values), ())

    def _expected(self, own: int, microbatches: int) -> float:
        """Return the targets for which this actor's losses are weighted, if it has ``own`` of a step's microbatches."""
        return self.mean.expected * own // microbatches / self.context.world.mesh.cp

    def _corrections_ahead(self, step: StepState, program: Program) -> list[float]:
        """Return the factor by which the gradients of each step that begins will be corrected.

        Every actor counts the targets of its replica, and replicas sum the counts.
        """
        own = sorted({numbers_of(action)[1] for action in program.row if action.op is Op.F})
        steps = range(program.schedule.stream or 1)
        counted = torch.zeros(len(steps), 2, dtype=torch.float64)
        replicas = (
            range(self.context.world.mesh.dp) if self.context.world.servers else [self.context.replica(step.further)]
        )
        for number in steps:
            here = [microbatch for microbatch in own if microbatch // step.length == number]
            for dp in replicas:
                tokens = [self._count(step, microbatch, dp) for microbatch in here]
                counted[number] += torch.tensor([sum(tokens), self._expected(len(here), step.length)])
        self.context.sum_ahead(counted)
        return [correction(tokens, expected) for tokens, expected in counted.tolist()]

    def _count(self, step: StepState, microbatch: int, dp: int) -> int:
        """Return the number of targets of a microbatch of a training step."""
        number, index = step.step_and_index(microbatch)
        return self.mean.count(self.source.targets("train", number + self.scaler.left_out, index, dp))

    def _take(self, action: Action) -> Values:
        """Remove and return the values that an action needs from other actions, in one tuple.

        Values that a backward needs from its forward are not among them: the stage keeps them.
        """
        sources = self._sources.get(action)
        if sources is None:
            if action.op in SENDS:
                sources = (action._replace(op=Op.F if action.op is Op.SEND_F else Op.I),)
            else:
                sources = taken(action, self._program.schedule)
            self._sources[action] = sources
        values: Values = ()
        for source in sources:
            values += self._step.values.pop(source)
        return values


def stage_of(action: Action) -> int:
    """Return the stage of an action that has one."""
    assert action.stage is not None
    return action.stage


def numbers_of(action: Action) -> tuple[int, int]:
    """Return the stage and the microbatch of an action that has both."""
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch
