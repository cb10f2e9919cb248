"""The Worker: one actor's plain Python class. It holds stages and performs their actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, GroupError
from raypar.actors.device import Place
from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.step import Notes
from raypar.actors.optim.step import ballot_of
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.specs.results import Span, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values, nbytes
from raypar.actors.worker.build import assemble, last_backwards
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.probe import Probe
from raypar.actors.worker.seat import Seat
from raypar.actors.worker.state import WorkerState
from raypar.actors.worker.step import Step
from raypar.schedules.action import COMPUTE, RECVS, Action, Op
from raypar.schedules.rules import needs, provides
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class _Program:
    """A program as this rank performs it: the schedule, this rank's row of it, and who carries its messages."""

    schedule: Schedule
    row: tuple[Action, ...]
    courier: Courier


class Worker:
    """One rank of the mesh in one run: the executor of its row. ``run`` performs a whole step of it.

    A step may also be taken action by action (``begin`` or ``open``, ``perform`` for each, ``end``); the numbers are
    the same.

    seat   its place in the run
    parts  what it works with
    state  what it holds from step to step
    probe  what can be asked of it
    """

    def __init__(self, plan: Plan, groups: Mapping[str, Group], place: Place) -> None:
        """Build this rank's part of a run.

        Args:
            plan: what this rank is told about the run.
            groups: those that it has joined, by their keys.
            place: what it computes on; the calling thread has entered it.

        Raises:
            UnequalReplicasError: another replica has made other weights of the same plan.
        """
        torch.set_num_threads(plan.run.threads)
        torch.set_grad_enabled(True)
        self.seat = seat = Seat(plan, groups, place)
        self.parts = assemble(plan, groups, place)
        part = self.parts.part
        self.state = WorkerState(seat, part, part.parameters, self.parts.update, part.stages)
        self.probe = Probe(seat, self.state, part.model.names, part.outputs)
        self._place, self._stages, self._step = place, part.stages, self.probe.step
        self._epoch = 0  # how many steps could not be made
        self._methods: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.UNSHARD: self._nothing,
            Op.RESHARD: self._nothing,
            Op.REDUCE_GRAD: self._reduce,
            Op.STEP: self._update,
        }
        row = plan.programs["train"].rows[seat.pp]
        self._first, self._last = (set(last_backwards(part).values()) for part in (row[::-1], row))
        self._programs = {
            name: _Program(
                schedule,
                schedule.rows[seat.pp],
                Courier(groups.get("pp"), schedule.placement, schedule.num_microbatches),
            )
            for name, schedule in plan.programs.items()
        }
        self.program = self._programs["train"]
        self._rehearsed: set[ProgramName] = set()  # programs that were run once
        self._sources: dict[Action, tuple[Action, ...]] = {}  # whose values an action takes; the same in every step
        seat.connect(part.ties)
        for owner in range(seat.world.owners):
            seat.compare(owner, part.share(owner))
        if "dp" in groups:
            seat.compare(0, part.fixed())

    # --- a step ---

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Perform the whole row of a program for a step; raises StaleError if it is of an earlier epoch."""
        self.seat.demand_current(epoch, self._epoch)
        self.begin(program, step)
        row = self.program.row
        receives = (action for action in row if action.op in RECVS)
        ahead = self._place.ahead(rehearsed=program in self._rehearsed)
        self._expect(islice(receives, ahead))
        for action in row:
            self.perform(action)
            if ahead and action.op in RECVS:
                self._expect(islice(receives, 1))
        self._rehearsed.add(program)
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""
        self._place.enter()
        torch.set_grad_enabled(True)  # the thread that runs calls is not the one that ran __init__
        self.program = self._programs[program]
        train = not self.program.schedule.forward_only
        self._step = self.probe.step = Step(program, step, is_train=train)
        if train:
            self.state.zero_grad()
            if self.parts.reducer is not None:
                self.parts.reducer.begin()
        for stage in self._stages.values():
            stage.begin(train=train)
        self._place.begin()

    def open(self, step: int) -> None:
        """Open a training step that is taken by hand: what it makes can be looked at, and it can be taken again."""
        self.begin("train", step)
        self._step.notes = Notes()
        self._step.notes.remember(self.state.buffers())  # forwards change them

    def perform(self, action: Action) -> None:
        """Perform one action, as soon as what it needs is there; raises ActionError."""
        step, place = self._step, self._place
        place.enter()
        start = place.mark()
        step.now, step.num_bytes = action, 0
        try:
            self._methods[action.op](action)
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self.seat.failed(str(step.now), self._peer(action), error) from None
        step.events.append(Span(action, start, place.mark(), step.num_bytes))
        if step.notes is not None and (made := self._made(action)):
            step.notes.made[action] = made

    def rewind(self) -> None:
        """Put everything back as it was when the step was opened, and open it anew."""
        notes = self._step.notes
        assert notes is not None
        self._place.enter()
        with torch.no_grad():
            self._settle(notes)
        self.state.restore(notes)
        self.open(self._step.number)

    def end(self) -> StepResult:
        """Close a step: everything is computed, and everything sent has arrived."""
        step = self._step
        self._place.enter()
        try:
            self.program.courier.drain()
            self.seat.synchronize()
        except GroupError as error:
            raise self.seat.failed("end of step", None, error) from None
        self._read_losses()
        self._place.finish()
        step.now = None
        events, reducer = self._place.spans(step.events), self.parts.reducer
        if step.is_train:
            self.probe.close(events + (self._place.spans(reducer.spans) if reducer is not None else []))
        microbatches = sorted(step.losses) if self.seat.leads else []  # a tensor group reports its losses once
        return StepResult(
            losses=tuple(step.losses[microbatch] for microbatch in microbatches),
            counts=tuple(step.counts[microbatch] for microbatch in microbatches),
            grad_norm=step.updated.grad_norm,
            lr=step.updated.lr,
            busy=sum(event.end - event.start for event in events if event.action.op in COMPUTE),
            span=events[-1].end - events[0].start if events else 0.0,
            overlap=reducer.overlap if reducer is not None and step.is_train and not self.seat.world.servers else None,
            in_flight=step.in_flight,
            peak_memory=self._place.peak(),
        )

    # --- the actions ---

    def _forward(self, action: Action) -> None:
        """Roughly ``held[F] = stage(held[F of the stage before])``; the last stage keeps its loss."""
        stage, microbatch = self._stages[_stage(action)], _microbatch(action)
        step, source = self._step, self.parts.source
        batch = step.program, step.number, microbatch, self.seat.dp
        inputs = self._take(action) or self._place.to(source.inputs(*batch))
        target: Values = ()
        if stage.is_last:
            target = source.targets(*batch)
            step.counts[microbatch] = stage.model.count(target)
            target = self._place.to(target)
        outputs = stage.forward(step.number, self._in_all(microbatch), inputs, target)
        if stage.is_last:
            step.computed[microbatch] = outputs[0]
        else:
            step.values[action] = outputs
        in_flight = sum([len(stage.in_flight) for stage in self._stages.values()])
        step.in_flight = max(step.in_flight, in_flight)

    def _backward(self, action: Action) -> None:
        """Roughly ``held[I] = stage.backward(held[I of the stage behind])``; the loss is weighted by its tokens."""
        step, number, microbatch = self._step, _stage(action), _microbatch(action)
        stage = self._stages[number]
        if stage.is_last:
            gradients = self._place.to((self.parts.mean.weight(step.counts[microbatch]),))
        else:
            gradients = self._take(action)
        whole = action.op is Op.B
        backward = stage.backward if whole else stage.backward_input
        with self._watched(action) if whole else nullcontext():
            inputs = backward(step.number, self._in_all(microbatch), gradients)
        if number > 0:
            step.values[Action(number, Op.I, action.microbatch)] = inputs

    def _backward_weight(self, action: Action) -> None:
        """Roughly ``stage.backward_weight()``: what I has left."""
        stage, microbatch = self._stages[_stage(action)], self._in_all(_microbatch(action))
        with self._watched(action, stage.owed(microbatch)):
            stage.backward_weight(microbatch)

    def _send(self, action: Action) -> None:
        """Roughly ``peer.held[RECV] = held.pop(F or I)``."""
        values = self._take(action)
        self._step.num_bytes = sum(map(nbytes, values))
        self.program.courier.send(action, values)

    def _receive(self, action: Action) -> None:
        """Roughly ``held[RECV] = what the peer sent``."""
        values = self._step.values[action] = self.program.courier.receive(action)
        self._step.num_bytes = sum(map(nbytes, values))

    def _reduce(self, action: Action) -> None:
        """Roughly ``all_reduce(gradients)``: started here at the latest, and waited for by STEP."""
        if self.parts.reducer is not None:
            self.parts.reducer.flush(_stage(action))

    def _update(self, action: Action) -> None:
        """Roughly ``optimizer.step()`` on every actor at once, after clipping by the global norm."""
        step, parts, ballot = self._step, self.parts, None
        if any(stage.is_last for stage in self._stages.values()):
            self._read_losses()
            sound = all(map(math.isfinite, step.losses.values()))
            ballot = ballot_of(sum(step.counts.values()), parts.mean.expected / self.seat.world.mesh.cp, sound=sound)
        if parts.reducer is not None:
            parts.reducer.finish()
            if ballot is not None:
                parts.reducer.total(ballot)
        self.seat.synchronize()  # nothing of a message that failed may reach the weights
        if step.notes is not None:
            self.state.remember(step.notes)
        step.updated = self.state.update.step(step.number, ballot)

    def _nothing(self, action: Action) -> None:
        """A stage without shards: there is nothing to gather."""

    # --- helpers ---

    def _settle(self, notes: Notes) -> None:
        """Wait for what is under way in a step that is given up."""
        self.program.courier.drain()
        if (reducer := self.parts.reducer) is not None:
            serving = self.seat.world.servers > 0 and not notes.updated  # they wait for the gradients of this step
            reducer.settle(whole=serving)
            if serving and any(stage.is_last for stage in self._stages.values()):
                reducer.total(ballot_of(0, 0.0, sound=True))

    def _made(self, action: Action) -> Values:
        """What an action that was just performed has left for others, or its loss."""
        computed, values = self._step.computed, self._step.values
        if action.op is Op.F and action.microbatch in computed and self._stages[_stage(action)].is_last:
            return (computed[action.microbatch],)
        return next((values[value] for value in provides(action) if value in values), ())

    def _read_losses(self) -> None:
        """Read the losses that were computed, all at once: on a GPU that waits for them."""
        step = self._step
        if step.computed:
            step.losses |= zip(step.computed, torch.stack([*step.computed.values()]).tolist(), strict=True)
            step.computed.clear()

    def _in_all(self, microbatch: int) -> int:
        """A microbatch's number in the whole step, over all replicas: the order in which one process would take it."""
        return microbatch * self.seat.world.mesh.dp + self.seat.dp

    def _watched(self, action: Action, left: Collection[Tensor] | None = None) -> AbstractContextManager[None]:
        """The time of a backward, or of its half that adds what is ``left``; the Reducer looks on at a stage's first
        one and at its last.

        By hand they come in any order, and nothing is reduced before REDUCE_GRAD.
        """
        reducer, first, last = self.parts.reducer, action in self._first, action in self._last
        if reducer is None or self._step.notes is not None or not (first or last):
            return nullcontext()
        return reducer.watch(_stage(action), last=last, left=left)

    def _take(self, action: Action) -> Values:
        """What the action needs from other actions, in one tuple; a stage keeps its own forward itself."""
        sources = self._sources.get(action)
        if sources is None:
            own = Action(action.stage, Op.F, action.microbatch)
            sources = tuple(
                need for need in needs(action, self.program.schedule) if need != own or action.op is Op.SEND_F
            )
            self._sources[action] = sources
        values: Values = ()
        for source in sources:
            values += self._step.values.pop(source)
        return values

    def _expect(self, receives: Iterator[Action]) -> None:
        """Post receives before their turn."""
        for action in receives:
            try:
                self.program.courier.expect(action)
            except GroupError as error:
                raise self.seat.failed(str(action), self._peer(action), error) from None

    def _peer(self, action: Action) -> str | None:
        peer = self.program.courier.peer(action)
        if peer is None:
            return None
        mesh = self.seat.world.mesh
        return mesh.label(mesh.rank(**mesh.coordinate(self.seat.plan.rank) | {"pp": peer}))


def _stage(action: Action) -> int:
    assert action.stage is not None
    return action.stage


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
