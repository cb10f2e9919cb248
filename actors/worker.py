"""The Worker: one actor's plain Python class. It holds stages and performs their actions."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from raypar.actors.assembly import Assembly, assemble
from raypar.actors.courier import Courier
from raypar.actors.group import Group, GroupError
from raypar.actors.memory import PeakMemory
from raypar.actors.models.model import Values
from raypar.actors.plan import ActionError, NonFiniteError, Plan, ProgramName, Progress, StepResult
from raypar.schedules.action import COMPUTE, RECVS, Action, Op
from raypar.schedules.rules import needs
from raypar.schedules.schedule import Schedule

_AHEAD = 2  # receives that are posted before their turn: their peer need not wait to be asked
_LONGEST = 2000  # characters of an exception's text that are passed on


class Worker:
    """One rank of the mesh. ``setup`` gives it a run, ``run`` performs a whole step of it.

    A step may also be taken action by action (``begin``, ``perform`` for each, ``end``); the numbers are the same.
    """

    def __init__(self) -> None:
        self._number, self._memory = -1, PeakMemory()
        self._now: Action | None = None
        self._events: list[tuple[Action, float, float]] = []
        self._trained = self._events  # those of the latest training step that was finished
        self._perform: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.UNSHARD: self._nothing,
            Op.RESHARD: self._nothing,
            Op.REDUCE_GRAD: self._nothing,
            Op.STEP: self._step,
        }

    # --- a run ---

    def setup(self, plan: Plan, groups: dict[str, Group]) -> None:
        """Build this rank's part of a run; what an earlier run left is dropped."""
        torch.set_num_threads(plan.threads)
        torch.set_grad_enabled(True)
        self._plan, self._groups = plan, groups
        self._label = plan.mesh.label(plan.rank)
        self._parts: Assembly = assemble(plan, groups.get("pp"))
        self._couriers = {
            name: Courier(groups.get("pp"), schedule.placement, schedule.num_microbatches)
            for name, schedule in plan.programs.items()
        }
        self._held: dict[Action, Values] = {}  # what an action provided and another one still needs
        self._sources: dict[Action, tuple[Action, ...]] = {}  # whose values an action takes; the same in every step

    def run(self, program: ProgramName, step: int) -> StepResult:
        """Perform the whole row of a program for a step."""
        self.begin(program, step)
        receives = self._receives()
        self._expect(islice(receives, _AHEAD))
        for action in self._row:
            self.perform(action)
            if action.op in RECVS:
                self._expect(islice(receives, 1))
        return self.end()

    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""
        torch.set_grad_enabled(True)  # the thread that runs calls is not the one that ran __init__
        self._program, self._number = program, step
        self._schedule: Schedule = self._plan.programs[program]
        self._row = self._schedule.rows[self._pp]
        self._courier = self._couriers[program]
        self._train = not self._schedule.forward_only
        self._losses: dict[int, float] = {}
        self._tokens, self._grad_norm = 0, None if not self._train else 0.0
        self._in_flight, self._events = 0, []
        self._weight = torch.tensor(1.0 / self._schedule.num_microbatches)
        if self._train:
            self._parts.updater.zero_grad()
        for stage in self._parts.stages.values():
            stage.begin(train=self._train)
        self._memory.reset()

    def perform(self, action: Action) -> None:
        """Perform one action, as soon as what it needs is there; raises ActionError."""
        start = time.perf_counter()
        self._now = action
        try:
            self._perform[action.op](action)
        except NonFiniteError:
            raise
        except Exception as error:
            raise self._failed(str(action), self._peer(action), error) from None
        self._events.append((action, start, time.perf_counter()))

    def end(self) -> StepResult:
        """Close a step: everything sent has arrived."""
        try:
            self._courier.drain()
        except GroupError as error:
            raise self._failed("end of step", None, error) from None
        self._now = None
        events = self._events
        if self._train:
            self._trained = events
        return StepResult(
            losses=tuple(self._losses[microbatch] for microbatch in sorted(self._losses)),
            tokens=self._tokens,
            grad_norm=self._grad_norm,
            busy=sum(end - start for action, start, end in events if action.op in COMPUTE),
            span=events[-1][2] - events[0][1] if events else 0.0,
            in_flight=self._in_flight,
            peak_memory=self._memory.read(),
        )

    # --- looking inside ---

    def progress(self) -> Progress:
        """Where this actor is; safe to call from another thread."""
        return Progress(self._number, len(self._events), self._now)

    def abort(self) -> None:
        """Break off every communication under way; safe to call from another thread."""
        for group in self._groups.values():
            group.abort()

    def events(self) -> list[tuple[Action, float, float]]:
        """Action, start and end (seconds of the machine's monotonic clock) of the latest training step."""
        return self._trained

    def parameters(self) -> dict[str, Tensor]:
        """This actor's weights by logical name."""
        return {name: parameter.detach() for name, parameter in self._parts.parameters.items()}

    def parameter(self, name: str) -> Tensor:
        """One weight."""
        return self._parts.parameters[name].detach()

    def gradient(self, name: str) -> Tensor | None:
        """One gradient as the optimizer saw it: summed over the step, clipped."""
        return self._parts.parameters[name].grad

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical parameters that this actor holds."""
        return {name: tuple(parameter.shape) for name, parameter in self._parts.parameters.items()}

    def ledger(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes by (axis, op) since the run began."""
        tables = [group.ledger.entries() for group in self._groups.values()]  # one ledger, or one a group
        return {key: (entry.calls, entry.bytes) for table in tables for key, entry in table.items()}

    # --- the actions ---

    def _forward(self, action: Action) -> None:
        """Roughly ``held[F] = stage(held[F of the stage before])``; the last stage keeps its loss."""
        stage, microbatch = self._parts.stages[_stage(action)], _microbatch(action)
        inputs = self._take(action) or self._parts.source.inputs(self._program, self._number, microbatch)
        target: Values = ()
        if stage.is_last:
            target = self._parts.source.targets(self._program, self._number, microbatch)
            self._tokens += target[0].numel()
        outputs = stage.forward(self._number, microbatch, inputs, target)
        if stage.is_last:
            self._losses[microbatch] = outputs[0].item()
        else:
            self._held[action] = outputs
        in_flight = sum([stage.in_flight for stage in self._parts.stages.values()])
        self._in_flight = max(self._in_flight, in_flight)

    def _backward(self, action: Action) -> None:
        """Roughly ``held[I] = stage.backward(held[I of the stage behind])``; the loss is weighted 1 / m."""
        number = _stage(action)
        stage = self._parts.stages[number]
        gradients = (self._weight,) if stage.is_last else self._take(action)
        inputs = stage.backward(self._number, _microbatch(action), gradients)
        if number > 0:
            self._held[Action(number, Op.I, action.microbatch)] = inputs

    def _send(self, action: Action) -> None:
        """Roughly ``peer.held[RECV] = held.pop(F or I)``."""
        self._courier.send(action, self._take(action))

    def _receive(self, action: Action) -> None:
        """Roughly ``held[RECV] = what the peer sent``."""
        self._held[action] = self._courier.receive(action)

    def _step(self, action: Action) -> None:
        """Roughly ``optimizer.step()`` on every actor at once, after clipping by the global norm."""
        sound = all(map(math.isfinite, self._losses.values()))
        self._grad_norm = self._parts.updater.step(self._number, sound=sound)

    def _nothing(self, action: Action) -> None:
        """A stage without replicas or shards: there is nothing to gather or to reduce."""

    # --- helpers ---

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

    def _receives(self) -> Iterator[Action]:
        return (action for action in self._row if action.op in RECVS)

    @property
    def _pp(self) -> int:
        return self._plan.mesh.coordinate(self._plan.rank)["pp"]

    def _peer(self, action: Action) -> str | None:
        peer = self._courier.peer(action)
        if peer is None:
            return None
        coordinate = self._plan.mesh.coordinate(self._plan.rank) | {"pp": peer}
        return self._plan.mesh.label(self._plan.mesh.rank(**coordinate))

    def _failed(self, action: str, peer: str | None, error: Exception) -> ActionError:
        """The error to raise; before that, everybody who waits for this actor is let go."""
        self.abort()
        secondary = isinstance(error, GroupError)
        reason = error.reason if isinstance(error, GroupError) else _described(error)
        return ActionError(self._label, action, peer, reason, secondary, "" if secondary else _trace())


def _described(error: Exception) -> str:
    """Kind and text of a user's exception, whose ``__str__`` may fail or go on for pages."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def _trace() -> str:
    text = traceback.format_exc()
    return text if len(text) <= 4 * _LONGEST else text[-4 * _LONGEST :]


def _stage(action: Action) -> int:
    assert action.stage is not None
    return action.stage


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
