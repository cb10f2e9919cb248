"""The parameter server: an actor that keeps weights and their optimizer for the replicas of a pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, GroupError
from raypar.actors.device import Place
from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.step import Notes
from raypar.actors.optim.step import ballot_of
from raypar.actors.specs.results import Span, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.build import buckets_of, build_part, updater_of
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.probe import Probe
from raypar.actors.worker.seat import Seat
from raypar.actors.worker.state import WorkerState
from raypar.actors.worker.step import Step
from raypar.schedules.action import STEP, Action

_WHOLE_STEP = 1e6  # seconds: gradients come when the replicas have computed; who is late is told by others


class Server:
    """Master weights and optimizer state of some of a pipeline rank's parameters (Li et al. 2014).

    In a step the replicas push their gradients, bucket by bucket, and the server sums them up. All servers of the run
    agree on norm and vote and update their weights, and the replicas pull them: each sends its gradients once, the
    server sends the weights once to each.
    """

    def __init__(self, plan: Plan, groups: Mapping[str, Group], place: Place) -> None:
        """Build this server's share of a run.

        Raises:
            UnequalReplicasError: a replica has made other weights of the same plan.
        """
        torch.set_num_threads(plan.run.threads)
        self.seat = seat = Seat(plan, groups, place)
        part, world = build_part(plan, place, {}), seat.world
        index, train = world.server_index(plan.rank), plan.programs["train"]
        own = part.share(index)
        self.state = WorkerState(seat, part, own, updater_of(plan, part, own, groups), {})
        self.probe = Probe(seat, self.state, part.model.names, part.outputs)
        self._step = self.probe.step
        self._epoch = 0  # how many steps could not be made
        self._group = groups[f"ps{index}"]
        self._buckets = buckets_of(plan, part, own)
        self._counts_votes = index == 0 and train.placement[-1] == seat.pp  # see Reducer.total
        seat.connect(part.ties)
        seat.compare(index, own)

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Serve a whole step; an evaluation needs no server. Raises StaleError if it is of an earlier epoch."""
        self.seat.demand_current(epoch, self._epoch)
        self.begin(program, step)
        if program == "train":
            self.perform(STEP)
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""
        self.seat.place.enter()
        self._step = self.probe.step = Step(program, step, is_train=program == "train")
        if self._step.is_train:
            self.state.zero_grad()
        self.seat.place.begin()

    def open(self, step: int) -> None:
        """Open a training step that is taken by hand, so that it can be taken again."""
        self.begin("train", step)
        self._step.notes = Notes()

    def perform(self, action: Action) -> None:
        """Sum the replicas' gradients, update, and send the weights; raises ActionError, or NonFiniteError."""
        assert action == STEP
        step, place = self._step, self.seat.place
        place.enter()
        try:
            ballot = self._pushed()
            self.seat.synchronize()
            start, step.now = place.mark(), action
            if step.notes is not None:
                self.state.remember(step.notes)
            try:
                step.updated = self.state.update.step(step.number, ballot)
            except NonFiniteError:
                self._publish()  # the weights of before: the replicas wait for some
                raise
            self._publish()
            step.events.append(Span(action, start, place.mark()))
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self.seat.failed(str(action), None, error) from None

    def rewind(self) -> None:
        """Put everything back as it was when the step was opened, and open it anew."""
        notes = self._step.notes
        assert notes is not None
        self.seat.place.enter()
        with torch.no_grad():
            if not notes.updated:
                self._pushed()  # what the replicas have pushed of the step, and then push of the rest
        self.state.restore(notes)
        self.open(self._step.number)

    def end(self) -> StepResult:
        """Close a step."""
        step, place = self._step, self.seat.place
        place.enter()
        try:
            self.seat.synchronize()
        except GroupError as error:
            raise self.seat.failed("end of step", None, error) from None
        place.finish()
        step.now = None
        if step.is_train:
            self.probe.close(place.spans(step.events))
        return StepResult(
            losses=(),
            counts=(),
            grad_norm=step.updated.grad_norm,
            lr=step.updated.lr,
            busy=0.0,
            span=0.0,
            overlap=None,
            in_flight=0,
            peak_memory=place.peak(),
        )

    def _pushed(self) -> Tensor | None:
        """Wait for the sums of the gradients, and of the ballots if they come here."""
        root, flats = self._group.rank, [bucket.zeros() for bucket in self._buckets]
        handles = [self._group.reduce(flat, root) for flat in flats]
        with self.probe.idle():
            for bucket, flat, handle in zip(self._buckets, flats, handles, strict=True):
                handle.wait(_WHOLE_STEP)
                bucket.adopt(flat)
            if not self._counts_votes:
                return None
            ballot = ballot_of(0, 0.0, sound=True)
            self._group.host.reduce(ballot, root).wait(_WHOLE_STEP)
            return ballot

    def _publish(self) -> None:
        """Send the weights to the replicas."""
        root = self._group.rank
        for handle in [self._group.broadcast(bucket.weights(), root) for bucket in self._buckets]:
            handle.wait()
