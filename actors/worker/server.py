"""The parameter server: an actor that keeps weights and their optimizer for the replicas of a pipeline rank."""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, GroupError
from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.step import Notes
from raypar.actors.optim.step import ballot_of
from raypar.actors.specs.results import Span, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.base import Member
from raypar.actors.worker.build import buckets_of, build_part, updater_of
from raypar.actors.worker.plan import Plan
from raypar.schedules.action import STEP, Action

_WHOLE_STEP = 1e6  # seconds: gradients come when the replicas have computed; who is late is told by others


class Server(Member):
    """Master weights and optimizer state of some of a pipeline rank's parameters (Li et al. 2014).

    In a step the replicas push their gradients, bucket by bucket, and the server sums them up. All servers of the run
    agree on norm and vote and update their weights, and the replicas pull them: each sends its gradients once, the
    server sends the weights once to each.
    """

    def setup(self, plan: Plan, groups: dict[str, Group]) -> None:
        """Build this server's share of a run; what an earlier run left is dropped.

        Raises UnequalReplicasError if a replica has made other weights of the same plan.
        """
        torch.set_num_threads(plan.run.threads)
        part, world = build_part(plan, self.prepare(plan), {}), plan.world
        index, train = world.server_index(plan.rank), plan.programs["train"]
        own = part.share(index)
        self._group = groups[f"ps{index}"]
        self._buckets = buckets_of(plan, part, own)
        self._counts_votes = index == 0 and train.placement[-1] == world.pp(plan.rank)  # see Reducer.total
        self._join(plan, groups, part, own, updater_of(plan, part, own, groups))
        self._connect(part.ties)
        self._compare(index, own)

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Serve a whole step; an evaluation needs no server. Raises StaleError if it is of an earlier epoch."""
        self._demand_current(epoch)
        self.begin(program, step)
        if program == "train":
            self.perform(STEP)
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""
        self._place.enter()
        self._number, self._train = step, program == "train"
        self._grad_norm: float | None = None
        self._events, self._notes = [], None
        if self._train:
            self._zero_grad()
        self._place.begin()

    def perform(self, action: Action) -> None:
        """Sum the replicas' gradients, update, and send the weights; raises ActionError, or NonFiniteError."""
        assert action == STEP
        self._place.enter()
        try:
            ballot = self._pushed()
            self._synchronize()
            start, self._now = self._place.mark(), action
            self._remember()
            try:
                self._grad_norm = self._update.step(self._number, ballot)
            except NonFiniteError:
                self._publish()  # the weights of before: the replicas wait for some
                raise
            self._publish()
            self._events.append(Span(action, start, self._place.mark()))
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self._failed(str(action), None, error) from None

    def _restore(self, notes: Notes) -> None:
        if not notes.updated:
            self._pushed()  # what the replicas have pushed of the step, and then push of the rest
        super()._restore(notes)

    def end(self) -> StepResult:
        """Close a step."""
        self._place.enter()
        try:
            self._synchronize()
        except GroupError as error:
            raise self._failed("end of step", None, error) from None
        self._place.finish()
        self._now = None
        if self._train:
            self._keep(self._place.spans(self._events))
        return StepResult(
            losses=(),
            counts=(),
            grad_norm=self._grad_norm,
            busy=0.0,
            span=0.0,
            overlap=None,
            in_flight=0,
            peak_memory=self._place.peak(),
        )

    def _pushed(self) -> Tensor | None:
        """Wait for the sums of the gradients, and of the ballots if they come here."""
        root, flats = self._group.rank, [bucket.zeros() for bucket in self._buckets]
        handles = [self._group.reduce(flat, root) for flat in flats]
        self._idle = True
        try:
            for bucket, flat, handle in zip(self._buckets, flats, handles, strict=True):
                handle.wait(_WHOLE_STEP)
                bucket.adopt(flat)
            if not self._counts_votes:
                return None
            ballot = ballot_of(0, 0.0, sound=True)
            self._group.host.reduce(ballot, root).wait(_WHOLE_STEP)
            return ballot
        finally:
            self._idle = False

    def _publish(self) -> None:
        """Send the weights to the replicas."""
        root = self._group.rank
        for handle in [self._group.broadcast(bucket.weights(), root) for bucket in self._buckets]:
            handle.wait()
