"""The steps of an asynchronous schedule on one actor, whose stages update independently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch

from raypar.actors.data_parallel.reducer import Reducer
from raypar.actors.errors import NonFiniteError
from raypar.actors.machine.high_water import HighWater
from raypar.actors.optim.delay_feedback import DelayFeedback
from raypar.actors.optim.votes import ballot_of
from raypar.actors.pipeline.weight_versions import WeightVersions
from raypar.actors.worker.build.flow import StageExchange, numbers_of, stage_of
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.actors.worker.state import SpeculativeUpdate, WorkerState
from raypar.schedules.action import Action, Op
from raypar.schedules.versions import versions_used


@dataclass(eq=False)
class Stream:
    """The updates of an actor's stages in an asynchronous schedule, and the versions of their weights.

    Attributes:
        context: The actor's rank, device and groups.
        state: Its weights and optimizer state.
        flow: The inputs and outputs of the stages.
        reducer: Sums gradients over replicas; None if there are none.
        row: The row of the steps under way, at first that of the training schedule.
        older: Bytes of versions other than the newest ones.
    """

    context: RankContext
    state: WorkerState
    flow: StageExchange
    reducer: Reducer | None
    row: Sequence[Action]
    older: HighWater = field(default_factory=HighWater)
    _speculative: SpeculativeUpdate | None = None
    _stale: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._is_validated = any(action.op is Op.VALIDATE for action in self.row)
        stages = self.state.stages.items()
        self._versions = {number: WeightVersions(one.modules, self.row, number) for number, one in stages}
        self._feedback = DelayFeedback(self.state.masters) if self.context.plan.run.delay_feedback else None

    def begin(self, row: Sequence[Action]) -> None:
        """Begin the steps of a row."""
        self.row, self._speculative = row, None
        for versions in self._versions.values():
            versions.begin(row)
        if self._feedback is not None:
            self._feedback.begin()
            self._stale = self._stale_steps(row)
        self.older.add(-self.older.now)
        self.older.begin()

    def using(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for an F, B, I or W, in which its stage has the microbatch's version of its weights."""
        return self._of(action).using(action)

    def update(self, action: Action, step: StepState) -> None:
        """Finish the reduction of the gradients of a step, and update the weights of one stage.

        Args:
            action: The STEP.
            step: The state of the steps under way; the update is added to its own.

        Raises:
            ValueError: A loss of the step or a gradient of the stage is not finite, or the step's number of
                targets is not the one for which its losses are weighted.
        """
        assert action.microbatch is not None
        number = step.number + action.microbatch
        if self.reducer is not None:
            self.reducer.finish()
        self.context.synchronize()  # so that a failed message cannot reach the weights
        if self.reducer is not None:
            self.reducer.hand_over()
        step.copy_losses(self.context.device)
        microbatches = range(action.microbatch * step.length, (action.microbatch + 1) * step.length)
        ballot = self.flow.ballot(microbatches)
        if self._is_validated:
            if self.reducer is not None and ballot is not None:
                self.reducer.total(ballot)  # all replicas correct their gradients by the targets of all
            with self._of(action).updating(action):
                self._speculative = self.state.begin_update(number, ballot)
            return
        if ballot is None:
            ballot = ballot_of(1, 1.0, sound=True)  # only the last stage has losses
        if ballot[0] != ballot[1]:
            raise ValueError(
                f"step {number + 1} has {ballot[0]:.0f} targets, not {ballot[1]:.0f} as in the run's first microbatch: "
                "in an asynchronous schedule all microbatches have as many; use a synchronous one, as 1f1b"
            )
        versions = self._of(action)
        change = None
        if self._feedback is not None:
            change = partial(self._feedback.extend, is_stale=action.microbatch in self._stale)
        try:
            with versions.updating(action):
                step.updates.append(self.state.take(number, lambda: ballot, change))
        except NonFiniteError as error:
            message = str(error).replace("no weight was changed", "other stages may have updated already")
            raise ValueError(f"{message}, and resume from the last checkpoint") from None
        self.older.add(sum(one.older_bytes for one in self._versions.values()) - self.older.now)
        self._go_on(action)

    def validate(self, action: Action, step: StepState) -> Iterator[Action]:
        """Find out whether an update was right, and repeat it if it was not.

        Args:
            action: The VALIDATE.
            step: The state of the steps under way; the update is added to its own.

        Returns:
            The actions since the STEP that have to be performed again.

        Raises:
            ValueError: As ``update`` does.
        """
        assert self._speculative is not None
        try:
            updated, is_right = self.state.conclude_update(self._speculative)
        except NonFiniteError as error:
            message = str(error).replace("no weight was changed", "other steps of the stream are not reported")
            raise ValueError(f"{message}, and resume from the last checkpoint") from None
        step.updates.append(updated)
        self._speculative = None
        self._go_on(action)
        if is_right:
            return iter(())
        made = self.row.index(action._replace(op=Op.STEP))
        return iter(self.row[made + 1 : self.row.index(action)])

    def _stale_steps(self, row: Sequence[Action]) -> set[int]:
        """Return the steps of a row with microbatches that use older weights than those that the update changes.

        Where replicas have other microbatches in their rows, a step is stale for all if it is for one.
        """
        steps = [numbers_of(action)[1] for action in row if action.op is Op.STEP]
        length, stale = self.context.plan.programs["train"].numbers_a_step, torch.zeros(max(steps) + 1)
        for number in self._versions:
            for microbatch, version in versions_used(row, number).items():
                stale[microbatch // length] += version < microbatch // length
        if self.context.world.mesh.is_uneven:
            self.context.sum_ahead(stale)
        return {step for step in steps if stale[step] > 0}

    def _go_on(self, action: Action) -> None:
        """Drop the gradients before the next step; those of the last step stay for inspection."""
        if action._replace(op=Op.STEP, microbatch=(action.microbatch or 0) + 1) in self.row:
            self.state.zero_grad()
            if self.reducer is not None:
                self.reducer.begin()

    def _of(self, action: Action) -> WeightVersions:
        return self._versions[stage_of(action)]
