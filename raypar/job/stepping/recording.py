"""Recordings of one stage in one step: a safetensors file with all its inputs, outputs, gradients and state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from raypar.actors.bounds import Step
from raypar.actors.checkpoint.shards import is_plain, read_shard, write_shard
from raypar.actors.errors import CheckpointError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.recompute import Recompute
from raypar.actors.specs.types import DeviceKind
from raypar.config.fields import short_repr
from raypar.config.toml import plain_of
from raypar.errors import ConfigError
from raypar.paths import absolute
from raypar.schedules.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.job.start.loaded_run import LoadedRun  # imports ray, which a replay does without

_FORMAT = "raypar recording 1"
_ABOUT = "about"  # the tensor that holds the fields of Recorded, as JSON
_MOST_BYTES = 4 << 20  # the largest size of that tensor
_SHA256 = "sha256"  # the tensor that holds the hash of all other tensors, with their names, dtypes and shapes
_FIX = "give a file that rp.Stepper.record wrote"
_ACTION = re.compile(r"[FB][0-9]{1,9}")


@dataclass(frozen=True)
class Recorded:
    """The description of a recording. ``Tape`` defines the names of its tensors.

    Attributes:
        actor: The name of the recorded actor.
        stage: The stage.
        step: The step, counted from 0.
        layers: The stage's layers, by their numbers in the model.
        is_last: Whether the stage is the last one, which computes the loss.
        actions: The actions in the order in which they were done, ``F3`` or ``B3``. The number is that of the
            microbatch in the whole step, over all replicas.
        model: The run's model table, as in its TOML.
        seed: The run's seed.
        recompute: The run's recompute setting.
        threads: Number of torch threads of the actor.
        device: The kind of device.
        format: The format's name and version.
    """

    actor: str
    stage: Annotated[int, Ge(0)]
    step: Step
    layers: tuple[int, ...]
    is_last: bool
    actions: tuple[str, ...]
    model: dict[str, JsonValue]
    seed: int
    recompute: Recompute
    threads: Annotated[int, Ge(1), Le(1024)]
    device: DeviceKind
    format: str = _FORMAT


def write_recording(path: Path, about: Recorded, tensors: Mapping[str, Tensor]) -> None:
    """Write a recording: to a temporary file, then renamed.

    Args:
        path: The file.
        about: The recording's description.
        tensors: Its tensors by name.

    Raises:
        CheckpointError: If the file can't be written.
    """
    import torch

    every = {**tensors, _ABOUT: torch.frombuffer(bytearray(to_json(asdict(about))), dtype=torch.uint8)}
    write_shard(path.parent, path.name, {**every, _SHA256: _sha256(every)})


def read_recording(path: Path) -> tuple[Recorded, dict[str, Tensor]]:
    """Read a recording.

    Args:
        path: The file.

    Returns:
        The recording's description, and its tensors by name, which are memory-mapped.

    Raises:
        ConfigError: If the file is damaged or not a recording of this version.
    """
    path = absolute(path)
    try:
        tensors = read_shard(path.parent, path.name)
        sha256 = tensors.pop(_SHA256).tolist()
        if tensors[_ABOUT].nbytes > _MOST_BYTES:
            raise TypeError
        if sha256 != _sha256(tensors).tolist():
            raise ConfigError([f"{str(path)!r} is damaged: its tensors don't have the sha256 that it was written with"])
        about = _reader().validate_json(bytes(tensors.pop(_ABOUT).numpy().tobytes()), strict=True)
    except CheckpointError as error:
        raise ConfigError([f"{str(path)!r} is no recording: {fault}: {_FIX}" for fault in error.faults]) from error
    except (KeyError, RuntimeError, TypeError) as error:
        raise ConfigError([f"{str(path)!r} is no recording of raypar's: {_FIX}"]) from error
    except ValidationError as error:
        raise ConfigError(
            [
                f"{str(path)!r} is no recording of this raypar's: "
                f"{'.'.join(map(str, one['loc']))} is {short_repr(one['input'])}: {one['msg']}"
                for one in error.errors(include_url=False)
            ]
        ) from error
    ConfigError.raise_if(f"{str(path)!r} is no recording of this raypar's: {fault}" for fault in _odd(about, tensors))
    return about, tensors


def _odd(about: Recorded, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the reasons why no stage can have produced such a recording."""
    if about.format != _FORMAT:
        yield f"it is {short_repr(about.format)}"
    if list(about.layers) != sorted(set(about.layers)):
        yield f"its layers are {short_repr(list(about.layers))}"
    done = set[str]()
    for action in about.actions:
        known = _ACTION.fullmatch(action) and action not in done
        if not known or (action[0] == "B" and f"F{action[1:]}" not in done):
            yield f"its actions are {short_repr(list(about.actions))}"
            return
        if action[0] == "F" and f"{action}/inputs/0" not in tensors:
            yield f"it has no inputs of {action}"
        done.add(action)


