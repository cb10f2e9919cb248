"""Recordings of one stage in one step: a safetensors file with all that it was given and has made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from raypar.actors.disk import CheckpointError
from raypar.actors.plan import DeviceKind
from raypar.actors.recompute import Recompute
from raypar.actors.shards import read_shard, write_shard
from raypar.config import ConfigError
from raypar.fields import brief

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "raypar recording 1"
_ABOUT = "about"  # the tensor that holds what is not a tensor, as JSON
_ACTION = re.compile(r"[FB][0-9]{1,9}")


@dataclass(frozen=True)
class Recorded:
    """What a recording is of; its tensors are named as Tape names them.

    layers   of the stage, by their number in the model
    actions  ``F3``, ``B3``: in the order in which they were done, with the microbatch's number in the whole step
    model    as a run's TOML writes it
    """

    actor: str
    stage: int
    step: int
    layers: tuple[int, ...]
    is_last: bool
    actions: tuple[str, ...]
    model: dict[str, JsonValue]
    seed: int
    recompute: Recompute
    threads: int
    device: DeviceKind
    format: str = _FORMAT


def write_recording(path: Path, about: Recorded, tensors: Mapping[str, Tensor]) -> None:
    """Write a recording: aside, then renamed. Raises CheckpointError."""
    import torch

    text = torch.frombuffer(bytearray(to_json(asdict(about))), dtype=torch.uint8)
    write_shard(path.parent, path.name, {**tensors, _ABOUT: text})


def read_recording(path: Path) -> tuple[Recorded, dict[str, Tensor]]:
    """What a recording is of, and its tensors, which are mapped. Raises ConfigError for any other file."""
    path = path.expanduser().absolute()
    try:
        tensors = read_shard(path.parent, path.name)
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
    if about.format != _FORMAT or not all(_ACTION.fullmatch(action) for action in about.actions):
        raise ConfigError([f"{str(path)!r} is no recording of this raypar's: it is {brief(about.format)}"])
    return about, tensors


@cache
def _reader() -> TypeAdapter[Any]:
    return TypeAdapter(Recorded)
