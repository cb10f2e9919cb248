"""The Worker: a plain Python class that holds the stages of one actor and performs their actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import Group
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.replicas import enter_none
from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.step import Notes
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.last_action import LastAction
from raypar.actors.optim.votes import ballot_of
from raypar.actors.pipeline.moves import moves_of
from raypar.actors.specs.results import Kind, Span, StepResult, Updated
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.build.assemble import assemble, ends_of_rounds
from raypar.actors.worker.build.flow import numbers_of, stage_of
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.build.program import program_of
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.actors.worker.fault_injection import FaultInjector
from raypar.actors.worker.generation import Generator
from raypar.actors.worker.probe import Probe, profiler_of
from raypar.actors.worker.recheck import Recheck, compare_fixed, compare_if_due, compare_weights
from raypar.actors.worker.routers import Routers
from raypar.actors.worker.state import WorkerState
from raypar.actors.worker.stream import Stream
from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.timeline import Call


class Worker:
    """One rank of the mesh, or an expert actor, in one run, which performs its row. ``run`` performs a whole step.

    A step may also be taken action by action: ``begin`` or ``open``, ``perform`` for each action, then ``end``. The
    numbers are the same.

    Args:
        plan: The rank's plan.
        groups: The groups that it has joined, by their keys.
        device: The device that it computes on; the calling thread must have entered it.

    Attributes:
        context: The rank's rank, device and groups in the run.
        parts: Its stages, optimizer, batches and reducer.
        state: Its weights, optimizer state and buffers.
        probe: Its inspection.
        generator: Generates text.
        faults: Faults that are injected on purpose.
        last_action: Notes its actions, for after its death.
        profiler: Records the steps that the run asks for.
        program: The program under way.

    Raises:
        UnequalReplicasError: Another replica has built other weights from the same plan.
    """

    def __init__(self, plan: ActorPlan, groups: Mapping[str, Group], device: ComputeDevice) -> None:
        torch.set_num_threads(plan.run.num_threads)
        torch.set_grad_enabled(True)
        self.context = context = RankContext(plan, groups, device)
        with context.reports("initial values"):
            self.parts = assemble(context)
        part, self._flow = self.parts.part, self.parts.flow
        self.state = WorkerState(context, part, part.kept, self.parts.update, part.stages, self.parts.scaler)
        train = plan.programs["train"]
        reducer, row = self.parts.reducer, train.rows[context.row]
        self._stream = Stream(context, self.state, self._flow, reducer, row) if train.stream else None
        older = self._stream.older if self._stream is not None else None
        self.probe = Probe(context, self.state, reducer, older)
        self._device, self._stages, self._step = device, part.stages, self.probe.step
        self._ledgers = set[Ledger](group.ledger for group in groups.values())  # one, but in tests
        self._routers = Routers(context, part)
        self._epoch = 0  # number of steps refused for non-finite gradients
        self.generator = Generator(context, part, self.probe)
        self.faults, self.last_action, self.profiler = FaultInjector(), LastAction(), profiler_of(context)
        self._methods: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            **dict.fromkeys(SENDS, self._flow.send),
            **dict.fromkeys(RECVS, self._flow.receive),
            Op.UNSHARD: self._unshard,
            Op.RESHARD: self._reshard,
            Op.REDUCE_GRAD: self._reduce,
            Op.STEP: self._update,
            Op.USE: lambda action: None,  # the row determines the version that each forward uses
            Op.VALIDATE: self._validate,
            **moves_of(self._stages, self._in_all),
        }
        self._first, self._last = ends_of_rounds(row)
        self._performed = partial(program_of, context, part.weights, part.first_learning)
        self._programs = {name: self._performed(schedule) for name, schedule in plan.programs.items()}
        self.program = self._programs["train"]
        self._recheck = Recheck(context, row, {number: one.parameters() for number, one in part.stages.items()})
        self._rehearsed: set[ProgramName] = set()  # programs that have run before
        self._memory: dict[Kind, int] = {}  # by kind, after the first training step
        context.connect(part.ties)
        compare_weights(context, part, None)
        compare_fixed(context, part)

    # --- a step ---

    def run(self, program: ProgramName, step: int, epoch: int | None = None, stream: int = 0) -> StepResult:
        """Perform the whole row of a program for a step, or for the first steps of an asynchronous schedule.

        Args:
            program: Name of the program.
            step: Number of the step.
            epoch: Epoch of the call; None to accept it in any case.
            stream: Number of these steps; 0 for all steps of the schedule.

        Raises:
            StaleError: The call is of an earlier epoch.
            ActionError: An action failed.
            NonFiniteError: The gradients are not finite; no weight was changed.
        """
        self.start(program, step, epoch, stream)
        row = self.program.row
        receives = (action for action in row if action.op in RECVS)
        ahead = self._device.ahead(rehearsed=program in self._rehearsed)
        self._expect(islice(receives, ahead))
        for action in row:
            self.perform(action)
            if ahead and action.op in RECVS:
                self._expect(islice(receives, 1))
        self._rehearsed.add(program)
        return self.end()

    def start(self, program: ProgramName, step: int, epoch: int | None = None, stream: int = 0) -> None:
        """Begin a step, whose actions are performed next. Arguments and errors are those of ``run``."""
        self._epoch = self.context.demand_current(epoch, self._epoch)
        if program == "train":
            self._compute_again(step)
        self.begin(program, step, stream=stream)

    def begin(self, program: ProgramName, step: int, further: int = 0, stream: int = 0) -> None:
        """Begin a step of a program, of this replica or of the one ``further`` replicas on; see ``run``."""
        self._device.enter()
        torch.set_grad_enabled(True)  # a setting per thread, and this thread is not the one of __init__
        self.program = self._programs[program]
        if stream and stream != self.program.schedule.stream:
            self.program = self._performed(first_steps(self.program.schedule, stream))
        train, length = not self.program.schedule.forward_only, self.program.schedule.numbers_a_step
        self._step = self.probe.step = StepState(program, step, length, is_train=train, further=further)
        if train:
            self.state.zero_grad()
            if self.parts.reducer is not None:
                self.parts.reducer.begin()
            if self._stream is not None:
                self._stream.begin(self.program.row)
        self.program.courier.begin()
        self._flow.begin(self._step, self.program)
        self._routers.begin(self._flow.auxiliary(0))
        self.program.windows.begin()
        self.parts.part.begin(step, train=train)
        self._device.begin()
        self._calls(math.inf)  # those before the step have marks of an earlier clock

    def open(self, step: int) -> None:
        """Begin a training step by hand, which can be inspected and rewound."""
        self.begin("train", step)
        self._step.notes = Notes()
        self._step.notes.remember(self.state.buffers())  # forwards change buffers

    def perform(self, action: Action) -> None:
        """Perform one action. Receives wait for their messages.

        Args:
            action: An action of the row whose needs are done.

        Raises:
            ActionError: It failed. All groups of this actor are aborted.
            NonFiniteError: The gradients are not finite (only STEP); no weight was changed.
        """
        step, device = self._step, self._device
        device.enter()
        start = device.mark()
        step.now, step.num_bytes = action, 0
        try:
            if step.is_train and not step.further:
                self.last_action.begin(step.number, action)
                self.faults.reach(action, step.step_of(action))
            with self.profiler.named(action):
                self._methods[action.op](action)
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self.context.failed(str(step.now), self._peer(action), error) from None
        finally:
            enter_none()
        step.events.append(Span(action, start, device.mark(), step.num_bytes, None, self._calls(start)))
        if step.notes is not None and (values := self._flow.seen(action)):
            step.notes.made[action] = values

    def rewind(self) -> None:
        """Restore the state before the step by hand, and open the step again."""
        notes = self._step.notes
        assert notes is not None
        self._device.enter()
        with torch.no_grad():
            self._settle(notes)
        self.state.put_buffers_back()
        self.state.restore(notes)
        self.open(self._step.number)

    def end(self) -> StepResult:
        """End a step: wait for all computation and messages, and return the step's result.

        Raises:
            ActionError: A communication failed.
        """
        step = self._step
        self._device.enter()
        with self.context.reports("end of step"):
            self.program.courier.drain()
            self.context.synchronize()
            if step.is_train and self._stream is not None:
                flushed = range(step.number, step.number + self.program.schedule.stream)
                compare_if_due(self.context, self.parts.part, flushed, f"after step {flushed[-1] + 1}")
        step.copy_losses(self._device)
        self._device.finish()
        step.read_losses()
        step.now = None
        events, reducer = self._device.spans(step.events), self.parts.reducer
        computed = [event for event in events if event.action.op in COMPUTE]
        if step.is_train:
            self._memory = self._memory or self.probe.most() | self.probe.before()
            self.probe.close(events + (self._device.spans(reducer.spans) if reducer is not None else []))
        microbatches = sorted(step.losses) if self.context.leads else []  # a tensor group reports its losses once
        return StepResult(
            losses=tuple(step.losses[microbatch] for microbatch in microbatches),
            counts=tuple(step.counts[microbatch] for microbatch in microbatches),
            **(step.updates[-1] if step.updates else Updated())._asdict(),
            busy=float_sum(event.end - event.start for event in computed),
            communication=float_sum(call.end - call.start for event in computed for call in event.calls),
            start=events[0].start if events else 0.0,
            end=events[-1].end if events else 0.0,
            overlap=reducer.overlap if reducer is not None and step.is_train and "dp" in self.context.groups else None,
            in_flight=step.in_flight,
            peak_memory=self._device.peak(),
            samples=step.samples if self.context.leads else 0,
            memory=self._memory,
            ranges=() if self.parts.part.overflow is None else self.parts.part.overflow.read(),
            auxiliary=self._routers.losses() if step.is_train else (),
            loads=self._routers.loads() if step.is_train else (),
            shadows=self._routers.shadows() if step.is_train else (),
            updates=tuple(step.updates) if self._stream is not None else (),
            is_validated=self.program.schedule.validated,
            metrics=tuple(step.sums_of(microbatch) for microbatch in microbatches if microbatch in step.metrics),
        )

    def _calls(self, since: float) -> tuple[Call, ...]:
        """Return the communication since a mark; none on GPUs, where the host does not wait for it."""
        calls = tuple([call for ledger in self._ledgers for call in ledger.taken(since)])
        return calls if self._device.kind == "cpu" else ()

    # --- the actions ---

    def _forward(self, action: Action) -> None:
        """Run a stage's forward: ``values[F] = stage(values[F of the stage before])``. The last one keeps its loss."""
        number, microbatch = numbers_of(action)
        step = self._step
        inputs, target = self._flow.inputs(action)
        with self._using(action):
            outputs = self._stages[number].forward(*self._in_all(microbatch), inputs, target)
        took, data = ((), (*inputs, *target)) if number == 0 else (inputs, target)
        self._recheck.note(step.further, action, took, outputs, data)
        self._flow.made(action, outputs)
        in_flight = sum([len(one.in_flight) - (one.host.num_away if one.host else 0) for one in self._stages.values()])
        step.in_flight = max(step.in_flight, in_flight)

    def _backward(self, action: Action) -> None:
        """Run a stage's backward, or its I half: ``values[I] = stage.backward(values[I of the next stage])``."""
        number, microbatch = numbers_of(action)
        stage, gradients = self._stages[number], self._flow.gradients(action)
        whole = action.op is Op.B
        backward = stage.backward if whole else stage.backward_input
        with self._watched(action) if whole else nullcontext(), self._using(action):
            inputs = backward(*self._in_all(microbatch), gradients)
        self._recheck.note(self._step.further, action, gradients, inputs)
        self._flow.passed(action, inputs)

    def _backward_weight(self, action: Action) -> None:
        """Run the W half of a stage's backward, which adds the weight gradients that I deferred."""
        number, microbatch = numbers_of(action)
        stage, which = self._stages[number], self._in_all(microbatch)
        with self._watched(action, stage.deferred(*which)), self._using(action):
            stage.backward_weight(*which)
        self._recheck.note(self._step.further, action, (), ())

    def _reduce(self, action: Action) -> None:
        """Start the reduction of all buckets of a stage that has not started yet. STEP waits for it."""
        if self.parts.reducer is not None:
            self.parts.reducer.flush(stage_of(action))

    def _update(self, action: Action) -> None:
        """Finish the reduction of gradients, vote, clip by the global norm, and step the optimizer."""
        if self._stream is not None:
            self._stream.update(action, self._step)
            return
        step, parts = self._step, self.parts
        step.copy_losses(self._device)
        self._routers.copy()
        compare_if_due(self.context, parts.part, range(step.number, step.number + 1), f"in step {step.number + 1}")
        self._recheck.compare(step.number + 1)
        if parts.reducer is not None:
            parts.reducer.finish()
        self.context.synchronize()  # so that a failed message cannot reach the weights
        if parts.reducer is not None:
            parts.reducer.hand_over()
        if parts.part.overflow is not None:
            parts.part.overflow.weight_gradients(parts.part.summed, parts.part.parts)
        if step.notes is not None:
            self.state.remember(step.notes)
        with self._routers.named(step.number):
            step.updates.append(self.state.take(step.number, self._ballot))
        self._routers.balance(step.updates[-1])

    def _ballot(self) -> Tensor | None:
        """Return this actor's report of the step's losses, summed over the replicas; None if it computes no loss."""
        ballot = self._flow.ballot(range(self._step.length))
        if ballot is not None and self.parts.reducer is not None:
            self.parts.reducer.total(ballot)
        return ballot

    def _unshard(self, action: Action) -> None:
        """Start to gather the weights of a stage, if they are sharded or stored off the device."""
        self._step.num_bytes = self.program.windows.open(stage_of(action))

    def _reshard(self, action: Action) -> None:
        """Free the weights of a stage on the device, if they are sharded or stored off it."""
        self.program.windows.close(stage_of(action))

    def _validate(self, action: Action) -> None:
        """Find out whether an update was right; if not, repeat it and the actions since."""
        assert self._stream is not None
        for one in self._stream.validate(action, self._step):
            self._methods[one.op](one)

    # --- helpers ---

    def _using(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for an F, B, I or W, in which its stage has the row's version of its weights."""
        if self._stream is None or not self._step.is_train:
            return nullcontext()
        self._routers.weigh(self._flow.auxiliary(numbers_of(action)[1]))
        return self._stream.using(action)

    def _compute_again(self, step: int) -> None:
        """Compute a microbatch of other replicas, if that is due before this step, and store digests of its results."""
        for further in (others := self._recheck.begin(step)):
            self._recheck.watch(further)
            self.begin("train", step, further)
            for action in self._recheck.row:
                self.perform(action)
            self.state.put_buffers_back()
        if others:
            self._recheck.watch(0)

    def _settle(self, notes: Notes) -> None:
        """Wait for the communication under way in an abandoned step."""
        self.program.courier.drain()
        serving = self.context.world.servers > 0 and not notes.updated  # servers still wait for this step's gradients
        if (reducer := self.parts.reducer) is not None:
            reducer.settle(whole=serving)
            if serving and any(stage.is_last for stage in self._stages.values()):
                reducer.total(ballot_of(0, 0.0, sound=True))

    def _in_all(self, microbatch: int) -> tuple[int, int]:
        """Return a microbatch's step, and its number in the step over all replicas, as in a single process."""
        step, index = self._step.step_and_index(microbatch)
        return step, index * self.context.world.mesh.dp + self.context.replica(self._step.further)

    def _watched(self, action: Action, left: Collection[Tensor] | None = None) -> AbstractContextManager[None]:
        """Return a context for a backward, in which the Reducer watches gradients if it is a round's first or last one.

        In a step by hand it watches none, because backwards come in any order and are reduced at REDUCE_GRAD; nor in a
        backward whose gradients are compared first. ``left`` are the parameters whose gradients a W adds; None for a B.
        """
        reducer, at = self.parts.reducer, (stage_of(action), self._step.backwards[stage_of(action)])
        self._step.backwards[stage_of(action)] += 1
        first, last = at in self._first, at in self._last
        is_unwatched = self._step.notes is not None or self._recheck.watches(action)
        if reducer is None or is_unwatched or self._stream is not None or not (first or last):
            return nullcontext()
        if first:
            self._stages[stage_of(action)].begin_round()
        return reducer.watch(stage_of(action), last=last, left=left)

    def _expect(self, receives: Iterator[Action]) -> None:
        """Post receives before their turn in the row."""
        for action in receives:
            try:
                self._flow.expect(action)
            except GroupError as error:
                raise self.context.failed(str(action), self._peer(action), error) from None

    def _peer(self, action: Action) -> str | None:
        return self.context.label_of(self.program.courier.peer(action))
