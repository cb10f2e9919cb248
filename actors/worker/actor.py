"""Workers and servers as Ray hosts them: joined to their groups when a run starts."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch import Tensor

from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.snapshot import Written
from raypar.actors.collective import ray_groups
from raypar.actors.collective.group import Group
from raypar.actors.collective.ledger import Ledger
from raypar.actors.device import Place, keep_freed_memory, place_of
from raypar.actors.inspect.activations import Sight, Spot
from raypar.actors.inspect.step import Held, Seen
from raypar.actors.sharding import Shard
from raypar.actors.specs.results import Progress, Span, StepResult
from raypar.actors.specs.types import ProgramName
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.server import Server
from raypar.actors.worker.worker import Worker
from raypar.schedules.action import Action


class Hosted:
    """A worker or a parameter server inside a Ray actor, as each run wants it.

    Ray wraps every method of an actor's class, and a step makes a hundred calls of one by another: so this class has
    only what the driver calls, and holds the worker or server that does the work.
    """

    def __init__(self) -> None:
        self._member: Worker | Server | None = None  # between two runs there is none
        self._joined: dict[str, Group] = {}
        keep_freed_memory()
        gc.freeze()  # the collector need not look at all of torch again and again

    # --- a run ---

    def start(self, plan: Plan) -> dict[str, Shard]:
        """Join the groups of a run, and build this actor's part of it.

        Returns:
            What this actor holds of which logical parameters.

        Raises:
            UnequalReplicasError: a replica has made other weights of the same plan.
            RuntimeError: the plan's device is not there.
        """
        ledger, place = Ledger(), place_of(plan.device)
        place.enter()
        for key, axis, name, members in plan.world.memberships(plan.rank):
            rank, full_name = members.index(plan.rank), f"{plan.name}/{name}"
            self._joined[key] = ray_groups.join(
                full_name, axis, len(members), rank, plan.run.timeout, ledger, place.device
            )
        ray_groups.close_together(self._joined)
        self._member = member_of(plan, self._joined, place)
        return self._member.state.holds()

    def leave(self) -> None:
        """Leave the groups of a run, and forget all of it."""
        self._member = None
        for group in self._joined.values():
            ray_groups.leave(group.name)
        self._joined = {}
        gc.collect()  # its shared memory

    # --- steps ---

    def run(self, program: ProgramName, step: int, epoch: int | None = None) -> StepResult:
        """Perform this actor's row of a program for a step; see ``Worker.run``."""
        return _there(self._member).run(program, step, epoch)

    def open(self, step: int) -> None:
        """Open a training step that is taken by hand."""
        _there(self._member).open(step)

    def perform(self, action: Action) -> None:
        """Perform one action of the step that was opened."""
        _there(self._member).perform(action)

    def end(self) -> StepResult:
        """Close the step."""
        return _there(self._member).end()

    def rewind(self) -> None:
        """Put everything back as it was when the step was opened, and open it anew."""
        _there(self._member).rewind()

    # --- checkpoints ---

    def make_room(self) -> None:
        """Get memory for a copy of the state ready, beside the next steps."""
        _there(self._member).state.make_room()

    def stage(self) -> None:
        """Copy the state for a checkpoint."""
        _there(self._member).state.stage()

    def write(self, folder: str, beside: bool = False) -> Written | None:
        """Write the copy as a shard, in another thread than the steps; see ``WorkerState.write``."""
        return _there(self._member).state.write(folder, beside=beside)

    def load(self, folder: str, tensors: Mapping[str, Logical]) -> None:
        """Go on with a checkpoint; see ``WorkerState.load``."""
        member = _there(self._member)
        with member.probe.idle():
            member.state.load(folder, tensors)

    # --- from another thread, while a step is under way ---

    def progress(self) -> Progress:
        """Where this actor is."""
        return Progress(-1, 0, None) if self._member is None else self._member.probe.progress()

    def abort(self) -> None:
        """Break off every communication under way."""
        for group in list(self._joined.values()):
            group.abort()

    # --- looking inside ---

    def events(self, ago: int = 0) -> list[Span]:
        """What was done in a compiled training step; see ``Probe.events``."""
        return _there(self._member).probe.events(ago)

    def ledger(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Calls, bytes and seconds by (axis, op)."""
        return _there(self._member).probe.ledger()

    def parameters(self) -> dict[str, Tensor]:
        """This actor's weights by logical name, on the host."""
        return _there(self._member).probe.parameters()

    def parameter(self, name: str) -> Tensor:
        """One weight, on the host."""
        return _there(self._member).probe.parameter(name)

    def gradient(self, name: str) -> Tensor | None:
        """One gradient as the optimizer saw it, on the host."""
        return _there(self._member).probe.gradient(name)

    def gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        """These gradients, in their order."""
        probe = _there(self._member).probe
        return [probe.gradient(name) for name in names]

    def peek(self, action: Action, tensors: bool) -> Seen:
        """What an action of the step by hand has made; see ``Probe.peek``."""
        return _there(self._member).probe.peek(action, tensors=tensors)

    def held(self) -> Held:
        """What this actor holds now."""
        return _there(self._member).probe.held()

    def record(self, stage: int) -> None:
        """Record what a stage does in the step that was opened."""
        _there(self._member).probe.record(stage)

    def recording(self, stage: int) -> tuple[tuple[int, ...], list[str], dict[str, Tensor]]:
        """What was recorded of a stage; see ``Probe.recording``."""
        return _there(self._member).probe.recording(stage)

    def watch(self) -> tuple[str, ...]:
        """Keep what the layers make in the step that was opened; see ``Probe.watch``."""
        return _there(self._member).probe.watch()

    def sights(self, spots: Sequence[Spot]) -> list[Sight | None]:
        """What is here of tensors that were watched."""
        return _there(self._member).probe.sights(spots)


def member_of(plan: Plan, groups: Mapping[str, Group], place: Place) -> Worker | Server:
    """Build the worker or the parameter server that a plan is for. Raises UnequalReplicasError."""
    return (Server if plan.rank in plan.world.server_ranks else Worker)(plan, groups, place)


def _there(member: Worker | Server | None) -> Worker | Server:
    if member is None:
        raise RuntimeError("this actor takes no part in a run: start it with a plan")
    return member
