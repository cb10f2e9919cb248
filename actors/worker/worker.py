"""The Worker: one actor's plain Python class. It holds stages and performs their actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, GroupError
from raypar.actors.errors import NonFiniteError
from raypar.actors.optim.step import ballot_of
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.specs.results import Span, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values, nbytes
from raypar.actors.worker.build import assemble, last_backwards
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.probe import Resident
from raypar.schedules.action import COMPUTE, RECVS, Action, Op
from raypar.schedules.rules import needs, provides
from raypar.schedules.schedule import Schedule


class Worker(Resident):
    """One rank of the mesh. ``setup`` gives it a run, ``run`` performs a whole step of it.

    A step may also be taken action by action (``begin``, ``perform`` for each, ``end``); the numbers are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._perform: dict[Op, Callable[[Action], None]] = {
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
            Op.STEP: self._step,
        }

    # --- a run ---

    def setup(self, plan: Plan, groups: dict[str, Group]) -> None:
        """Build this rank's part of a run; what an earlier run left is dropped.

        Raises UnequalReplicasError if another replica has made other weights of the same plan.
        """
        torch.set_num_threads(plan.run.threads)
        torch.set_grad_enabled(True)
        coordinate = plan.run.mesh.coordinate(plan.rank)
        self._pp, self._dp, self._cp = coordinate["pp"], coordinate["dp"], coordinate["cp"]
        self._parts = assemble(plan, groups, self.prepare(plan))
        part = self._parts.part
        self._stages = part.stages
        self._join(plan, groups, part, part.parameters, self._parts.update)
        row = plan.programs["train"].rows[self._pp]
        self._first, self._last = (set(last_backwards(part).values()) for part in (row[::-1], row))
        self._couriers = {
            name: Courier(groups.get("pp"), schedule.placement, schedule.num_microbatches)
            for name, schedule in plan.programs.items()
        }
        self._rehearsed: set[ProgramName] = set()  # programs that were run once
        self._sources: dict[Action, tuple[Action, ...]] = {}  # whose values an action takes; the same in every step
        self._connect(part.ties)
        for owner in range(plan.world.owners):
            self._compare(owner, part.share(owner))
        if "dp" in groups:
            self._compare(0, part.fixed())

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Perform the whole row of a program for a step; raises StaleError if it is of an earlier epoch."""
        self._demand_current(epoch)
        self.begin(program, step)
        receives = (action for action in self._row if action.op in RECVS)
        ahead = self._place.ahead(rehearsed=program in self._rehearsed)
        self._expect(islice(receives, ahead))
        for action in self._row:
            self.perform(action)
            if ahead and action.op in RECVS:
                self._expect(islice(receives, 1))
        self._rehearsed.add(program)
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""
        self._place.enter()
        torch.set_grad_enabled(True)  # the thread that runs calls is not the one that ran __init__
        self._program, self._number = program, step
        self._schedule: Schedule = self._plan.programs[program]
        self._row = self._schedule.rows[self._pp]
        self._courier = self._couriers[program]
        self._train = not self._schedule.forward_only
        self._computed: dict[int, Tensor] = {}  # losses that were not read yet
        self._losses: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._grad_norm: float | None = None
        self._in_flight, self._events, self._notes = 0, [], None
        self._held.clear()
        if self._train:
            self._zero_grad()
            if self._parts.reducer is not None:
                self._parts.reducer.begin()
        for stage in self._stages.values():
            stage.begin(train=self._train)
        self._place.begin()

    def perform(self, action: Action) -> None:
        """Perform one action, as soon as what it needs is there; raises ActionError."""
        self._place.enter()
        start = self._place.mark()
        self._now, self._moved = action, 0
        try:
            self._perform[action.op](action)
        except NonFiniteError:
            self._epoch += 1
            raise
        except Exception as error:
            raise self._failed(str(action), self._peer(action), error) from None
        self._events.append(Span(action, start, self._place.mark(), self._moved))
        if self._notes is not None and (made := self._made(action)):
            self._notes.made[action] = made

    def end(self) -> StepResult:
        """Close a step: everything is computed, and everything sent has arrived."""
        self._place.enter()
        try:
            self._courier.drain()
            self._synchronize()
        except GroupError as error:
            raise self._failed("end of step", None, error) from None
        self._read_losses()
        self._place.finish()
        self._now = None
        events, reducer = self._place.spans(self._events), self._parts.reducer
        if self._train:
            self._keep(events + (self._place.spans(reducer.spans) if reducer is not None else []))
        microbatches = sorted(self._losses) if self._leads else []  # a tensor group reports its losses once
        return StepResult(
            losses=tuple(self._losses[microbatch] for microbatch in microbatches),
            counts=tuple(self._counts[microbatch] for microbatch in microbatches),
            grad_norm=self._grad_norm,
            busy=sum(event.end - event.start for event in events if event.action.op in COMPUTE),
            span=events[-1].end - events[0].start if events else 0.0,
            overlap=reducer.overlap if reducer is not None and self._train and not self._plan.world.servers else None,
            in_flight=self._in_flight,
            peak_memory=self._place.peak(),
        )

    # --- the actions ---

    def _forward(self, action: Action) -> None:
        """Roughly ``held[F] = stage(held[F of the stage before])``; the last stage keeps its loss."""
        stage, microbatch = self._stages[_stage(action)], _microbatch(action)
        source, place = self._parts.source, (self._program, self._number, microbatch, self._dp)
        inputs = self._take(action) or self._place.to(source.inputs(*place))
        target: Values = ()
        if stage.is_last:
            target = source.targets(*place)
            self._counts[microbatch] = stage.model.count(target)
            target = self._place.to(target)
        outputs = stage.forward(self._number, self._in_all(microbatch), inputs, target)
        if stage.is_last:
            self._computed[microbatch] = outputs[0]
        else:
            self._held[action] = outputs
        in_flight = sum([len(stage.in_flight) for stage in self._stages.values()])
        self._in_flight = max(self._in_flight, in_flight)

    def _backward(self, action: Action) -> None:
        """Roughly ``held[I] = stage.backward(held[I of the stage behind])``; the loss is weighted by its tokens."""
        number, microbatch = _stage(action), _microbatch(action)
        stage = self._stages[number]
        if stage.is_last:
            gradients = self._place.to((self._parts.mean.weight(self._counts[microbatch]),))
        else:
            gradients = self._take(action)
        whole = action.op is Op.B
        backward = stage.backward if whole else stage.backward_input
        with self._watched(action) if whole else nullcontext():
            inputs = backward(self._number, self._in_all(microbatch), gradients)
        if number > 0:
            self._held[Action(number, Op.I, action.microbatch)] = inputs

    def _backward_weight(self, action: Action) -> None:
        """Roughly ``stage.backward_weight()``: what I has left."""
        stage, microbatch = self._stages[_stage(action)], self._in_all(_microbatch(action))
        with self._watched(action, stage.owed(microbatch)):
            stage.backward_weight(microbatch)

    def _send(self, action: Action) -> None:
        """Roughly ``peer.held[RECV] = held.pop(F or I)``."""
        values = self._take(action)
        self._moved = sum(map(nbytes, values))
        self._courier.send(action, values)

    def _receive(self, action: Action) -> None:
        """Roughly ``held[RECV] = what the peer sent``."""
        values = self._held[action] = self._courier.receive(action)
        self._moved = sum(map(nbytes, values))

    def _reduce(self, action: Action) -> None:
        """Roughly ``all_reduce(gradients)``: started here at the latest, and waited for by STEP."""
        if self._parts.reducer is not None:
            self._parts.reducer.flush(_stage(action))

    def _step(self, action: Action) -> None:
        """Roughly ``optimizer.step()`` on every actor at once, after clipping by the global norm."""
        parts, ballot = self._parts, None
        if any(stage.is_last for stage in self._stages.values()):
            self._read_losses()
            sound = all(map(math.isfinite, self._losses.values()))
            ballot = ballot_of(sum(self._counts.values()), parts.mean.expected / self._plan.run.mesh.cp, sound=sound)
        if parts.reducer is not None:
            parts.reducer.finish()
            if ballot is not None:
                parts.reducer.total(ballot)
        self._synchronize()  # nothing of a message that failed may reach the weights
        self._remember()
        self._grad_norm = parts.update.step(self._number, ballot)

    def _nothing(self, action: Action) -> None:
        """A stage without shards: there is nothing to gather."""

    # --- helpers ---

    def _made(self, action: Action) -> Values:
        """What an action that was just performed has left for others, or its loss."""
        if action.op is Op.F and action.microbatch in self._computed and self._stages[_stage(action)].is_last:
            return (self._computed[action.microbatch],)
        return next((self._held[value] for value in provides(action) if value in self._held), ())

    def _read_losses(self) -> None:
        """Read the losses that were computed, all at once: on a GPU that waits for them."""
        if self._computed:
            self._losses |= zip(self._computed, torch.stack([*self._computed.values()]).tolist(), strict=True)
            self._computed.clear()

    def _in_all(self, microbatch: int) -> int:
        """A microbatch's number in the whole step, over all replicas: the order in which one process would take it."""
        return microbatch * self._plan.run.mesh.dp + self._dp

    def _watched(self, action: Action, left: Collection[Tensor] | None = None) -> AbstractContextManager[None]:
        """The time of a backward, or of its half that adds what is ``left``; the Reducer looks on at a stage's first
        one and at its last.

        By hand they come in any order, and nothing is reduced before REDUCE_GRAD.
        """
        reducer, first, last = self._parts.reducer, action in self._first, action in self._last
        if reducer is None or self._notes is not None or not (first or last):
            return nullcontext()
        return reducer.watch(_stage(action), last=last, left=left)

    def _take(self, action: Action) -> Values:
        """What the action needs from other actions, in one tuple; a stage keeps its own forward itself."""
        sources = self._sources.get(action)
        if sources is None:
            own = Action(action.stage, Op.F, action.microbatch)
            sources = tuple(need for need in needs(action, self._schedule) if need != own or action.op is Op.SEND_F)
            self._sources[action] = sources
        values: Values = ()
        for source in sources:
            values += self._held.pop(source)
        return values

    def _expect(self, receives: Iterator[Action]) -> None:
        """Post receives before their turn."""
        for action in receives:
            try:
                self._courier.expect(action)
            except GroupError as error:
                raise self._failed(str(action), self._peer(action), error) from None

    def _peer(self, action: Action) -> str | None:
        peer = self._courier.peer(action)
        if peer is None:
            return None
        coordinate = self._plan.run.mesh.coordinate(self._plan.rank) | {"pp": peer}
        return self._plan.run.mesh.label(self._plan.run.mesh.rank(**coordinate))


def _stage(action: Action) -> int:
    assert action.stage is not None
    return action.stage


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