def _sha256(tensors: Mapping[str, Tensor]) -> Tensor:
    import torch

    from raypar.actors.data_parallel.replica_checks import digest

    return torch.frombuffer(bytearray(digest(dict(sorted(tensors.items())))), dtype=torch.uint8)


@cache
def _reader() -> TypeAdapter[Any]:
    return TypeAdapter(Recorded)


def _request_faults(path: Path, stage: int, dp: int, mesh: Mesh, schedule: Schedule) -> Iterator[str]:
    """Yield the reasons why a stage can't be recorded; for the arguments see ``Recorder.begin``."""
    if not is_plain(path.name):
        yield f"{path.name!r} is no name for a recording: use letters, digits, '.', '_' and '-'"
    if path.is_dir():
        yield f"{str(path)!r} is a folder: give a file"
    elif path.exists() and not path.is_file():
        yield f"{str(path)!r} is a device or a pipe: give a file"
    elif not path.parent.is_dir():
        yield f"there is no folder {str(path.parent)!r}: make it, or give another path"
    if not 0 <= stage < schedule.num_stages:
        yield f"there is no stage {stage}: the schedule has {schedule.num_stages}, counted from 0"
    if not 0 <= dp < mesh.dp:
        yield f"there is no replica dp={dp}: the mesh has {mesh.dp}, counted from 0"
    if mesh.tensor_ranks > 1:
        tp = mesh.tp
        yield f"mesh.tp={tp} divides a stage over actors, and a part of it can't be replayed alone: set mesh.tp to 1"
    if mesh.cp > 1:
        yield f"mesh.cp={mesh.cp} divides the tokens over actors, and a part can't be replayed alone: set it to 1"
    if schedule.skips:
        yield "model.skips has skips between stages, which a recording of one does not have: look with peek"


class Recorder:
    """The recordings that the user has requested of a step.

    Args:
        loaded: The run.
        device: The kind of device that its actors compute on.
    """

    def __init__(self, loaded: LoadedRun, device: DeviceKind) -> None:
        self._loaded, self._device = loaded, device
        self._wanted: dict[tuple[int, int], Path] = {}  # by rank and stage
        self._num_stages = 0

    def begin(self, path: Path, stage: int, dp: int, schedule: Schedule) -> None:
        """Request a recording of one stage of one replica.

        Args:
            path: The file to write.
            stage: The stage.
            dp: The replica.
            schedule: The schedule of the step.

        Raises:
            ConfigError: If there is no such stage or replica, if stages are divided over tp or cp, or if the file can't
                be written. The text lists all faults.
        """
        path = absolute(path)
        ConfigError.raise_if(_request_faults(path, stage, dp, self._loaded.world.mesh, schedule))
        self._wanted[self._loaded.world.replica(dp)[schedule.placement[stage]], stage] = path
        self._num_stages = schedule.num_stages

    def start(self) -> None:
        """Make the actors record, from the start of a step on."""
        for rank, stage in self._wanted:
            self._loaded.calls.some([rank], "probe", "record", stage, what=f"recording stage {stage}")

    def save(self, step: int) -> None:
        """Fetch the recordings of a step and write the files.

        Args:
            step: The step.

        Raises:
            CheckpointError: If a file can't be written.
        """
        for (rank, stage), path in self._wanted.items():
            what = f"fetching what stage {stage} did"
            ((layers, actions, tensors),) = self._loaded.calls.some([rank], "probe", "recording", stage, what=what)
            about = Recorded(
                actor=self._loaded.world.label(rank),
                stage=stage,
                step=step,
                layers=layers,
                is_last=stage == self._num_stages - 1,
                actions=tuple(actions),
                model=plain_of(self._loaded.run)["model"],
                seed=self._loaded.run.seed,
                recompute=self._loaded.run.recompute,
                threads=self._loaded.run.num_threads,
                device=self._device,
            )
            write_recording(path, about, tensors)
