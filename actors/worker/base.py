"""What workers and parameter servers have in common: their place, their groups, and what can be asked of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.snapshot import Copies, Read, Written, logical_name, reader
from raypar.actors.collective.group import Group, GroupError
from raypar.actors.data_parallel.replica_checks import demand_equal
from raypar.actors.device import Host, Place, place_of
from raypar.actors.errors import ActionError, StaleError, described, trace
from raypar.actors.inspect.step import Held, Notes
from raypar.actors.models.tied_weights import Tie
from raypar.actors.optim.step import Update
from raypar.actors.sharding import Cut
from raypar.actors.specs.results import Progress, Span
from raypar.actors.specs.types import KEPT, ProgramName
from raypar.actors.tensor_parallel.gradients import first_of
from raypar.actors.tensors import nbytes
from raypar.actors.worker.build import Part
from raypar.actors.worker.plan import Plan
from raypar.schedules.action import Action


class Member(ABC):
    """One rank of the world. ``setup`` gives it a run."""

    def __init__(self) -> None:
        self._number = -1
        self._place: Place = Host()
        self._now: Action | None = None
        self._idle = False
        self._events: list[Span] = []
        self._trained: deque[list[Span]] = deque(maxlen=KEPT)  # of compiled training steps, the latest first
        self._groups: dict[str, Group] = {}
        self._copies = Copies()
        self._notes: Notes | None = None  # of a step that is taken by hand

    @abstractmethod
    def setup(self, plan: Plan, groups: dict[str, Group]) -> None:
        """Build this rank's part of a run; what an earlier run left is dropped."""

    def prepare(self, plan: Plan) -> Place:
        """Let the calling thread work where a run computes; the place. Raises RuntimeError if it is not there."""
        if plan.device != self._place.kind:
            self._place = place_of(plan.device)
        self._place.enter()
        return self._place

    # --- a step by hand ---

    @abstractmethod
    def begin(self, program: ProgramName, step: int) -> None:
        """Open a step."""

    def open(self, step: int) -> None:
        """Open a training step that is taken by hand: what it makes can be looked at, and it can be taken again."""
        self.begin("train", step)
        self._notes = Notes()

    def rewind(self) -> None:
        """Put everything back as it was when the step was opened, and open it anew."""
        assert self._notes is not None
        self._place.enter()
        with torch.no_grad():
            self._restore(self._notes)
        self.open(self._number)

    def held(self) -> Held:
        """What this actor holds now."""
        parameters = list(self._parameters.values())
        return Held(
            self._label,
            weights=sum(map(nbytes, parameters)),
            gradients=sum(nbytes(p.grad) for p in parameters if p.grad is not None),
            optimizer=sum(nbytes(tensor) for _, kept, tensor in self._update.state() if kept),
            values={},
            in_flight={},
            memory=self._place.peak(),
        )

    def _remember(self) -> None:
        """Called before a STEP: of one that is taken by hand, remember what it is about to change."""
        if self._notes is not None:
            self._notes.remember(self._parameters.items())
            state = self._update.state()
            self._notes.remember((logical_name(weight, kept), tensor) for weight, kept, tensor in state if kept)
            self._notes.updated = True

    def _restore(self, notes: Notes) -> None:
        if notes.updated:
            self._load(notes.read)

    # --- checkpoints ---

    def make_room(self) -> None:
        """Get memory for what ``stage`` copies ready, beside the next steps."""
        self._copies.make_room(self._saved())

    def stage(self) -> None:
        """Copy what this actor puts into a checkpoint, for ``write``; training may go on then."""
        self._place.enter()
        cuts = {
            logical_name(weight, kept): cut
            for weight, kept, tensor in self._update.state()
            if (cut := self._cut(weight, tensor)) is not None
        }
        self._copies.take(self._saved(), cuts)

    def write(self, folder: str, beside: bool = False) -> Written | None:
        """Write the copy as a shard, in another thread than the steps; None if this actor has nothing to write.

        ``beside`` steps that go on, it gives way to them. Raises CheckpointError.
        """
        file = f"{self._label.replace('=', '').replace(' ', '-')}.safetensors"
        return self._copies.write(Path(folder), file, beside=beside)

    def load(self, folder: str, tensors: Mapping[str, Logical]) -> None:
        """Go on with a checkpoint's weights and optimizer state. Raises CheckpointError if it can't be read."""
        self._place.enter()
        self._idle = True
        try:
            with torch.no_grad():
                self._load(self._own(reader(Path(folder), tensors, self._homes)))
        finally:
            self._idle = False

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """What this actor puts into a checkpoint: the weights that it updates, tied ones as their home only; of what is
        the same on several of a tensor group, the first one's."""
        for weight, kept, tensor in self._update.state():
            if weight not in self._homes and self._speaks(weight, tensor):
                yield logical_name(weight, kept), tensor

    def _own(self, read: Read) -> Read:
        """Reads what is here of what ``read`` reads."""

        def own(weight: str, kept: str = "") -> Tensor | None:
            whole = read(weight, kept)
            cut = None if whole is None or not whole.dim() else self._cuts.get(weight)
            return whole if whole is None or cut is None else cut.take(whole).clone()

        return own

    def _cut(self, weight: str, tensor: Tensor) -> Cut | None:
        """What a weight here, or what the optimizer keeps for it, is of a logical tensor; None for all of one."""
        return self._cuts.get(weight) if tensor.dim() else None

    def _speaks(self, weight: str, tensor: Tensor) -> bool:
        """Whether this actor is the first of its tensor group that has a weight, or its part of it."""
        return self._leads if self._cut(weight, tensor) is None else first_of(self._partial.get(weight, ()))

    def _load(self, read: Read) -> None:
        for name, parameter in self._parameters.items():
            weight = read(name, "")
            assert weight is not None, "the driver has looked at names and shapes"
            parameter.copy_(weight)
        self._update.load(read)

    # --- looking inside ---

    def progress(self) -> Progress:
        """Where this actor is; safe to call from another thread."""
        return Progress(self._number, len(self._events), self._now, self._idle)

    def abort(self) -> None:
        """Break off every communication under way; safe to call from another thread."""
        for group in self._groups.values():
            group.abort()

    def events(self, ago: int = 0) -> list[Span]:
        """What was done in the latest compiled training step, or in one so many before it; empty if that is not
        known (any more)."""
        return self._trained[ago] if 0 <= ago < len(self._trained) else []

    def parameters(self) -> dict[str, Tensor]:
        """This actor's weights by logical name, on the host."""
        return {name: parameter.detach().cpu() for name, parameter in self._parameters.items()}

    def parameter(self, name: str) -> Tensor:
        """One weight, on the host."""
        return self._parameters[name].detach().cpu()

    def gradient(self, name: str) -> Tensor | None:
        """One gradient as the optimizer saw it: summed over the step and the replicas, clipped; on the host."""
        gradient = self._parameters[name].grad
        return None if gradient is None else gradient.cpu()

    def gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        """These gradients, in their order."""
        return [self.gradient(name) for name in names]

    def holds(self) -> dict[str, Cut]:
        """What this actor holds of which logical parameters."""
        return {name: self._cuts.get(name) or Cut(tuple(p.shape)) for name, p in self._parameters.items()}

    def ledger(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Calls, bytes and seconds by (axis, op) since the run began, as an Entry has them."""
        tables = [group.ledger.entries() for group in self._groups.values()]  # one ledger, or one a group
        return {key: (entry.calls, entry.bytes, entry.seconds) for table in tables for key, entry in table.items()}

    # --- for the classes ---

    def _keep(self, events: list[Span]) -> None:
        """Close a training step: what was done is worth keeping unless somebody paused between the actions."""
        if self._notes is None:
            self._trained.appendleft(events)
        self._notes = None

    def _zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _demand_current(self, epoch: int | None) -> None:
        """Refuse what was handed over before the driver knew that a step could not be made."""
        if epoch is not None and epoch < self._epoch:
            raise StaleError(f"this call is of epoch {epoch}; {self._label} is in epoch {self._epoch}")

    def _join(
        self, plan: Plan, groups: dict[str, Group], part: Part, parameters: Mapping[str, nn.Parameter], update: Update
    ) -> None:
        """Take a place in a run, with those parameters of a part that are here and how a step of them ends."""
        self._plan, self._groups, self._parameters, self._update = plan, groups, parameters, update
        self._homes = {copy: home for home, copy in part.model.ties}
        self._cuts, self._partial = part.cuts, part.partial
        self._leads = plan.world.leads(plan.rank)
        self._epoch = 0  # how many steps could not be made
        self._trained.clear()
        self._label = plan.world.label(plan.rank)

    def _connect(self, ties: Sequence[Tie]) -> None:
        """Connect the ends of every message of a step, so that nobody has to in the middle of one."""
        placement, cp = self._plan.programs["train"].placement, self._plan.run.mesh.cp
        tied, ring = [(tie.home_rank, tie.copy_rank) for tie in ties], [(rank, (rank + 1) % cp) for rank in range(cp)]
        for key, pairs in (("pp", pairwise(placement)), ("cp", ring), (self._plan.world.updaters, tied)):
            if key in self._groups:
                ends = {pair for pair in pairs if pair[0] != pair[1]}
                self._groups[key].connect(ends | {(there, here) for here, there in ends})

    def _synchronize(self) -> None:
        """Wait until every message so far is over: on GPUs nobody knows before whether one failed."""
        for group in self._groups.values():
            group.synchronize()

    def _compare(self, owner: int, weights: Mapping[str, Tensor]) -> None:
        """Compare initial weights that belong to one server (without servers: all) with those that others have made."""
        world = self._plan.world
        for group in world.memberships(self._plan.rank):
            if group.key in ("dp", f"ps{owner}"):
                demand_equal(weights, self._groups[group.key], [world.label(rank) for rank in group.members])

    def _failed(self, action: str, peer: str | None, error: Exception) -> ActionError:
        """The error to raise; before that, everybody who waits for this actor is let go."""
        self.abort()
        if isinstance(error, GroupError):
            return ActionError(self._label, action, peer or self._whom(error), error.reason, True, "")
        return ActionError(self._label, action, peer, described(error), False, trace())

    def _whom(self, error: GroupError) -> str | None:
        """The name of the peer of a failed communication, if there was one."""
        world = self._plan.world
        for group in world.memberships(self._plan.rank):
            if error.peer is not None and self._groups[group.key].name == error.group:
                return world.label(group.members[error.peer])
        return None
