"""Everything that one actor is told about a run, and what it reports back. Plain data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.actors.context_parallel.sequence import Context
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import DataParallel, World, Zero
from raypar.actors.models.partition import Split
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.recompute import Recompute
from raypar.actors.specs.types import DeviceKind, ProgramName
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """A run as one actor sees it.

    name      unique to job and generation; the names of its groups begin with it
    rank      this actor's rank in the world
    programs  the schedules by name, as they are performed; of their rows only this actor's is filled
    device    what every actor of the run computes on
    timeout   seconds that any wait on another actor may take
    """

    name: str
    mesh: Mesh
    rank: int
    model: GPT | Llama | Layers
    data: Text | Batches
    optim: AdamW | SGD
    programs: Mapping[ProgramName, Schedule]
    split: Split
    recompute: Recompute
    micro_batch_size: int
    data_parallel: DataParallel
    bucket_mb: float
    servers: int
    zero: Zero | None
    sequence_parallel: bool
    context: Context
    clip: float | None
    seed: int
    steps: int
    threads: int
    device: DeviceKind
    timeout: float

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return World.of(self.mesh, self.data_parallel, self.servers, self.zero)
