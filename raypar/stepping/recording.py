"""Recordings of one stage in one step: a safetensors file with all that it was given and has made."""

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

from raypar.actors.disk import CheckpointError
from raypar.actors.plan import DeviceKind
from raypar.actors.recompute import Recompute
from raypar.actors.shards import read_shard, write_shard
from raypar.checkpoint.manifest import Step
from raypar.config import ConfigError
from raypar.fields import brief
from raypar.folder.names import absolute

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "raypar recording 1"
_ABOUT = "about"  # the tensor that holds what is not a tensor, as JSON
_MOST_BYTES = 4 << 20  # of it
_SHA256 = "sha256"  # the tensor that holds that of all others, names, dtypes and shapes included
_ACTION = re.compile(r"[FB][0-9]{1,9}")


@dataclass(frozen=True)
class Recorded:
    """What a recording is of; its tensors are named as Tape names them.

    layers   of the stage, by their number in the model
    actions  ``F3``, ``B3``: in the order in which they were done, with the microbatch's number in the whole step
    model    as a run's TOML writes it
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
    """Write a recording: aside, then renamed. Raises CheckpointError."""
    import torch

    every = {**tensors, _ABOUT: torch.frombuffer(bytearray(to_json(asdict(about))), dtype=torch.uint8)}
    write_shard(path.parent, path.name, {**every, _SHA256: _sha256(every)})


def read_recording(path: Path) -> tuple[Recorded, dict[str, Tensor]]:
    """What a recording is of, and its tensors, which are mapped. Raises ConfigError for a damaged file, or another."""
    path = absolute(path)
    try:
        tensors = read_shard(path.parent, path.name)
        told = tensors.pop(_SHA256).tolist()
        if tensors[_ABOUT].nbytes > _MOST_BYTES:
            raise TypeError
        if told != _sha256(tensors).tolist():
            raise ConfigError([f"{str(path)!r} is damaged: its tensors don't have the sha256 that it was written with"])
        about = _reader().validate_json(bytes(tensors.pop(_ABOUT).numpy().tobytes()), strict=True)
    except CheckpointError as error:
        raise ConfigError([f"{str(path)!r}: {fault}" for fault in error.faults]) from error
    except (KeyError, RuntimeError, TypeError) as error:
        raise ConfigError([f"{str(path)!r} is no recording of raypar's"]) from error
    except ValidationError as error:
        raise ConfigError(
            [
                f"{str(path)!r} is no recording of this raypar's: "
                f"{'.'.join(map(str, one['loc']))} is {brief(one['input'])}: {one['msg']}"
                for one in error.errors(include_url=False)
            ]
        ) from error
    if faults := [f"{str(path)!r} is no recording of this raypar's: {fault}" for fault in _odd(about, tensors)]:
        raise ConfigError(faults)
    return about, tensors


def _odd(about: Recorded, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Why no stage can have left such a recording behind."""
    if about.format != _FORMAT:
        yield f"it is {brief(about.format)}"
    if list(about.layers) != sorted(set(about.layers)):
        yield f"its layers are {brief(list(about.layers))}"
    done = set[str]()
    for action in about.actions:
        known = _ACTION.fullmatch(action) and action not in done
        if not known or (action[0] == "B" and f"F{action[1:]}" not in done):
            yield f"its actions are {brief(list(about.actions))}"
            return
        if action[0] == "F" and f"{action}/inputs/0" not in tensors:
            yield f"it has no inputs of {action}"
        done.add(action)


def _sha256(tensors: Mapping[str, Tensor]) -> Tensor:
    import torch

    from raypar.actors.digest import digest

    return torch.frombuffer(bytearray(digest(dict(sorted(tensors.items())))), dtype=torch.uint8)


@cache
def _reader() -> TypeAdapter[Any]:
    return TypeAdapter(Recorded)
