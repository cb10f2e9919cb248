"""The parameter server: an actor that holds weights and their optimizer for the replicas of a pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from raypar.actors.collective.group import Group
from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.step import Notes
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.last_action import LastAction
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.votes import ballot_of
from raypar.actors.specs.results import Span, StepResult, Updated
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.build.assemble import build_part, unweighted_model
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.actors.worker.build.updates import buckets_of, updater_of
from raypar.actors.worker.fault_injection import FaultInjector
from raypar.actors.worker.probe import Probe, profiler_of
from raypar.actors.worker.state import WorkerState
from raypar.schedules.action import STEP, Action

_WHOLE_STEP = 1e6  # seconds to wait for gradients, in effect no limit: other actors report a late replica


class Server:
    """Holds the master weights and optimizer state of some of a pipeline rank's parameters.

    In a step the replicas push their gradients, bucket by bucket, and the server sums them. Then all servers of the run
    agree on the global norm and the vote, update their weights, and send them to their replicas.

    Args:
        plan: The actor's plan.
        groups: The groups that it has joined, by their keys.
        device: The device that it computes on.

    Attributes:
        context: The actor's rank, device and groups in the run.
        state: Its weights and optimizer state.
        probe: Its inspection.
        faults: Faults that are injected on purpose.
        last_action: Notes its actions, for after its death.
        profiler: Records the steps that the run asks for.

    Raises:
        UnequalReplicasError: A replica has built other weights from the same plan.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
    """

    def __init__(self, plan: ActorPlan, groups: Mapping[str, Group], device: ComputeDevice) -> None:
        torch.set_num_threads(plan.run.num_threads)
        self.context = context = RankContext(plan, groups, device)
        world, train = context.world, plan.programs["train"]
        index = world.server_index(plan.rank)
        part = build_part(plan, unweighted_model(plan.run), device, {}, index)
        own, scaler = part.share(index), LossScaler(None)
        self.state = WorkerState(context, part, own, updater_of(context, part, scaler), {}, scaler)
        self.probe = Probe(context, self.state)
        self._step = self.probe.step
        self._epoch = 0  # number of steps refused for non-finite gradients
        self.faults, self.last_action, self.profiler = FaultInjector(), LastAction(), profiler_of(context)
        self._group = groups[f"ps{index}"]
        self._buckets = buckets_of(plan, part, own)
        self._counts_votes = index == 0 and train.placement[-1] == context.pp  # see Reducer.total
        context.connect(part.ties)
        context.compare((f"ps{index}",), partial(part.digests, index))

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Serve a whole step; in an evaluation there is nothing to do. Arguments and errors are those of Worker.run."""
        self._epoch = self.context.demand_current(epoch, self._epoch)
        self.begin(program, step)
        if program == "train":
            self.perform(STEP)
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Begin a step."""
        self.context.device.enter()
        self._step = self.probe.step = StepState(program, step, is_train=program == "train")
        if self._step.is_train:
            self.state.zero_grad()
        self.context.device.begin()

    def open(self, step: int) -> None:
        """Begin a training step by hand, which can be rewound."""
        self.begin("train", step)
        self._step.notes = Notes()

    def perform(self, action: Action) -> None:
        """Sum the replicas' gradients, update the weights, and send them to the replicas.

        Args:
            action: STEP, the only action of a server.

        Raises:
            ActionError: It failed.
            NonFiniteError: The gradients are not finite. The replicas get the unchanged weights.
        """
        assert action == STEP
        step, device = self._step, self.context.device
        device.enter()
        try:
            self.last_action.begin(step.number, action)
            self.faults.reach(action, step.number)
            ballot = self._pushed()
            self.context.synchronize()
            start, step.now = device.mark(), action
            if step.notes is not None:
                self.state.remember(step.notes)
            try:
                with self.profiler.named(action):
                    step.updates.append(self.state.take(step.number, lambda: ballot))
            except NonFiniteError:
                self._publish()  # unchanged weights, because the replicas wait for some
                raise
            self._publish()
            step.events.append(Span(action, start, device.mark()))
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self.context.failed(str(action), None, error) from None

    def rewind(self) -> None:
        """Restore the state before the step by hand, and open the step again."""
        notes = self._step.notes
        assert notes is not None
        self.context.device.enter()
        with torch.no_grad():
            if not notes.updated:
                self._pushed()  # gradients that the replicas push for the abandoned step
        self.state.restore(notes)
        self.open(self._step.number)

    def end(self) -> StepResult:
        """End a step and return its result. Raises ActionError if a communication failed."""
        step, device = self._step, self.context.device
        device.enter()
        with self.context.reports("end of step"):
            self.context.synchronize()
        device.finish()
        step.now = None
        if step.is_train:
            self.probe.close(device.spans(step.events))
        updated = step.updates[-1] if step.updates else Updated()
        return StepResult(**updated._asdict(), peak_memory=device.peak())

    def _pushed(self) -> Tensor | None:
        """Wait for the summed gradients. Return the summed ballots if this server gets them, else None."""
        root, flats = self._group.rank, [bucket.zeros() for bucket in self._buckets]
        handles = [self._group.reduce(flat, root) for flat in flats]
        with self.probe.idle():
            for bucket, flat, handle in zip(self._buckets, flats, handles, strict=True):
                handle.wait(_WHOLE_STEP)
                bucket.adopt(flat, bucket.flags(flat).tolist())
            if not self._counts_votes:
                return None
            ballot = ballot_of(0, 0.0, sound=True)
            self._group.host.reduce(ballot, root).wait(_WHOLE_STEP)
            return ballot

    def _publish(self) -> None:
        """Broadcast the weights to the replicas."""
        root = self._group.rank
        for handle in [self._group.broadcast(bucket.weights(), root) for bucket in self._buckets]:
            handle.wait()
