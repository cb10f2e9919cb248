"""Having stages of a job recorded in a step, and writing the files."""

from __future__ import annotations

from pathlib import Path

from raypar.actors.plan import DeviceKind
from raypar.actors.shards import is_plain
from raypar.actors.world import World
from raypar.calls import Calls
from raypar.config import ConfigError, Run
from raypar.folder.names import absolute
from raypar.schedules.schedule import Schedule
from raypar.stepping.recording import Recorded, write_recording
from raypar.toml import plain_of


class Recorder:
    """The recordings that are wanted of a step."""

    def __init__(self, run: Run, device: DeviceKind, world: World, calls: Calls) -> None:
        self._run, self._device, self._world, self._calls = run, device, world, calls
        self._wanted: dict[tuple[int, int], Path] = {}  # by rank and stage
        self._num_stages = 0

    def begin(self, path: Path, stage: int, dp: int, schedule: Schedule) -> None:
        """Want a recording of a stage of a replica. Raises ConfigError if there is none, or no place for the file."""
        path, faults = absolute(path), []
        if not is_plain(path.name):
            faults.append(f"{path.name!r} is no name for a recording: use letters, digits, '.', '_' and '-'")
        if path.is_dir():
            faults.append(f"{str(path)!r} is a folder: give a file")
        elif path.exists() and not path.is_file():
            faults.append(f"{str(path)!r} is a device or a pipe: give a file")
        elif not path.parent.is_dir():
            faults.append(f"there is no folder {str(path.parent)!r}: make it, or give another path")
        if not 0 <= stage < schedule.num_stages:
            faults.append(f"there is no stage {stage}: the schedule has {schedule.num_stages}, counted from 0")
        if not 0 <= dp < self._world.mesh.dp:
            faults.append(f"there is no replica dp={dp}: the mesh has {self._world.mesh.dp}, counted from 0")
        if self._world.mesh.tensor_ranks > 1:
            tp = self._world.mesh.tp
            faults.append(f"of mesh.tp={tp} each actor has a part of a stage, which can't be played alone: set it to 1")
        if (cp := self._world.mesh.cp) > 1:
            part = "a part of the tokens"
            faults.append(f"of mesh.cp={cp} each actor has {part}, which can't be played alone: set it to 1")
        if faults:
            raise ConfigError(faults)
        self._wanted[self._world.replica(dp)[schedule.placement[stage]], stage] = path
        self._num_stages = schedule.num_stages

    def start(self) -> None:
        """Let the actors record, from the start of a step on."""
        for rank, stage in self._wanted:
            self._calls.one(rank, "record", stage, what=f"recording stage {stage}")

    def save(self, step: int) -> None:
        """Write what was recorded in the step. Raises CheckpointError if a disk refuses."""
        for (rank, stage), path in self._wanted.items():
            layers, actions, tensors = self._calls.one(
                rank, "recording", stage, what=f"fetching what stage {stage} did"
            )
            about = Recorded(
                actor=self._world.label(rank),
                stage=stage,
                step=step,
                layers=layers,
                is_last=stage == self._num_stages - 1,
                actions=tuple(actions),
                model=plain_of(self._run)["model"],
                seed=self._run.seed,
                recompute=self._run.recompute,
                threads=self._run.threads,
                device=self._device,
            )
            write_recording(path, about, tensors)
